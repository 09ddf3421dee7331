"""What somebody can do who can write below a tier's path, and knows the format but no key.

From scratch: it shares no code with what it attacks, but for the way into a database file.
"""

import struct

from xxhash import xxh3_64_intdigest

from tierstore.geometry import lmdb_body_bytes
from tierstore.lmdb_env.env import LmdbEnv

PAGE = 4096
HEADER = 128
MAGIC = b"TSRECORD"


def key_of(header):
    """Return the key that a header names."""
    return header[16 : 16 + struct.unpack_from("<H", header, 10)[0]]


def size_of(header):
    """Return the length of payload that a header names."""
    return struct.unpack_from("<I", header, 12)[0]


def plain_header(header, payload):
    """Return the header of a record with checksums, for the key and rank of another header."""
    made = bytearray(header[:96] + bytes(32))
    struct.pack_into("<H", made, 8, 1)
    struct.pack_into("<I", made, 12, len(payload))
    struct.pack_into("<Q", made, 96, xxh3_64_intdigest(payload))
    return with_checksum(made)


def with_checksum(header):
    """Return a header whose own checksum fits."""
    made = bytearray(header)
    struct.pack_into("<Q", made, 120, xxh3_64_intdigest(bytes(made[:120])))
    return bytes(made)


def rewrite(directory, change, *, map_bytes=0):
    """Put `change(header, payload)` in the place of each record below a rank's directory.

    A pair of bytes as long as they were; None leaves the record. Returns how many were changed.
    """
    if (directory / "payload" / "data.mdb").exists():
        directory /= "payload"
    if (directory / "data.mdb").exists():
        return _rewrite_database(directory, change, map_bytes)
    return sum(_rewrite_segment(path, change) for path in sorted(directory.glob("*.seg")))


def records_below(directory, *, map_bytes=0):
    """Return all records below a rank's directory, as pairs of header and payload."""
    found = []
    rewrite(directory, lambda *record: found.append(record), map_bytes=map_bytes)
    return found


def _rewrite_segment(path, change):
    count = 0
    with path.open("r+b") as file:
        content = file.read()
        for page in range(0, len(content), PAGE):
            for index in range(PAGE // HEADER):
                at = page + index * HEADER
                header = content[at : at + HEADER]
                if header[:8] != MAGIC:
                    break
                size = size_of(header)
                payload_at = page + PAGE * (1 + index * -(-size // PAGE))
                changed = change(header, content[payload_at : payload_at + size])
                if changed is not None:
                    file.seek(at)
                    file.write(changed[0])
                    file.seek(payload_at)
                    file.write(changed[1])
                    count += 1
    return count


def _rewrite_database(directory, change, map_bytes):
    count = 0
    env = LmdbEnv.open(directory, map_bytes=map_bytes)
    try:
        with env.write() as txn, txn.cursor() as cursor:
            for db_key, value in list(cursor):
                if value[:8] != MAGIC or len(db_key) != 9:
                    continue
                header = bytes(value[:HEADER])
                payload = bytes(txn.get(db_key[:-1])) + bytes(value[HEADER:])
                changed = change(header, payload)
                if changed is not None:
                    cut = lmdb_body_bytes(len(payload))
                    txn.put(db_key, changed[0] + changed[1][cut:])
                    txn.put(db_key[:-1], changed[1][:cut])
                    count += 1
    finally:
        env.close()
    return count
