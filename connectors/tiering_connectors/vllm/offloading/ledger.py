"""What workers and scheduler leave for one another in the host tier's own memory.

vLLM's OffloadingConnector carries no word of a copy that failed, and after a reset not even that
one has ended. So each rank writes here, in the last rows of the region, what became of each row
that it was to fill and how many loads it has ended, before it reports to vLLM; the scheduler's
side reads it when vLLM says that all ranks are done. One writer for each byte: the rank, but for
`begin`, which nobody races with, since the rank does not have the row yet.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tiering.device.base import ByteArray
from tiering.errors import ConfigError

NOTE_BYTES = 16384
"""Room for the note that rank 0 leaves at start: which namespace the engine belongs to."""

_COUNT_BYTES = 8
_LENGTH = struct.Struct("<I")

Slots = Sequence[int] | npt.NDArray[np.integer]


class Told(enum.IntEnum):
    """What a rank has said of a row that it was to fill."""

    NOTHING = 0
    WHOLE = 1
    FAILED = 2


def slots_in(rows: int, row_bytes: int, ranks: int) -> int:
    """How many of `rows` rows are left for chunks; ConfigError if not one is."""
    need = NOTE_BYTES + ranks * (_COUNT_BYTES + rows)
    slots = rows - -(-need // row_bytes)
    if slots < 1:
        least = (rows - slots + 1) * row_bytes
        raise ConfigError(
            "cpu_bytes_to_use",
            rows * row_bytes,
            f"leaves no room for a chunk of {row_bytes} bytes beside the engine's notes",
            f"give the host tier {least + row_bytes} bytes or more",
        )
    return slots


class Ledger:
    """A view of `rows`: all of the region, uint8 of shape `(rows, row_bytes)`. `writers`: so many
    ranks, from 0 on, fill rows; one where all of them hold the same bytes. Let go of it before the
    region is closed."""

    def __init__(self, rows: ByteArray, ranks: int, writers: int) -> None:
        count, row_bytes = rows.shape
        self.slots = slots_in(count, row_bytes, ranks)
        flat = rows[self.slots :].reshape(-1)
        self._note = flat[:NOTE_BYTES]
        counts = flat[NOTE_BYTES : NOTE_BYTES + ranks * _COUNT_BYTES]
        self._loads_ended = counts.view(np.uint64)
        told = flat[NOTE_BYTES + len(counts) :][: writers * self.slots]
        self._told = told.reshape(writers, self.slots)

    # The worker's side

    def leave_note(self, note: bytes) -> None:
        """For rank 0, before it announces itself."""
        if len(note) > NOTE_BYTES - _LENGTH.size:
            raise ValueError(f"a note of {len(note)} bytes, there is room for {NOTE_BYTES}")
        at = _LENGTH.size + len(note)
        self._note[:at] = np.frombuffer(_LENGTH.pack(len(note)) + note, np.uint8)

    def tell(self, rank: int, slots: Slots, told: Told) -> None:
        """`rank` will not touch `slots` any more, and this is what became of its share."""
        self._told[rank, np.asarray(slots, dtype=np.intp)] = told

    def tell_loads(self, rank: int, ended: int) -> None:
        """`rank` has ended all loads up to number `ended`."""
        self._loads_ended[rank] = ended

    # The scheduler's side

    def note(self) -> bytes:
        (length,) = _LENGTH.unpack_from(self._note.data)
        return self._note[_LENGTH.size : _LENGTH.size + length].tobytes()

    def begin(self, slots: Slots) -> None:
        """The ranks are about to be told to fill `slots`."""
        self._told[:, np.asarray(slots, dtype=np.intp)] = Told.NOTHING

    def are_whole(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Of each of `slots`, whether every rank has filled its share."""
        told = self._told[:, np.asarray(slots, dtype=np.intp)]
        whole: npt.NDArray[np.bool_] = (told == Told.WHOLE).all(axis=0)
        return whole

    def have_ended(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Of each of `slots`, whether no rank will write to it any more, whatever came of it."""
        told = self._told[:, np.asarray(slots, dtype=np.intp)]
        ended: npt.NDArray[np.bool_] = (told != Told.NOTHING).all(axis=0)
        return ended

    @property
    def loads_ended(self) -> int:
        """Every rank has ended all loads up to this number."""
        return int(self._loads_ended.min())
