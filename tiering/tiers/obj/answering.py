"""An HTTP/1.1 answer out of the bytes that come: its head, and where each byte of its body goes.

Pure: no socket, no clock. A body whose length is told and fits goes straight into the caller's
buffers, which `room` hands out one after the other; all else is kept, in chunks or not, up to a
limit. What is no HTTP is an error, and so is a body that is not as long as the buffers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tiering.tiers.obj.dialect import Answer
from tiering.tiers.obj.store import LengthError, StoreError

_HEAD_BYTES_MAX = 64 << 10
# Of what is kept of an answer: a page of 1,000 of the longest names is half of that.
_KEPT_BYTES_MAX = 8 << 20
# Of a length; Python's own limit is larger and raises another error.
_DIGITS_MAX = 18
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: |$)")
_END = b"\r\n\r\n"


class NoHttpError(Exception):
    """The text says what came instead."""


class Answering:
    """One answer. `into`: where the body of status 200 goes, which is as long as they are together;
    else it is kept. `whole` is the answer, once `is_whole`."""

    def __init__(self, into: Sequence[memoryview] | None, *, has_body: bool = True) -> None:
        self._views = None if into is None else [view.cast("B") for view in into if view.nbytes]
        self._want = sum(map(len, self._views or ()))
        self._has_body = has_body
        self._head = bytearray(_HEAD_BYTES_MAX)
        self._filled = 0
        self._status = 0
        self._headers: dict[str, str] = {}
        self._kept = bytearray()
        self._got = 0
        # Bytes of the body that are to come; None where only its end tells.
        self._left: int | None = 0
        self._chunks: _Chunks | None = None
        self.is_whole = False
        self.keeps_alive = True
        """Whether another request may follow on the connection."""

    @property
    def is_begun(self) -> bool:
        return self._status > 0 or self._filled > 0

    @property
    def whole(self) -> Answer:
        return Answer(self._status, self._headers, bytes(self._kept))

    def room(self) -> memoryview:
        """Where the next bytes are to go, never empty; `came` says how many did."""
        if self._goes_straight:
            assert self._views is not None
            return self._views[0]
        return memoryview(self._head)[self._filled :]

    def came(self, count: int) -> None:
        """Raises NoHttpError, LengthError or StoreError, after which nothing is to come."""
        if self._goes_straight:
            self._take_straight(count)
            return
        self._filled += count
        while self._filled and not self.is_whole:
            if self._status == 0:
                if not self._take_head():
                    return
            elif self._chunks is None:
                taken = self._filled if self._left is None else min(self._filled, self._left)
                self._take(self._cut(taken))
                self._count_down(taken)
            else:
                data = self._chunks.take(self._cut(self._filled))
                self._take(data)
                if self._chunks.is_over:
                    self.keeps_alive &= not self._chunks.rest
                    self._finish()
        if self._filled:
            # Bytes that nobody asked for.
            self.keeps_alive = False

    def ended(self) -> None:
        """No more bytes will come."""
        if self.is_whole:
            return
        if self._status == 0:
            raise NoHttpError("ended the connection")
        if self._left is None and self._chunks is None:
            self.keeps_alive = False
            self._finish()
            return
        if self._views is not None and self._status == 200:
            raise LengthError(
                f"the body of an object ended after {self._got} of {self._want} bytes"
            )
        raise NoHttpError("ended the connection within an answer")

    def let_go(self) -> None:
        """Touch no buffer any more. A traceback may keep this for longer than the buffers live."""
        if self._views is not None:
            self._views.clear()

    @property
    def _goes_straight(self) -> bool:
        """Whether nothing but the body that was asked for is to come."""
        told = self._left is not None and self._chunks is None
        return bool(self._status == 200 and told and self._views and not self._filled)

    def _take_straight(self, count: int) -> None:
        assert self._views is not None
        self._got += count
        view = self._views[0]
        if count == len(view):
            self._views.pop(0)
        else:
            self._views[0] = view[count:]
        self._count_down(count)

    def _take_head(self) -> bool:
        """Whether it is all there."""
        end = self._head.find(_END, 0, self._filled)
        if end < 0:
            if self._filled == len(self._head):
                raise NoHttpError(f"has a head of more than {_HEAD_BYTES_MAX} bytes")
            return False
        first, *lines = self._cut(end + len(_END))[:end].split(b"\r\n")
        found = _STATUS.match(first)
        if found is None:
            raise NoHttpError("does not answer as HTTP does")
        status = int(found[1])
        if status < 200:
            # 100 Continue and its like, before the answer.
            return True
        self._status, self._headers = status, _headers(lines)
        self._frame(first)
        return True

    def _frame(self, first: bytes) -> None:
        """How the body's end is known."""
        told = self._headers.get("connection", "").lower()
        # Where no body can be, a proxy has connected, and what it says is not about the tunnel.
        self.keeps_alive = not self._has_body or (
            "close" not in told and (b"HTTP/1.0" not in first or "keep" in told)
        )
        length = self._headers.get("content-length")
        if not self._has_body or self._status in (204, 304):
            self._left = 0
        elif "chunked" in self._headers.get("transfer-encoding", "").lower():
            self._left, self._chunks = None, _Chunks()
        elif length is None:
            self._left = None
        elif length.isascii() and length.isdecimal() and len(length) <= _DIGITS_MAX:
            self._left = int(length)
        else:
            raise NoHttpError("has a length that is no number")
        if self._views is not None and self._status == 200 and self._left not in (None, self._want):
            raise LengthError(f"an object is {self._left} bytes long, not {self._want}")
        if self._left == 0:
            self._finish()

    def _take(self, data: bytes) -> None:
        self._got += len(data)
        if self._views is None or self._status != 200:
            self._kept += data
            if len(self._kept) > _KEPT_BYTES_MAX:
                raise StoreError(f"an answer is longer than {_KEPT_BYTES_MAX} bytes")
            return
        rest = memoryview(data)
        while rest and self._views:
            view = self._views[0]
            fits = min(len(rest), len(view))
            view[:fits] = rest[:fits]
            rest = rest[fits:]
            if fits == len(view):
                self._views.pop(0)
            else:
                self._views[0] = view[fits:]
        if rest:
            raise LengthError(f"the body of an object has {self._got} bytes, not {self._want}")

    def _count_down(self, count: int) -> None:
        if self._left is not None:
            self._left -= count
            if self._left == 0:
                self._finish()

    def _finish(self) -> None:
        if self._views and self._status == 200:
            raise LengthError(f"the body of an object has {self._got} bytes, not {self._want}")
        self.is_whole = True

    def _cut(self, count: int) -> bytes:
        """The first bytes that are not yet taken, which are taken now."""
        data = bytes(memoryview(self._head)[:count])
        self._head[: self._filled - count] = self._head[count : self._filled]
        self._filled -= count
        return data


class _Chunks:
    """A body in chunks, taken apart. `rest`: what came behind its end."""

    def __init__(self) -> None:
        self._pending = b""
        self._left = 0
        self._in_data = False
        self._at_end = False
        self.is_over = False
        self.rest = b""

    def take(self, data: bytes) -> bytes:
        """What of it is body."""
        data, self._pending = self._pending + data, b""
        found: list[bytes] = []
        while data and not self.is_over:
            if self._in_data and self._left:
                found.append(data[: self._left])
                data, self._left = data[self._left :], self._left - len(found[-1])
                continue
            line, end, behind = data.partition(b"\r\n")
            if not end:
                if len(data) > _HEAD_BYTES_MAX:
                    raise NoHttpError("has a line without an end in its chunks")
                self._pending = data
                break
            data = behind
            self._take_line(line)
        if self.is_over:
            self.rest = data
        return b"".join(found)

    def _take_line(self, line: bytes) -> None:
        """A chunk's size, what ends its data, or a header behind the last."""
        if self._in_data:
            if line:
                raise NoHttpError("has a chunk that is longer than it says")
            self._in_data = False
        elif self._at_end:
            self.is_over = not line
        else:
            size = line.partition(b";")[0].strip()
            if not size or len(size) > 15 or size.strip(b"0123456789abcdefABCDEF"):
                raise NoHttpError("has a chunk whose size is no number")
            self._left = int(size, 16)
            self._in_data, self._at_end = self._left > 0, self._left == 0


def _headers(lines: Sequence[bytes]) -> dict[str, str]:
    """By name in lower case; of several with one name, all, and of lengths the same one only."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, text = line.decode("latin-1").partition(":")
        if not colon or not name or name != name.strip():
            raise NoHttpError("has a header that is none")
        name, text = name.lower(), text.strip()
        if name in headers and name != "content-length":
            text = f"{headers[name]}, {text}"
        if name == "content-length" and headers.get(name, text) != text:
            raise NoHttpError("has two lengths")
        headers[name] = text
    return headers
