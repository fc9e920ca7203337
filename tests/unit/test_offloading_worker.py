"""One rank's copies for TieredOffloadingSpec: the right bytes, and what the ledger says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from cuda_scene import Scene
from gated import GATHER, SCATTER, GatedCopier
from tiering.clock import MonotonicClock
from tiering.device.base import HostPages
from tiering.device.host import HostCopier
from tiering.errors import ConfigError, CopyError
from tiering.keys import chunk_key
from tiering.layout import ShareLayout
from tiering.testing.clocks import ManualClock
from tiering.testing.fakecuda import COMPUTE
from tiering_connectors.vllm.offloading import copies as copies_module
from tiering_connectors.vllm.offloading.copies import RankCopies
from tiering_connectors.vllm.offloading.ledger import NOTE_BYTES, Ledger, Told, slots_in
from tiering_connectors.vllm.offloading.rows import Rows

ROW = 4096
SLOTS = 6
BLOCKS = 16


@dataclass
class Device:
    """vLLM's GPULoadStoreSpec, as far as it is used."""

    block_ids: npt.NDArray[np.int32]
    group_sizes: Sequence[int]
    block_indices: Sequence[int]


def device(*groups: tuple[Sequence[int], int]) -> Device:
    """For each group its blocks, and the index in the request of the first."""
    blocks = np.array([b for each, _ in groups for b in each], np.int32)
    return Device(blocks, [len(each) for each, _ in groups], [first for _, first in groups])


def rows(*groups: Sequence[int], number: int = 0) -> Rows:
    """For each group its slots."""
    slots = np.array([s for each in groups for s in each], np.int32)
    return Rows(slots, tuple(map(len, groups)), number)


def pages(seed: int, widths: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 256, (BLOCKS, width), np.uint8) for width in widths]


class Rank:
    """Two groups, of three layers and of one, over rows that have seen other chunks before."""

    def __init__(self, blocks_per_chunk: int, ranks: int = 1, rank: int = 0) -> None:
        self.memory = np.full((SLOTS + NOTE_BYTES // ROW + 1, ROW), 0xEE, np.uint8)
        self.ledger = Ledger(self.memory, ranks, ranks)
        self.memory[self.ledger.slots :] = 0
        assert self.ledger.slots == SLOTS
        self.pages = [pages(1, [8, 8, 24]), pages(2, [16])]
        self.layouts = [
            ShareLayout(tuple(page.shape[1] for page in group), blocks_per_chunk)
            for group in self.pages
        ]
        self.share = self.memory[:, : max(layout.share_bytes for layout in self.layouts)]
        groups = list(map(HostPages, self.pages, self.layouts))
        self.copies = RankCopies(
            HostCopier(groups, self.share),
            self.ledger,
            rank,
            self.share,
            [sum(layout.page_bytes) for layout in self.layouts],
            blocks_per_chunk,
            ManualClock(),
        )

    def expected(self, group: int, blocks: Sequence[int]) -> bytes:
        """A row of these blocks: layer by layer, and nothing else behind."""
        parts = [layer[block].tobytes() for layer in self.pages[group] for block in blocks]
        return b"".join(parts).ljust(self.share.shape[1], b"\0")

    def end(self, *job_ids: int) -> list[int]:
        self.copies.wait(set(job_ids))
        ended = self.copies.take_ended()
        assert {job.job_id for job in ended} == set(job_ids)
        return [job.size_bytes for job in ended]


@pytest.fixture
def make_rank() -> Iterator[Callable[..., Rank]]:
    """Makes ranks, closed at the end of the test."""
    with ExitStack() as stack:

        def make(*arguments: int) -> Rank:
            rank = Rank(*arguments)
            stack.callback(rank.copies.close)
            return rank

        yield make


def gated(blocks_per_chunk: int = 1, ranks: int = 1) -> tuple[GatedCopier, RankCopies, Ledger]:
    memory = np.zeros((SLOTS + NOTE_BYTES // ROW + 1, ROW), np.uint8)
    ledger = Ledger(memory, ranks, ranks)
    share = memory[:, : 8 * blocks_per_chunk]
    copier = GatedCopier(pages(3, [8]), share, blocks_per_chunk)
    copies = RankCopies(copier, ledger, 0, share, [8], blocks_per_chunk, ManualClock())
    return copier, copies, ledger


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_each_group_goes_to_its_rows_and_comes_back(
    make_rank: Callable[..., Rank], per_chunk: int
) -> None:
    rank = make_rank(per_chunk)
    of_full = [5, 6, 2, 9, 0, 1][: 2 * per_chunk]
    of_window = [7, 11, 12][:per_chunk]
    target = rows([4, 1], [0])
    rank.copies.store(1, device((of_full, 4 * per_chunk), (of_window, 0)), target)
    assert rank.end(1) == [2 * per_chunk * 40 + per_chunk * 16]
    assert rank.share[4].tobytes() == rank.expected(0, of_full[:per_chunk])
    assert rank.share[1].tobytes() == rank.expected(0, of_full[per_chunk:])
    assert rank.share[0].tobytes() == rank.expected(1, of_window)
    assert (rank.share[2] == 0xEE).all()
    assert rank.ledger.are_whole(target.slots).all()

    before = [layer.copy() for group in rank.pages for layer in group]
    for group in rank.pages:
        for layer in group:
            layer[:] = 0
    source = rows([4, 1], [0], number=1)
    rank.copies.load(2, source, device((of_full, 0), (of_window, 0)))
    rank.end(2)
    after = [layer for group in rank.pages for layer in group]
    for layer, old, blocks in zip(after, before, [*[of_full] * 3, of_window], strict=True):
        assert (layer[blocks] == old[blocks]).all()
        assert not np.delete(layer, blocks, axis=0).any()
    assert rank.ledger.loads_ended == 1


def test_a_load_may_begin_and_end_in_the_middle_of_a_chunk(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank(3)
    rank.copies.store(1, device(([0, 1, 2, 3, 4, 5], 0), ([], 0)), rows([2, 3], []))
    rank.end(1)
    saved = rank.pages[0][2].copy()
    rank.pages[0][2][:] = 0
    rank.copies.load(2, rows([2, 3], [], number=1), device(([8, 9, 10], 2), ([], 0)))
    rank.end(2)
    assert (rank.pages[0][2][[8, 9, 10]] == saved[[2, 3, 4]]).all()
    assert not np.delete(rank.pages[0][2], [8, 9, 10], axis=0).any()


def test_a_chunk_that_begins_with_a_block_vllm_has_no_more_is_not_whole(
    make_rank: Callable[..., Rank],
) -> None:
    rank = make_rank(2)
    rank.copies.store(1, device(([3, 4, 5], 1), ([], 0)), rows([2, 5], []))
    rank.end(1)
    assert rank.ledger.are_whole([2, 5]).tolist() == [False, True]
    assert rank.share[5].tobytes() == rank.expected(0, [4, 5])


def test_chunks_with_other_blocks_missing_are_not_whole_but_other_groups_are(
    make_rank: Callable[..., Rank],
) -> None:
    rank = make_rank(2)
    rank.copies.store(1, device(([3, 4, 5], 0), ([6, 7], 0)), rows([2, 5], [0]))
    rank.end(1)
    assert rank.ledger.are_whole([2, 5, 0]).tolist() == [False, False, True]
    assert (rank.share[2] == 0xEE).all()


def test_a_failed_store_ends_well_for_vllm_and_the_ledger_says_so() -> None:
    copier, copies, ledger = gated(ranks=2)
    ledger.tell(1, range(SLOTS), Told.WHOLE)
    copier.to_fail[GATHER] = 1
    copies.store(1, device(([3, 4], 0)), rows([0, 1]))
    copies.store(2, device(([5], 2)), rows([2]))
    copies.wait({1, 2})
    assert [job.job_id for job in copies.take_ended()] == [1, 2]
    assert ledger.are_whole([0, 1, 2]).tolist() == [False, False, True]
    assert ledger.have_ended([0, 1, 2, 3]).tolist() == [True, True, True, False]
    assert copies.take_ended() == []


def test_a_row_is_whole_when_every_rank_has_filled_it() -> None:
    copier, copies, ledger = gated(ranks=2)
    ledger.begin([0])
    copies.store(1, device(([3], 0)), rows([0]))
    assert not ledger.have_ended([0]).any(), "nothing is said before the copy has ended"
    copier.run(GATHER)
    copies.take_ended()
    assert not ledger.are_whole([0]).any()
    ledger.tell(1, [0], Told.WHOLE)
    assert ledger.are_whole([0]).all()
    ledger.begin([0])
    assert not ledger.are_whole([0]).any()


def test_a_failed_load_raises_rather_than_let_vllm_go_on() -> None:
    copier, copies, ledger = gated()
    copier.to_fail[SCATTER] = 1
    copies.load(1, rows([0], number=1), device(([3], 0)))
    copies.wait({1})
    with pytest.raises(CopyError, match="would answer from wrong bytes"):
        copies.take_ended()
    assert ledger.loads_ended == 0


def test_loads_are_told_in_their_order() -> None:
    copier, copies, ledger = gated(ranks=2)
    ledger.tell_loads(1, 9)
    for number in (1, 2, 3):
        copies.load(number, rows([0], number=number), device(([number], 0)))
    (_, first), *_ = copier.queues[SCATTER]
    copier.queues[SCATTER].rotate(-1)
    copier.run(SCATTER)
    assert [job.job_id for job in copies.take_ended()] == [2]
    assert ledger.loads_ended == 0
    copier.run_all(SCATTER)
    assert first.done()
    copies.take_ended()
    assert ledger.loads_ended == 3


def test_waiting_is_for_the_jobs_that_are_named() -> None:
    copier, copies, _ = gated()
    copies.store(1, device(([3], 0)), rows([0]))
    copies.store(2, device(([4], 0)), rows([1]))
    copies.wait({7})
    assert copier.waits == 0
    copies.wait({1})
    assert [job.job_id for job in copies.take_ended()] == [1]


def test_a_store_that_hangs_is_given_up_and_its_rows_are_not_whole_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies_module, "WAIT_SECONDS", 0.02)
    scene = Scene()
    memory = np.zeros((SLOTS + NOTE_BYTES // ROW + 1, ROW), np.uint8)
    ledger = Ledger(memory, 1, 1)
    share = scene.share[:, :256]
    copies = RankCopies(scene.copier, ledger, 0, share, [128], 2, MonotonicClock())
    scene.cuda.stall(COMPUTE)
    copies.store(1, device(([3, 4], 0)), rows([0]))
    copies.wait({1})
    copies.wait({1})
    assert copies.take_ended() == []
    scene.cuda.go_on(COMPUTE)
    scene.cuda.wait_until(lambda: scene.cuda.given(scene.stores, "record") == 1)
    scene.cuda.run_all()
    monkeypatch.setattr(copies_module, "WAIT_SECONDS", 30)
    while not copies.take_ended():
        scene.cuda.run_all()
    assert ledger.have_ended([0]).all()
    assert not ledger.are_whole([0]).any()
    scene.end()


def test_a_store_of_nothing_and_a_load_of_nothing_end_at_once() -> None:
    _, copies, ledger = gated()
    copies.store(1, device(([], 0)), rows([]))
    copies.load(2, rows([], number=1), device(([], 0)))
    assert {job.job_id for job in copies.take_ended()} == {1, 2}
    assert ledger.loads_ended == 1


def test_nothing_keeps_the_memory_after_the_end(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank(1)
    rank.copies.store(1, device(([3], 0), ([], 0)), rows([0], []))
    rank.copies.close()
    rank.copies.close()
    assert rank.copies._share is None
    assert rank.copies._ledger is None


def test_the_note_comes_back_as_it_was_left() -> None:
    _, _, ledger = gated()
    note = bytes(range(256)) * 8
    ledger.leave_note(note)
    ledger.tell(0, range(SLOTS), Told.WHOLE)
    ledger.tell_loads(0, 1 << 40)
    assert ledger.note() == note
    assert ledger.loads_ended == 1 << 40
    with pytest.raises(ValueError, match="there is room for"):
        ledger.leave_note(bytes(NOTE_BYTES))


def test_a_host_tier_without_room_beside_the_notes_is_refused_with_what_it_takes() -> None:
    with pytest.raises(ConfigError) as refused:
        slots_in(3, ROW, 2)
    said = int(refused.value.remedy.split()[4])
    assert slots_in(said // ROW, ROW, 2) >= 1
    assert slots_in(1000, 1 << 20, 8) == 999


def test_rows_count_the_chunks_of_each_group_in_vllms_order() -> None:
    keys = [chunk_key(b"a", 0), chunk_key(b"b", 0), chunk_key(b"c", 3)]
    made = Rows.of([5, 6, 7], keys, groups=[0, 1, 3], number=4)
    assert (made.slots.tolist(), made.chunks, made.number) == ([5, 6, 7], (2, 0, 1), 4)
    assert made.slots.dtype == np.int32
