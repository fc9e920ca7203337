"""Memory that lets nobody write to it until it is told to: it holds up a read in the kernel.

The kernel asks `userfaultfd` for the page that a read fills, and the read waits for the answer.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct
from types import TracebackType

import pytest

_CALL = {"x86_64": 323, "aarch64": 282}
_API, _REGISTER, _ZEROPAGE = 0xC018AA3F, 0xC020AA00, 0xC020AA04
_MISSING = 1
_MESSAGE_BYTES = 32


class PageGate:
    """One page, `memory`, closed until `open`."""

    def __init__(self) -> None:
        number = _CALL.get(platform.machine())
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = -1 if number is None else libc.syscall(number, os.O_CLOEXEC)
        if self._descriptor < 0:
            pytest.skip(f"no userfaultfd here: {os.strerror(ctypes.get_errno())}")
        fcntl.ioctl(self._descriptor, _API, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
        page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memoryview(page)
        self._range = (ctypes.addressof(ctypes.c_char.from_buffer(page)), mmap.PAGESIZE)
        asked = bytearray(struct.pack("QQQQ", *self._range, _MISSING, 0))
        fcntl.ioctl(self._descriptor, _REGISTER, asked)

    def wait(self) -> None:
        """Until somebody is held up."""
        os.read(self._descriptor, _MESSAGE_BYTES)

    def open(self) -> None:
        fcntl.ioctl(self._descriptor, _ZEROPAGE, bytearray(struct.pack("QQQQ", *self._range, 0, 0)))

    def __enter__(self) -> PageGate:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)  # whoever is still held up goes on
