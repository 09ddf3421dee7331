"""Records to write or read as arrays: what one I/O task hands to a backend."""

from collections.abc import Iterator, Sequence
from typing import Self, overload

import numpy as np
import numpy.typing as npt

from tierstore.backend.protocol import RecordIo
from tierstore.device.system import buffer_address
from tierstore.key import OffloadKey
from tierstore.transfer import Place, PlaceArray, place_array

__all__ = ["RecordBatch"]


class RecordBatch(Sequence[RecordIo]):
    """A sequence of `RecordIo` that also gives its fields as arrays, without an object per record.

    Keeps the memory of all slots alive. Not changed once it is made; slices are batches again.
    """

    __slots__ = ("_memory", "addresses", "keys", "places", "slot_bytes")

    def __init__(
        self,
        keys: Sequence[OffloadKey],
        places: PlaceArray,
        memory: "_Pool | _Slots",
    ) -> None:
        """Use `in_pool` or `of`."""
        self.keys = keys
        self.places = places
        """Shape (records,): items as wide as a place, or bytes objects if the widths differ."""
        self.addresses: npt.NDArray[np.uint64] = memory.addresses
        """Virtual address of each slot; valid as long as the batch lives."""
        self.slot_bytes: npt.NDArray[np.int64] = memory.slot_bytes
        """Length of each slot."""
        self._memory = memory

    @classmethod
    def in_pool(
        cls,
        keys: Sequence[OffloadKey],
        places: Sequence[Place] | PlaceArray,
        pool: memoryview,
        offsets: npt.NDArray[np.int64],
        slot_bytes: int,
    ) -> Self:
        """Pair records with slots of `slot_bytes` each, which lie in `pool` from `offsets` on.

        A slot that begins or ends outside of the pool is cut off, as a slice would be; backends
        refuse records whose slots have another length than their places.

        Raises:
            ValueError: there are not as many keys and places as offsets.
        """
        if not len(keys) == len(places) == len(offsets):
            raise ValueError(
                f"expected as many keys and places as slots, "
                f"got {len(keys)}, {len(places)}, {len(offsets)}"
            )
        return cls(keys, place_array(places), _Pool.cut(pool, offsets, slot_bytes))

    @classmethod
    def of(cls, records: Sequence[RecordIo]) -> "RecordBatch":
        """Return the records as a batch; a batch is returned as it is.

        Raises:
            ValueError: a slot is not contiguous memory.
        """
        if isinstance(records, RecordBatch):
            return records
        return cls(
            [record.key for record in records],
            place_array([record.place for record in records]),
            _Slots.of([record.slot for record in records]),
        )

    def require_writable(self) -> None:
        """Refuse slots that may not be written: who has their addresses would not notice.

        Raises:
            BufferError: there is one.
        """
        if self._memory.is_readonly:
            raise BufferError("a slot to read into is not writable")

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, chosen: int) -> RecordIo: ...
    @overload
    def __getitem__(self, chosen: slice) -> "RecordBatch": ...
    def __getitem__(self, chosen: int | slice) -> "RecordIo | RecordBatch":
        if isinstance(chosen, slice):
            return RecordBatch(self.keys[chosen], self.places[chosen], self._memory.part(chosen))
        place = self.places[chosen]
        encoded = place if isinstance(place, bytes) else place.tobytes()
        return RecordIo(self.keys[chosen], Place(encoded), self._memory.slot(chosen))

    def __iter__(self) -> Iterator[RecordIo]:
        return map(self.__getitem__, range(len(self)))


class _Pool:
    """Slots in one buffer."""

    __slots__ = ("_buffer", "_offsets", "addresses", "slot_bytes")

    def __init__(
        self, buffer: memoryview, offsets: npt.NDArray[np.int64], slot_bytes: npt.NDArray[np.int64]
    ) -> None:
        self._buffer = buffer
        self._offsets = offsets
        self.addresses = offsets.astype(np.uint64)
        self.addresses += np.uint64(buffer_address(buffer))
        self.slot_bytes = slot_bytes

    @classmethod
    def cut(cls, buffer: memoryview, offsets: npt.NDArray[np.int64], slot_bytes: int) -> Self:
        # `np.minimum` takes a third of the time of `clip`.
        inside = np.minimum(np.where(offsets >= 0, offsets, buffer.nbytes), buffer.nbytes)
        return cls(buffer, inside, np.minimum(buffer.nbytes - inside, max(0, slot_bytes)))

    @property
    def is_readonly(self) -> bool:
        return self._buffer.readonly

    def part(self, chosen: slice) -> "_Pool":
        return _Pool(self._buffer, self._offsets[chosen], self.slot_bytes[chosen])

    def slot(self, index: int) -> memoryview:
        offset = int(self._offsets[index])
        return self._buffer[offset : offset + int(self.slot_bytes[index])]


class _Slots:
    """Slots that are buffers of their own."""

    __slots__ = ("_slots", "addresses", "slot_bytes")

    def __init__(
        self,
        slots: Sequence[memoryview],
        addresses: npt.NDArray[np.uint64],
        slot_bytes: npt.NDArray[np.int64],
    ) -> None:
        self._slots = slots
        self.addresses = addresses
        self.slot_bytes = slot_bytes

    @classmethod
    def of(cls, slots: Sequence[memoryview]) -> Self:
        addresses = np.array(list(map(buffer_address, slots)), np.uint64)
        return cls(slots, addresses, np.array([slot.nbytes for slot in slots], np.int64))

    @property
    def is_readonly(self) -> bool:
        return any(slot.readonly for slot in self._slots)

    def part(self, chosen: slice) -> "_Slots":
        return _Slots(self._slots[chosen], self.addresses[chosen], self.slot_bytes[chosen])

    def slot(self, index: int) -> memoryview:
        return self._slots[index]
