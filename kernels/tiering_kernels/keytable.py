"""Tables from keys to whole numbers, asked and changed a batch at a time.

In C where the library is there, else over a dict; both do the same. They differ in speed: a dict
waits for memory key by key, and now and then copies itself for milliseconds. One owner, no lock,
and the interpreter lock is kept: a call takes microseconds, and getting the lock back could take
thousands.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate, compress, pairwise, repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tiering_kernels import library

Values = npt.NDArray[np.int64]

ABSENT = -1
KEY_BYTES_MAX = 255


class KeyTable(Protocol):
    """Keys of at most KEY_BYTES_MAX bytes; values from 0 on. Keys of one call must differ."""

    def __len__(self) -> int: ...

    def get(self, keys: Sequence[bytes]) -> Values:
        """The value of each key, or ABSENT; the caller may keep and change the array."""
        ...

    def value_of(self, key: bytes) -> int:
        """As `get`, for who has only one key."""
        ...

    def put(self, keys: Sequence[bytes], values: Values | int) -> None:
        """Each key has its value from now on, or all of them the same one."""
        ...

    def pop(self, keys: Sequence[bytes]) -> Values:
        """Take `keys` out: the value of each, or ABSENT."""
        ...

    def keys(self) -> list[bytes]:
        """All of them, in no particular order."""
        ...

    def mark(self, keys: Sequence[bytes], marks: bytearray, found: int, missing: int) -> None:
        """Raise each key's mark to `found` if it is here, else to `missing`; a mark that is higher
        stays."""
        ...


class KeyBatch(tuple[bytes, ...]):
    """Keys that several tables are asked about: what native code is handed is made once."""

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> KeyBatch:
        return keys if isinstance(keys, cls) else cls(keys)

    @cached_property
    def packed(self) -> tuple[bytes, bytes]:
        return _packed(self)


def select(keys: Sequence[bytes], are: npt.NDArray[np.bool_]) -> Sequence[bytes]:
    """Those of `keys` for which it is so; the same object where that is all of them."""
    return keys if are.all() else KeyBatch(compress(keys, are.tolist()))


def open_table() -> KeyTable:
    """An empty table, of the fastest kind that works here."""
    native = _native()
    return DictTable() if native is None else NativeTable(native)


class DictTable:
    """See KeyTable."""

    def __init__(self) -> None:
        self._values: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, keys: Sequence[bytes]) -> Values:
        return np.fromiter(map(self._values.get, keys, repeat(ABSENT)), np.int64, len(keys))

    def value_of(self, key: bytes) -> int:
        return self._values.get(key, ABSENT)

    def put(self, keys: Sequence[bytes], values: Values | int) -> None:
        each = repeat(values) if isinstance(values, int) else values.tolist()
        self._values.update(zip(keys, each, strict=False))

    def pop(self, keys: Sequence[bytes]) -> Values:
        return np.fromiter(map(self._values.pop, keys, repeat(ABSENT)), np.int64, len(keys))

    def keys(self) -> list[bytes]:
        return list(self._values)

    def mark(self, keys: Sequence[bytes], marks: bytearray, found: int, missing: int) -> None:
        told = map({True: found, False: missing}.__getitem__, map(self._values.__contains__, keys))
        marks[:] = map(max, marks, told)


class NativeTable:
    """See KeyTable; csrc/keytable.c."""

    def __init__(self, native: ctypes.PyDLL) -> None:
        self._native = native
        # Not the same for everyone, so that nobody can choose keys that fall together.
        self._table = native.kvt_table_new(hash("kv-tiering") & (2**64 - 1))
        if not self._table:
            raise MemoryError("no memory for a table of keys")
        self._use(np.empty(64, np.int64))

    def __del__(self) -> None:
        if getattr(self, "_table", None):
            self._native.kvt_table_free(self._table)

    def __len__(self) -> int:
        count: int = self._native.kvt_table_count(self._table)
        return count

    def __deepcopy__(self, memo: dict[int, object]) -> NativeTable:
        twin, keys = NativeTable(self._native), self.keys()
        twin.put(keys, self.get(keys))
        return twin

    def get(self, keys: Sequence[bytes]) -> Values:
        return self._get(keys, 0)

    def value_of(self, key: bytes) -> int:
        value: int = self._native.kvt_table_value_of(self._table, key, len(key))
        return value

    def put(self, keys: Sequence[bytes], values: Values | int) -> None:
        count = len(keys)
        self._room_for(count)[:count] = values
        blob, lengths = _packed_of(keys)
        done = self._native.kvt_table_put(self._table, blob, lengths, count, self._address)
        if done < count:
            raise MemoryError("no memory for more keys")

    def pop(self, keys: Sequence[bytes]) -> Values:
        return self._get(keys, 1)

    def keys(self) -> list[bytes]:
        count = len(self)
        lengths = ctypes.create_string_buffer(count)
        keys = ctypes.create_string_buffer(count * KEY_BYTES_MAX)
        self._room_for(count)
        self._native.kvt_table_list(self._table, keys, lengths, self._address)
        ends = accumulate(lengths.raw[:count], initial=0)
        blob = keys.raw
        return [blob[start:end] for start, end in pairwise(ends)]

    def mark(self, keys: Sequence[bytes], marks: bytearray, found: int, missing: int) -> None:
        if len(marks) != len(keys):
            raise ValueError(f"{len(marks)} marks for {len(keys)} keys")
        blob, lengths = _packed_of(keys)
        at = ctypes.addressof(ctypes.c_char.from_buffer(marks)) if keys else None
        self._native.kvt_table_mark(self._table, blob, lengths, len(keys), at, found, missing)

    def _get(self, keys: Sequence[bytes], take: int) -> Values:
        count = len(keys)
        found = self._room_for(count)
        blob, lengths = _packed_of(keys)
        self._native.kvt_table_get(self._table, blob, lengths, count, self._address, take)
        return found[:count].copy()

    def _room_for(self, count: int) -> Values:
        """Memory that native code reads values from and writes them to."""
        if count > len(self._values):
            self._use(np.empty(2 * count, np.int64))
        return self._values

    def _use(self, values: Values) -> None:
        self._values = values
        self._address = values.ctypes.data


def _packed_of(keys: Sequence[bytes]) -> tuple[bytes, bytes]:
    return keys.packed if isinstance(keys, KeyBatch) else _packed(keys)


def _packed(keys: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The keys one after the other, and their lengths."""
    try:
        return b"".join(keys), bytes(map(len, keys))
    except ValueError:
        longest = max(map(len, keys))
        raise ValueError(f"a key of {longest} bytes, more than {KEY_BYTES_MAX}") from None


@cache
def _native() -> ctypes.PyDLL | None:
    native = library.kept()
    if native is None:
        return None
    handle, count, out = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p
    keys = (ctypes.c_char_p, ctypes.c_char_p)
    native.kvt_table_new.argtypes = (ctypes.c_uint64,)
    native.kvt_table_new.restype = handle
    native.kvt_table_free.argtypes = (handle,)
    native.kvt_table_free.restype = None
    native.kvt_table_count.argtypes = (handle,)
    native.kvt_table_count.restype = count
    native.kvt_table_get.argtypes = (handle, *keys, count, out, ctypes.c_int)
    native.kvt_table_get.restype = None
    native.kvt_table_value_of.argtypes = (handle, ctypes.c_char_p, count)
    native.kvt_table_value_of.restype = ctypes.c_int64
    native.kvt_table_put.argtypes = (handle, *keys, count, out)
    native.kvt_table_put.restype = count
    native.kvt_table_mark.argtypes = (handle, *keys, count, out, ctypes.c_uint8, ctypes.c_uint8)
    native.kvt_table_mark.restype = None
    native.kvt_table_list.argtypes = (handle, handle, handle, out)
    native.kvt_table_list.restype = None
    return native
