"""Data files of LMDB environments: written by the library, taken apart, damaged."""

import os
import random
import shutil

import lmdb
import numpy as np

from tierstore.lmdb_env.page import DB_DTYPE, META_DTYPE
from tierstore.lmdb_env.verify import find_damage

PAGE = 4096


def verdict(path, map_bytes=1 << 26):
    descriptor = os.open(path / "data.mdb", os.O_RDONLY)
    try:
        return find_damage(descriptor, page_count_max=map_bytes // PAGE)
    finally:
        os.close(descriptor)


def open_env(path):
    return lmdb.open(
        str(path), map_size=1 << 26, max_dbs=4, sync=False, metasync=False, meminit=False
    )


def write_image(path):
    """Write an environment with every kind of page; close it."""
    dice = random.Random(1)
    env = open_env(path)
    rows, large = env.open_db(b"rows"), env.open_db(b"large")
    for start in range(0, 3000, 500):
        with env.begin(write=True) as txn:
            for number in range(start, start + 500):
                txn.put(b"%08d" % number, dice.randbytes(40), db=rows)
            for number in range(start, start + 5):
                txn.put(b"%08d" % number, dice.randbytes(10_000), db=large)
    with env.begin(write=True) as txn:
        for number in range(0, 3000, 7):
            txn.delete(b"%08d" % number, db=rows)
        txn.delete(b"%08d" % 500, db=large)
    env.close()


class Image:
    """A copy of an environment's file, and where things lie in it."""

    def __init__(self, template, path):
        self.path = path
        shutil.copy(template / "data.mdb", path / "data.mdb")
        self.bytes = np.fromfile(path / "data.mdb", np.uint8)
        metas = [self.bytes[start:].view()[: META_DTYPE.itemsize] for start in (0, PAGE)]
        metas = [meta.view(META_DTYPE)[0] for meta in metas]
        self.current = int(metas[1]["transaction"] > metas[0]["transaction"])
        self.meta = metas[self.current]
        pages = self.bytes.reshape(-1, PAGE)
        # The leaf of the main database holds the MDB_db of the named ones.
        main = pages[int(self.meta["main"]["root"])]
        self.main_page = int(self.meta["main"]["root"])
        at = int(main[16:18].view("<u2")[0])
        key_bytes = int(main[at + 6 : at + 8].view("<u2")[0])
        self.row_at = self.main_page * PAGE + at + 8 + key_bytes
        self.row = self.bytes[self.row_at : self.row_at + DB_DTYPE.itemsize].view(DB_DTYPE)[0]
        # Names are in order: `large` comes first, whose values are overflow runs.
        self.large_leaf = int(self.row["root"])
        leaf = pages[self.large_leaf]
        self.big_node = self.large_leaf * PAGE + int(leaf[16:18].view("<u2")[0])
        self.run = int(self.u64(self.big_node + 8 + 8))
        second = int(main[18:20].view("<u2")[0])
        self.rows_at = at = self.main_page * PAGE + second + 8 + 4
        rows = self.bytes[at : at + DB_DTYPE.itemsize].view(DB_DTYPE)[0]
        self.branch = int(rows["root"])
        self.first_child = self.branch * PAGE + int(pages[self.branch][16:18].view("<u2")[0])
        self.leaf = int(self.u32(self.first_child))
        second_child = self.branch * PAGE + int(pages[self.branch][18:20].view("<u2")[0])
        self.next_leaf = int(self.u32(second_child))
        count = (int(pages[self.leaf][12:14].view("<u2")[0]) - 16) // 2
        self.offsets = pages[self.leaf][16 : 16 + 2 * count].view("<u2").tolist()
        self.node = self.leaf * PAGE + int(pages[self.leaf][16:18].view("<u2")[0])
        self.free_leaf = int(self.meta["free"]["root"])

    def u32(self, at):
        return self.bytes[at : at + 4].view("<u4")[0]

    def u64(self, at):
        return int.from_bytes(self.bytes[at : at + 8].tobytes(), "little")

    def verdict_after(self, at, value, width):
        with (self.path / "data.mdb").open("r+b") as file:
            file.seek(at)
            file.write((value % (1 << 8 * width)).to_bytes(width, "little"))
        return verdict(self.path)
