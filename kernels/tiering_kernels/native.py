"""The engines in C: a batch is one call without the interpreter lock, by io_uring or threads.

Hands the library that `hatch_build.py` compiles from `csrc` the XXH3-128 of the `xxhash` package,
so that there is one implementation of the checksum, not two. `uring` keeps several items of a batch
in flight from the calling thread; `threads` moves one after the other, and is as parallel as its
callers. Where a thread cannot have a ring for now (no descriptor, no memory), `uring` does its
batch as `threads` would.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import xxhash

from tiering_kernels import library
from tiering_kernels.chunkio import Engine, EngineUnavailable, check_batch

LIBRARY = Path(library.LIBRARY)

_READ_FILES, _WRITE_FILES, _READ_SLOTS, _WRITE_SLOTS = range(4)
_BYTE = ctypes.c_char
_TRIED_BYTES = 8209  # more than the library's buffers, and no whole number of anything


class _Batch(ctypes.Structure):
    """`struct batch` of csrc/native.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("paths", ctypes.c_char_p),
        ("finals", ctypes.c_char_p),
        ("reuse", ctypes.c_char_p),
        ("descriptors", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("headers", ctypes.c_void_p),
        ("payloads", ctypes.c_void_p),
        ("payload_bytes", ctypes.c_uint64),
        ("results", ctypes.c_void_p),
        ("direct", ctypes.c_int32),
        ("sync", ctypes.c_int32),
    )


class NativeIo:
    """See `tiering_kernels.chunkio.ChunkIo`."""

    def __init__(self, engine: Engine) -> None:
        """EngineUnavailable where `engine` cannot work here; `portable` is none of these."""
        if engine == "portable":
            raise ValueError("the engine portable is not native")
        self._library = _loaded(LIBRARY)
        self._engine: Engine = engine
        if engine == "uring" and (error := self._library.kvt_check_ring()) != 0:
            raise EngineUnavailable(f"uring: no io_uring here: {_why_no_ring(-error)}")

    @property
    def engine(self) -> Engine:
        return self._engine

    def __repr__(self) -> str:
        return f"<NativeIo {self._engine}>"

    def sizes(self, paths: Sequence[str]) -> list[int]:
        results = array("q", bytes(8 * len(paths)))
        self._library.kvt_sizes(len(paths), _joined(paths), results.buffer_info()[0])
        return results.tolist()

    def read_files(
        self,
        paths: Sequence[str],
        headers: memoryview,
        payloads: Sequence[memoryview],
        direct: bool,
    ) -> list[int]:
        batch = _Batch(_READ_FILES, paths=_joined(paths), direct=direct)
        return self._run(batch, headers, payloads, (len(paths),))

    def write_files(
        self,
        temps: Sequence[str],
        finals: Sequence[str],
        headers: memoryview,
        payloads: Sequence[memoryview],
        reuse: Sequence[bool],
        direct: bool,
        sync: bool,
    ) -> list[int]:
        batch = _Batch(
            _WRITE_FILES,
            paths=_joined(temps),
            finals=_joined(finals),
            reuse=bytes(reuse),
            direct=direct,
            sync=sync,
        )
        return self._run(batch, headers, payloads, (len(temps), len(finals), len(reuse)))

    def read_slots(
        self,
        descriptors: Sequence[int],
        offsets: Sequence[int],
        headers: memoryview,
        payloads: Sequence[memoryview],
    ) -> list[int]:
        return self._run_slots(_READ_SLOTS, descriptors, offsets, headers, payloads)

    def write_slots(
        self,
        descriptors: Sequence[int],
        offsets: Sequence[int],
        headers: memoryview,
        payloads: Sequence[memoryview],
    ) -> list[int]:
        return self._run_slots(_WRITE_SLOTS, descriptors, offsets, headers, payloads)

    def _run_slots(
        self,
        kind: int,
        descriptors: Sequence[int],
        offsets: Sequence[int],
        headers: memoryview,
        payloads: Sequence[memoryview],
    ) -> list[int]:
        numbers, places = array("q", descriptors), array("q", offsets)
        batch = _Batch(kind, descriptors=numbers.buffer_info()[0], offsets=places.buffer_info()[0])
        return self._run(batch, headers, payloads, (len(numbers), len(places)))

    def _run(
        self,
        batch: _Batch,
        headers: memoryview,
        payloads: Sequence[memoryview],
        lengths: tuple[int, ...],
    ) -> list[int]:
        fills = batch.kind in (_READ_FILES, _READ_SLOTS)
        writable = check_batch(headers, payloads, *lengths, fills=fills)
        count = len(payloads)
        if count == 0:
            return []
        batch.payload_bytes = payloads[0].nbytes
        # These hold the buffers until the call is over, and no longer.
        held_headers = _BYTE.from_buffer(headers)
        addresses, held = _addresses(payloads, writable)
        results = array("q", bytes(8 * count))
        batch.count = count
        batch.headers = ctypes.addressof(held_headers)
        batch.payloads = addresses.buffer_info()[0]
        batch.results = results.buffer_info()[0]
        self._library.kvt_run(batch, self._engine == "uring")
        del held_headers, held
        return results.tolist()


def with_checksums() -> ctypes.CDLL:
    """The library, for whoever needs checksums of it; EngineUnavailable where it cannot be had."""
    return _loaded(LIBRARY)


def _joined(paths: Sequence[str]) -> bytes:
    joined = "\0".join(paths).encode(sys.getfilesystemencoding(), "surrogateescape")
    if joined.count(b"\0") != max(0, len(paths) - 1):
        raise ValueError("embedded null byte in a path")
    return joined


def _addresses(payloads: Sequence[memoryview], writable: bool) -> tuple[array[int], object]:
    """Where the payloads are, and what holds them there."""
    if writable:
        views = list(map(_BYTE.from_buffer, payloads))
        return array("Q", map(ctypes.addressof, views)), views
    # Seven times as slow, but takes what is read-only.
    arrays = [np.frombuffer(payload, np.uint8) for payload in payloads]
    return array("Q", [it.__array_interface__["data"][0] for it in arrays]), arrays


def _why_no_ring(error: int) -> str:
    hints = {
        errno.ENOSYS: "this kernel, or the one that kv-tiering was built on, is without it",
        errno.EPERM: "forbidden by the container's seccomp profile or kernel.io_uring_disabled",
        errno.EOPNOTSUPP: "this kernel's is too old, 5.6 is needed",
    }
    hint = hints.get(error)
    return f"{os.strerror(error)} ({hint})" if hint else os.strerror(error)


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    """The library at `path`, with a checksum that has been tried."""
    if not path.exists():
        raise EngineUnavailable(
            f"no native code: {path.name} was not built; install a C compiler, then kv-tiering anew"
        )
    native = library.load(str(path), ctypes.CDLL)
    native.kvt_sources.restype = ctypes.c_char_p
    native.kvt_use_hash.restype = None
    native.kvt_run.argtypes = (ctypes.POINTER(_Batch), ctypes.c_int)
    native.kvt_run.restype = None
    native.kvt_sizes.argtypes = (ctypes.c_int32, ctypes.c_char_p, ctypes.c_void_p)
    native.kvt_sizes.restype = None
    native.kvt_checksum.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_void_p)
    native.kvt_checksum.restype = None
    _give_hash(native)
    return native


def _give_hash(library: ctypes.CDLL) -> None:
    """Have `library` compute checksums with the code behind the `xxhash` package."""
    for hashes in _hash_libraries():
        functions = _hash_functions(hashes)
        if functions is None:
            continue
        library.kvt_use_hash(functions)
        if _hashes_alike(library):
            return
    raise EngineUnavailable(
        "no XXH3-128 for native code: neither the xxhash package nor a system library has it"
    )


def _hash_libraries() -> Iterator[ctypes.CDLL]:
    for find in (_xxhash_extension, lambda: ctypes.util.find_library("xxhash")):
        try:
            if (name := find()) is not None:
                yield ctypes.CDLL(name)
        except (ImportError, OSError):
            continue


def _xxhash_extension() -> str | None:
    return import_module("xxhash._xxhash").__file__


def _hash_functions(hashes: ctypes.CDLL) -> ctypes.Array[ctypes.c_void_p] | None:
    """`struct hash_functions` of csrc/native.h, or None where one is missing."""
    # The dispatching update takes the processor's widest vectors; not every build has it.
    wanted = (
        ("XXH3_createState",),
        ("XXH3_freeState",),
        ("XXH3_128bits_reset",),
        ("XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
        ("XXH3_128bits_digest",),
    )
    found = (ctypes.c_void_p * len(wanted))()
    for place, names in enumerate(wanted):
        functions = [getattr(hashes, name) for name in names if hasattr(hashes, name)]
        if not functions:
            return None
        found[place] = ctypes.cast(functions[0], ctypes.c_void_p)
    return found


def _hashes_alike(library: ctypes.CDLL) -> bool:
    tried = bytes(i * 131 % 251 for i in range(_TRIED_BYTES))
    high_low = array("Q", [0, 0])
    library.kvt_checksum(tried, len(tried), high_low.buffer_info()[0])
    value = high_low[0] << 64 | high_low[1]
    return value == xxhash.xxh3_128_intdigest(tried)
