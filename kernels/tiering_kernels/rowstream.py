"""Rows through a connected socket, each with its checksum: one call for a batch, which blocks and,
in native code, lets go of the interpreter lock until it is over.

A row is a lead (8 bytes: 1, a row follows, or 0, it does not), its bytes, and a tail of 24: 1 or 0,
whether the slot still had its generation when the last byte had left, and XXH3-128 of what was
sent, low half first. All is little-endian. A slot's generation is raised before another chunk is
written to its row, so what was sent is right if it was the same before and after. The socket
blocks, and has the deadlines SO_RCVTIMEO and SO_SNDTIMEO: a call that moves nothing for so long has
failed. Another thread may `shutdown` it, which ends the call. While rows are received its
SO_RCVLOWAT may be another, and is 1 afterwards. Owns nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from tiering_kernels.chunkio import EngineUnavailable
from tiering_kernels.native import with_checksums

Rows = npt.NDArray[np.uint8]
Generations = npt.NDArray[np.uint64]

LEAD = struct.Struct("<Q")
TAIL = struct.Struct("<QQQ")
STALE, ROW = 0, 1

_BYTE = ctypes.c_char
_DAMAGED, _NONSENSE, _ENDED = -100_003, -100_004, -100_005
_TOLD = {
    _DAMAGED: "a row came damaged: its checksum is not that of what was sent",
    _NONSENSE: "an answer that means nothing",
    _ENDED: "the other side has closed the connection",
    -errno.ETIMEDOUT: "nothing moved for too long",
}


class StreamEnded(Exception):
    """It went no further, and why. `came` are the rows before: for each, whether it is right."""

    def __init__(self, why: str, came: list[bool]) -> None:
        super().__init__(why)
        self.came = came


class RowStream(Protocol):
    """One way of doing it. Buffers are contiguous; `into` are writable and of row_bytes."""

    def send(
        self,
        over: socket.socket,
        rows: Rows,
        generations: Generations,
        slots: Sequence[int],
        wanted: Sequence[int],
    ) -> None:
        """Send row `slots[i]` if it has the generation `wanted[i]`. StreamEnded, or OSError."""
        ...

    def receive(self, over: socket.socket, into: Sequence[memoryview]) -> list[bool]:
        """Fill `into`, in order; for each, whether it is the row that was asked for, verified.
        StreamEnded, or OSError."""
        ...


@cache
def row_stream() -> RowStream:
    """The native one, or the portable where there is no native code."""
    try:
        return NativeStream()
    except EngineUnavailable:
        return PortableStream()


class NativeStream:
    """See RowStream."""

    def __init__(self) -> None:
        """EngineUnavailable where there is no native code."""
        self._library = with_checksums()
        send, receive = self._library.kvt_send_rows, self._library.kvt_receive_rows
        send.restype = ctypes.c_int64
        send.argtypes = (
            *(ctypes.c_int, ctypes.c_uint32),
            *(ctypes.c_void_p,) * 4,
            *(ctypes.c_uint64,) * 2,
        )
        receive.restype = ctypes.c_uint32
        receive.argtypes = (
            *(ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64),
            *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)),
        )

    def send(
        self,
        over: socket.socket,
        rows: Rows,
        generations: Generations,
        slots: Sequence[int],
        wanted: Sequence[int],
    ) -> None:
        numbers, expected = array("Q", slots), array("Q", wanted)
        failed = self._library.kvt_send_rows(
            over.fileno(),
            len(numbers),
            numbers.buffer_info()[0],
            expected.buffer_info()[0],
            rows.ctypes.data,
            generations.ctypes.data,
            *rows.shape,
        )
        if failed:
            raise StreamEnded(_told(failed), [])

    def receive(self, over: socket.socket, into: Sequence[memoryview]) -> list[bool]:
        held = list(map(_BYTE.from_buffer, into))  # the buffers, until the call is over
        addresses = array("Q", map(ctypes.addressof, held))
        results, failed = array("B", bytes(len(into))), ctypes.c_int64()
        came = self._library.kvt_receive_rows(
            over.fileno(),
            len(into),
            addresses.buffer_info()[0],
            into[0].nbytes if into else 0,
            results.buffer_info()[0],
            ctypes.byref(failed),
        )
        del held
        rows = [result == ROW for result in results[:came]]
        if failed.value:
            raise StreamEnded(_told(failed.value), rows)
        return rows


class PortableStream:
    """See RowStream."""

    def send(
        self,
        over: socket.socket,
        rows: Rows,
        generations: Generations,
        slots: Sequence[int],
        wanted: Sequence[int],
    ) -> None:
        def has(slot: int, generation: int) -> bool:
            return slot < len(generations) and int(generations[slot]) == generation

        for slot, generation in zip(slots, wanted, strict=True):
            if not has(slot, generation):
                _send(over, LEAD.pack(STALE))
                continue
            _send(over, LEAD.pack(ROW))
            row = memoryview(rows[slot])
            checksum = xxhash.xxh3_128()
            while row:
                sent = _moved(over.send, row)
                checksum.update(row[:sent])
                row = row[sent:]
            verdict = ROW if has(slot, generation) else STALE
            low, high = _halves(checksum)
            _send(over, TAIL.pack(verdict, low, high))

    def receive(self, over: socket.socket, into: Sequence[memoryview]) -> list[bool]:
        came: list[bool] = []
        try:
            for buffer in into:
                came.append(self._receive_row(over, buffer))
        except StreamEnded as error:
            raise StreamEnded(str(error), came) from None
        return came

    def _receive_row(self, over: socket.socket, into: memoryview) -> bool:
        (lead,) = LEAD.unpack(_receive(over, memoryview(bytearray(LEAD.size))))
        if lead == STALE:
            return False
        if lead != ROW:
            raise StreamEnded(_TOLD[_NONSENSE], [])
        # In one go: whatever is in it now is what is compared.
        found = xxhash.xxh3_128(_receive(over, into))
        verdict, *halves = TAIL.unpack(_receive(over, memoryview(bytearray(TAIL.size))))
        if verdict == STALE:
            return False
        if verdict != ROW or tuple(halves) != _halves(found):
            raise StreamEnded(_TOLD[_DAMAGED], [])
        return True


def _halves(checksum: xxhash.xxh3_128) -> tuple[int, int]:
    value = checksum.intdigest()
    return value & (2**64 - 1), value >> 64


def _send(over: socket.socket, what: bytes) -> None:
    left = memoryview(what)
    while left:
        left = left[_moved(over.send, left) :]


def _receive(over: socket.socket, into: memoryview) -> memoryview:
    left = into
    while left:
        left = left[_moved(over.recv_into, left) :]
    return into


def _moved(call: object, view: memoryview) -> int:
    assert callable(call)
    try:
        moved: int = call(view)
    except BlockingIOError as error:
        raise StreamEnded(_TOLD[-errno.ETIMEDOUT], []) from error
    except OSError as error:
        raise StreamEnded(_told(-(error.errno or errno.EIO)), []) from error
    if moved == 0:
        raise StreamEnded(_TOLD[_ENDED], [])
    return moved


def _told(failed: int) -> str:
    return _TOLD.get(failed) or f"the connection broke: {os.strerror(-failed)}"
