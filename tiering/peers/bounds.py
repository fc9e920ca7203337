"""How large a message may be, looked at before anything is made of it.

A decoder believes the lengths that it reads: five bytes can ask for a list of four thousand million
items. `outline` walks the bytes of a MessagePack value without making anything, and gives up at the
first length that the rest of the bytes, or the limits, have no room for. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

NODES_MAX = 512
"""Values of all sorts in one message, keys of maps included."""
DEPTH_MAX = 6


class OutOfBounds(ValueError):
    """No MessagePack, or more of it than is taken; says why."""


class _Open(NamedTuple):
    """A list or map that is being walked, and how many values of it are still to come."""

    left: int
    is_map: bool


# What follows the first byte: how many bytes the length takes, and whether it counts values.
_LENGTH_OF_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_LENGTH_OF_VALUES = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
_FIXED |= {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_TYPE = b"\xa4type"


def outline(frame: bytes) -> str:
    """What the map `frame` has under "type"; OutOfBounds where it is no such map, is nested deeper
    than DEPTH_MAX, has more than NODES_MAX values, or one of a type that no message has."""
    kind: str | None = None
    at, nodes = 0, 0
    open_ones: list[_Open] = []
    while True:
        nodes += 1
        if nodes > NODES_MAX:
            raise OutOfBounds(f"more than {NODES_MAX} values")
        is_type = len(open_ones) == 1 and frame.startswith(_TYPE, at) and _is_key(open_ones[0])
        at, values, is_map = _value(frame, at)
        if is_type:
            kind = _text(frame, at)
        if not open_ones and not is_map:
            raise OutOfBounds("no map")
        if open_ones:
            open_ones[-1] = open_ones[-1]._replace(left=open_ones[-1].left - 1)
        if values:
            if values > len(frame) - at:
                raise OutOfBounds(f"{values} values in {len(frame) - at} bytes")
            open_ones.append(_Open(values, is_map))
            if len(open_ones) > DEPTH_MAX:
                raise OutOfBounds(f"nested deeper than {DEPTH_MAX}")
        while open_ones and open_ones[-1].left == 0:
            open_ones.pop()
        if not open_ones:
            break
    if at != len(frame):
        raise OutOfBounds(f"{len(frame) - at} bytes behind the message")
    if kind is None:
        raise OutOfBounds("no type")
    return kind


def _is_key(of: _Open) -> bool:
    return of.is_map and of.left % 2 == 0


def _value(frame: bytes, at: int) -> tuple[int, int, bool]:
    """Of the value at `at`: where its bytes end, how many values it holds, and whether it is a
    map."""
    if at >= len(frame):
        raise OutOfBounds("cut off")
    first = frame[at]
    size, values, is_map = 0, 0, False
    start = at + 1
    if first <= 0x7F or first >= 0xE0:
        pass
    elif first <= 0x8F:
        values, is_map = 2 * (first & 0x0F), True
    elif first <= 0x9F:
        values = first & 0x0F
    elif first <= 0xBF:
        size = first & 0x1F
    elif first in _FIXED:
        size = _FIXED[first]
    elif first in _LENGTH_OF_BYTES:
        start += _LENGTH_OF_BYTES[first]
        size = int.from_bytes(frame[at + 1 : start], "big")
    elif first in _LENGTH_OF_VALUES:
        start += _LENGTH_OF_VALUES[first]
        is_map = first >= 0xDE
        values = int.from_bytes(frame[at + 1 : start], "big") * (2 if is_map else 1)
    else:
        raise OutOfBounds(f"a value of type {first:#x}")
    if start + size > len(frame):
        raise OutOfBounds(f"cut off: {size} bytes of which {max(0, len(frame) - start)} are there")
    return start + size, values, is_map


def _text(frame: bytes, at: int) -> str:
    """The short text at `at`."""
    first = frame[at] if at < len(frame) else 0
    if not 0xA0 <= first <= 0xBF:
        raise OutOfBounds("a type that is no short text")
    return frame[at + 1 : at + 1 + (first & 0x1F)].decode("ascii", "replace")
