"""Faults on purpose: a `ChunkIo` between a tier and an engine that fails as disks do.

For tests of disk tiers and for the simulation. Owns the rules, the counts and what a power cut
would undo. May be called from any thread; the lock is never held over I/O. With one seed and one
order of calls the same items are hit in the same way. Only what goes through a `ChunkIo` is seen:
what a tier renames, removes or syncs by itself it has to be told, or does not know.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tiering.testing.powercut import PowerCut, flip_bit, leave_half, path_of
from tiering_kernels.chunkio import BAD_CHECKSUM, HEADER_BYTES, UNNAMED, ChunkIo, Engine

READS = ("read_files", "read_slots")
WRITES = ("write_files", "write_slots")
OPERATIONS = ("sizes", *READS, *WRITES)

Where = Callable[[str], bool]
_Pages = Sequence[memoryview]


class Rule:
    """One fault: it passes over the first `after` items it could hit, then hits `times` of them,
    or all of them for `times=None`. `hits` counts those."""

    def __init__(
        self,
        operation: str,
        among: Sequence[str],
        answer: int,
        after: int,
        times: int | None,
        where: Where | None,
    ) -> None:
        if operation not in among:
            raise ValueError(f"{operation!r} is none of {', '.join(among)}")
        self.operation = operation
        self.answer = answer
        self.hits = 0
        self._after = after
        self._times = times
        self._where = where

    def takes(self, name: str) -> bool:
        if self._times is not None and self.hits >= self._times:
            return False
        if self._where is not None and not self._where(name):
            return False
        if self._after:
            self._after -= 1
            return False
        self.hits += 1
        return True


class Short(Rule):
    """Half of a transfer happens."""


class Flip(Rule):
    """One bit is wrong."""


class FaultyIo:
    """Passes batches on to `inner`, but for the items that a rule hits.

    A rule's `where` is asked with an item's name: the path, that of the final file for a write,
    or `<path>@<offset>` for a slot; `times=None` is always. `calls` and `items` count by operation
    what came in; `left` are the half-written files that nobody was told to remove.
    """

    def __init__(
        self,
        inner: ChunkIo,
        chance: random.Random | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._chance = chance or random.Random(0)
        self._sleep = sleep
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._gates: dict[str, threading.Event] = {}
        self._delays: dict[str, float] = {}
        self._hanging = 0
        self._hung = threading.Condition(self._lock)
        self._power = PowerCut()
        self.calls: Counter[str] = Counter()
        self.items: Counter[str] = Counter()
        self.left: set[str] = set()

    @property
    def engine(self) -> Engine:
        return self._inner.engine

    # What goes wrong

    def fail(
        self,
        operation: str,
        number: int,
        *,
        after: int = 0,
        times: int | None = 1,
        where: Where | None = None,
    ) -> Rule:
        """Items answer with the errno `number` and nothing is done for them."""
        return self._add(Rule(operation, OPERATIONS, -number, after, times, where))

    def short_read(
        self, operation: str, *, after: int = 0, times: int | None = 1, where: Where | None = None
    ) -> Rule:
        """Reads end early, at a random byte."""
        return self._add(Short(operation, READS, 0, after, times, where))

    def short_write(
        self,
        operation: str,
        number: int = errno.EIO,
        *,
        after: int = 0,
        times: int | None = 1,
        where: Where | None = None,
    ) -> Rule:
        """Writes end at a random page with the errno `number`, and what was written stays: half
        a temporary file, half a slot. No cleaning up, as if the process had died there."""
        return self._add(Short(operation, WRITES, -number, after, times, where))

    def flip(
        self, operation: str, *, after: int = 0, times: int | None = 1, where: Where | None = None
    ) -> Rule:
        """A bit of what is read is wrong, which the engine sees; or of what is written, after
        the engine called it well, and it stays wrong."""
        return self._add(Flip(operation, (*READS, *WRITES), BAD_CHECKSUM, after, times, where))

    def hang(self, operation: str) -> None:
        """From now on calls of `operation` do not come back."""
        with self._lock:
            self._gates.setdefault(operation, threading.Event())

    def wait_hung(self, calls: int, timeout_seconds: float = 60.0) -> bool:
        """Wait until so many calls hang; whether they do. Blocks."""
        with self._hung:
            return self._hung.wait_for(lambda: self._hanging >= calls, timeout_seconds)

    def let_go(self) -> None:
        """Whatever hangs goes on, and nothing hangs any more."""
        with self._lock:
            gates, self._gates = self._gates, {}
        for gate in gates.values():
            gate.set()

    def delay(self, operation: str, seconds: float) -> None:
        """From now on calls of `operation` take so much longer; 0 for no longer."""
        with self._lock:
            self._delays[operation] = seconds

    def mend(self, rule: Rule | None = None) -> None:
        """Take back `rule`, or all of them."""
        with self._lock:
            self._rules = [r for r in self._rules if rule is not None and r is not rule]

    # A power cut

    def lose_writes(self) -> None:
        """From now on remember what `crash` is to undo: writes without `sync`."""
        self._power.is_watching = True

    def synced(self, path: str) -> None:
        """What was written to `path` is on the disk, whatever comes."""
        self._power.synced(path)

    def crash(self, at: Callable[[str], str] = lambda path: path) -> dict[str, str]:
        """The power is cut: each write since the last sync is kept, lost or torn, at random. What
        became of each, by name. The files are those that `at` gives for their paths, so that it
        can be done to a copy. Nobody may be writing."""
        return self._power.cut(self._chance, at)

    # ChunkIo

    def sizes(self, paths: Sequence[str]) -> list[int]:
        def pass_on(span: slice) -> list[int]:
            return self._inner.sizes(paths[span])

        return self._spans("sizes", self._rules_for("sizes", paths), pass_on)

    def read_files(
        self, paths: Sequence[str], headers: memoryview, payloads: _Pages, direct: bool
    ) -> list[int]:
        def pass_on(span: slice) -> list[int]:
            return self._inner.read_files(
                paths[span], _pages_of(headers, span), payloads[span], direct
            )

        return self._read("read_files", paths, headers, payloads, pass_on)

    def read_slots(
        self,
        descriptors: Sequence[int],
        offsets: Sequence[int],
        headers: memoryview,
        payloads: _Pages,
    ) -> list[int]:
        def pass_on(span: slice) -> list[int]:
            return self._inner.read_slots(
                descriptors[span], offsets[span], _pages_of(headers, span), payloads[span]
            )

        names = _slot_names(descriptors, offsets)
        return self._read("read_slots", names, headers, payloads, pass_on)

    def write_files(
        self,
        temps: Sequence[str],
        finals: Sequence[str],
        headers: memoryview,
        payloads: _Pages,
        reuse: Sequence[bool],
        direct: bool,
        sync: bool,
    ) -> list[int]:
        rules = self._rules_for("write_files", finals)
        before = [
            self._power.before_file(temp, final) for temp, final in zip(temps, finals, strict=True)
        ]

        def pass_on(span: slice) -> list[int]:
            return self._inner.write_files(
                temps[span],
                finals[span],
                _pages_of(headers, span),
                payloads[span],
                reuse[span],
                direct,
                sync,
            )

        results = self._spans("write_files", rules, pass_on)
        for i, rule in enumerate(rules):
            if isinstance(rule, Short):
                leave_half(temps[i], self._half(payloads[i]), _page(headers, i), payloads[i])
                self.left.add(temps[i])
            elif rule is not None and not isinstance(rule, Flip):
                _remove(temps[i])
            elif results[i] >= 0 or results[i] == UNNAMED:
                here = temps[i] if results[i] == UNNAMED else finals[i]
                if rule is not None:
                    flip_bit(here, 0, self._bit(payloads[i]))
                self._power.wrote_file(here, finals[i], before[i], sync)
        return results

    def write_slots(
        self,
        descriptors: Sequence[int],
        offsets: Sequence[int],
        headers: memoryview,
        payloads: _Pages,
    ) -> list[int]:
        rules = self._rules_for("write_slots", _slot_names(descriptors, offsets))
        for descriptor, offset, payload in zip(descriptors, offsets, payloads, strict=True):
            self._power.before_slot(descriptor, offset, HEADER_BYTES + payload.nbytes)

        def pass_on(span: slice) -> list[int]:
            return self._inner.write_slots(
                descriptors[span], offsets[span], _pages_of(headers, span), payloads[span]
            )

        results = self._spans("write_slots", rules, pass_on)
        for i, rule in enumerate(rules):
            path = path_of(descriptors[i]) if rule is not None else ""
            if isinstance(rule, Short):
                half = self._half(payloads[i])
                leave_half(path, half, _page(headers, i), payloads[i], offsets[i])
            elif isinstance(rule, Flip) and results[i] >= 0:
                flip_bit(path, offsets[i], self._bit(payloads[i]))
        return results

    # Parts of the above

    def _add(self, rule: Rule) -> Rule:
        with self._lock:
            self._rules.append(rule)
        return rule

    def _rules_for(self, operation: str, names: Sequence[str]) -> list[Rule | None]:
        """What hits each item, after the call was counted and has waited as it should."""
        with self._lock:
            self.calls[operation] += 1
            self.items[operation] += len(names)
            gate, seconds = self._gates.get(operation), self._delays.get(operation, 0.0)
            if gate is not None:
                self._hanging += 1
                self._hung.notify_all()
        if gate is not None:
            gate.wait()
            with self._lock:
                self._hanging -= 1
        if seconds:
            self._sleep(seconds)
        with self._lock:
            mine = [rule for rule in self._rules if rule.operation == operation]
            return [next((rule for rule in mine if rule.takes(name)), None) for name in names]

    def _spans(
        self, operation: str, rules: Sequence[Rule | None], pass_on: Callable[[slice], list[int]]
    ) -> list[int]:
        """The engine's answers in runs of the items that it gets, the rules' answers between."""
        is_read = operation in READS
        results: list[int] = []
        for reaches, run in itertools.groupby(
            rules,
            lambda r: r is None or isinstance(r, Flip) or (is_read and isinstance(r, Short)),
        ):
            hit = list(run)
            span = slice(len(results), len(results) + len(hit))
            if reaches:
                results += pass_on(span)
            else:
                results += [rule.answer for rule in hit if rule is not None]
        return results

    def _read(
        self,
        operation: str,
        names: Sequence[str],
        headers: memoryview,
        payloads: _Pages,
        pass_on: Callable[[slice], list[int]],
    ) -> list[int]:
        rules = self._rules_for(operation, names)
        results = self._spans(operation, rules, pass_on)
        for i, rule in enumerate(rules):
            whole = HEADER_BYTES + payloads[i].nbytes
            if rule is None or results[i] != whole:
                continue
            if isinstance(rule, Short):
                results[i] = self._below(whole)
                _spoil(payloads[i], max(0, results[i] - HEADER_BYTES))
            elif isinstance(rule, Flip):
                byte, bit = divmod(self._bit(payloads[i]), 8)
                part, byte = (
                    (_page(headers, i), byte)
                    if byte < HEADER_BYTES
                    else (payloads[i].cast("B"), byte - HEADER_BYTES)
                )
                part[byte] ^= 1 << bit
                results[i] = rule.answer
        return results

    def _below(self, number: int) -> int:
        with self._lock:
            return self._chance.randrange(number)

    def _bit(self, payload: memoryview) -> int:
        """The number of any bit of the frame."""
        return self._below(8 * (HEADER_BYTES + payload.nbytes))

    def _half(self, payload: memoryview) -> int:
        """Whole pages of the frame, one at least, not all."""
        return HEADER_BYTES * (1 + self._below(max(1, payload.nbytes // HEADER_BYTES)))


def _pages_of(headers: memoryview, span: slice) -> memoryview:
    return headers[span.start * HEADER_BYTES : span.stop * HEADER_BYTES]


def _page(headers: memoryview, index: int) -> memoryview:
    return headers[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]


def _slot_names(descriptors: Sequence[int], offsets: Sequence[int]) -> list[str]:
    return [f"{path_of(d)}@{offset}" for d, offset in zip(descriptors, offsets, strict=True)]


def _spoil(payload: memoryview, start: int) -> None:
    payload.cast("B")[start:] = b"\xdd" * (payload.nbytes - start)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return
