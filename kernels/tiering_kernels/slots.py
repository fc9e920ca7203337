"""States and pins of slots, changed a batch at a time, and counted as they change.

In C where the library is there, else with numpy; both do the same. No rules are made here: what may
follow what is the caller's table. One owner, no lock; the interpreter lock is kept.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tiering_kernels import library
from tiering_kernels.keytable import Values

States = npt.NDArray[np.uint8]
Pins = npt.NDArray[np.int32]

# In a table of what follows what.
ILLEGAL = 255


@dataclass(frozen=True, slots=True)
class Names:
    """What states mean here: `ready` ones can be evicted while nothing pins them, `free` ones never
    have a pin, and `doomed` ones go with their last."""

    count: int
    free: int
    ready: int
    doomed: int


class Book:
    """The arrays, by slot. `states` has one more than there are slots, which stays free: what an
    index of -1 finds. There are two kinds of `pins`; `held` says of each how many slots have any,
    `evictable` how many are ready and have none, `of_state` how many are in each state."""

    def __init__(self, slots: int, names: Names) -> None:
        self.names = names
        self.states: States = np.full(slots + 1, names.free, np.uint8)
        self.pins: tuple[Pins, Pins] = (np.zeros(slots, np.int32), np.zeros(slots, np.int32))
        self.of_state = np.zeros(names.count, np.int64)
        self.of_state[names.free] = slots
        self.held = np.zeros(2, np.int64)
        self.evictable = np.zeros(1, np.int64)


class SlotChanges(Protocol):
    """What can be done to a Book. `slots` are contiguous, and differ. A batch that is refused is
    left as it was."""

    def move(self, slots: Values, following: bytes) -> Values | None:
        """Each state s becomes `following[s]`: the slots that are free now. None, refused, where
        one would become ILLEGAL, or be freed with a pin."""
        ...

    def pin(self, slots: Values, kind: int) -> None:
        """One more pin of this kind on each."""
        ...

    def unpin(self, slots: Values, kind: int) -> Values | None:
        """One pin less on each: the doomed slots that have none any more. None, refused, where one
        has no pin of this kind."""
        ...


def open_changes(book: Book) -> SlotChanges:
    """By the fastest means that work here."""
    native = _native()
    return PortableChanges(book) if native is None else NativeChanges(book, native)


class PortableChanges:
    """See SlotChanges."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def move(self, slots: Values, following: bytes) -> Values | None:
        book, names = self._book, self._book.names
        before = book.states[slots]
        after = np.frombuffer(following, np.uint8)[before]
        is_pinned, is_freed = self._are_pinned(slots), after == names.free
        if (after == ILLEGAL).any() or (is_pinned & is_freed).any():
            return None
        book.states[slots] = after
        book.of_state += _census(after, names) - _census(before, names)
        book.evictable += np.count_nonzero((after == names.ready) & ~is_pinned)
        book.evictable -= np.count_nonzero((before == names.ready) & ~is_pinned)
        freed: Values = slots[is_freed]
        return freed

    def pin(self, slots: Values, kind: int) -> None:
        book = self._book
        is_ready = book.states[slots] == book.names.ready
        book.evictable -= np.count_nonzero(is_ready & ~self._are_pinned(slots))
        before = book.pins[kind][slots]
        book.held[kind] += np.count_nonzero(before == 0)
        book.pins[kind][slots] = before + 1

    def unpin(self, slots: Values, kind: int) -> Values | None:
        book = self._book
        before = book.pins[kind][slots]
        if (before < 1).any():
            return None
        book.held[kind] -= np.count_nonzero(before == 1)
        book.pins[kind][slots] = before - 1
        idle = slots[~self._are_pinned(slots)]
        book.evictable += np.count_nonzero(book.states[idle] == book.names.ready)
        gone: Values = idle[book.states[idle] == book.names.doomed]
        return gone

    def _are_pinned(self, slots: Values) -> npt.NDArray[np.bool_]:
        first, second = self._book.pins
        are: npt.NDArray[np.bool_] = (first[slots] | second[slots]) != 0
        return are


def _census(states: States, names: Names) -> Values:
    return np.bincount(states, minlength=names.count)


class _Slots(ctypes.Structure):
    """`struct slots` of csrc/slots.c."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("states", ctypes.c_void_p),
        ("pins", ctypes.c_void_p * 2),
        ("of_state", ctypes.c_void_p),
        ("held", ctypes.c_void_p),
        ("evictable", ctypes.c_void_p),
        ("ready", ctypes.c_int32),
        ("free", ctypes.c_int32),
        ("doomed", ctypes.c_int32),
        ("illegal", ctypes.c_int32),
    )


class NativeChanges:
    """See SlotChanges; csrc/slots.c."""

    def __init__(self, book: Book, native: ctypes.PyDLL) -> None:
        self._native = native
        self._book = book  # Its arrays must stay.
        self._gone = np.empty(len(book.states), np.int64)
        self._gone_at = self._gone.ctypes.data
        self._slots = _Slots(
            count=len(book.states) - 1,
            states=book.states.ctypes.data,
            pins=(ctypes.c_void_p * 2)(*(pins.ctypes.data for pins in book.pins)),
            of_state=book.of_state.ctypes.data,
            held=book.held.ctypes.data,
            evictable=book.evictable.ctypes.data,
            ready=book.names.ready,
            free=book.names.free,
            doomed=book.names.doomed,
            illegal=ILLEGAL,
        )

    def move(self, slots: Values, following: bytes) -> Values | None:
        at, count = slots.ctypes.data, len(slots)
        found = self._native.kvt_slots_move(self._slots, at, count, following, self._gone_at)
        return None if found < 0 else self._gone[:found].copy()

    def pin(self, slots: Values, kind: int) -> None:
        if self._native.kvt_slots_pin(self._slots, slots.ctypes.data, len(slots), kind) < 0:
            raise IndexError(f"a slot is not among the {len(self._book.pins[kind])} there are")

    def unpin(self, slots: Values, kind: int) -> Values | None:
        at, count = slots.ctypes.data, len(slots)
        found = self._native.kvt_slots_unpin(self._slots, at, count, kind, self._gone_at)
        return None if found < 0 else self._gone[:found].copy()


@cache
def _native() -> ctypes.PyDLL | None:
    native = library.kept()
    if native is not None:
        book, at, count = ctypes.POINTER(_Slots), ctypes.c_void_p, ctypes.c_uint32
        native.kvt_slots_move.argtypes = (book, at, count, ctypes.c_char_p, at)
        native.kvt_slots_move.restype = ctypes.c_int64
        native.kvt_slots_pin.argtypes = (book, at, count, ctypes.c_int)
        native.kvt_slots_pin.restype = ctypes.c_int64
        native.kvt_slots_unpin.argtypes = (book, at, count, ctypes.c_int, at)
        native.kvt_slots_unpin.restype = ctypes.c_int64
    return native
