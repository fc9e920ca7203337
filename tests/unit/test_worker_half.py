"""The worker half over a gated copier: what it waits for, what it reports, and that once."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from cuda_scene import Scene
from gated import GARBAGE, GATHER, SCATTER, GatedCopier
from tiering.clock import MonotonicClock
from tiering.device.base import BlockMap, HostPages
from tiering.device.host import HostCopier
from tiering.errors import ClosedError
from tiering.layout import ShareLayout
from tiering.testing.clocks import ManualClock
from tiering.testing.fakecuda import COMPUTE
from tiering_connectors.vllm import worker
from tiering_connectors.vllm.jobs import JobBook
from tiering_connectors.vllm.orders import Acknowledgements, CopyJob, StepOrders
from tiering_connectors.vllm.worker import Loaded, WorkerHalf

PAGE = 8


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What an operator is told, whatever level the log has."""
    return [each for each in caplog.records if each.levelno >= logging.WARNING]


class Rank:
    """A worker half, its device pages (block b is full of b) and its share of four slots."""

    def __init__(self) -> None:
        self.pages = np.repeat(np.arange(16, dtype=np.uint8), PAGE).reshape(16, PAGE)
        self.share = np.zeros((4, PAGE), np.uint8)
        self.copier = GatedCopier([self.pages], self.share, 1)
        self.half = WorkerHalf(self.copier, [PAGE], ManualClock())


@pytest.fixture
def rank() -> Rank:
    return Rank()


def job(number: int, blocks: list[int], slots: list[int], request_id: str = "") -> CopyJob:
    where = [np.array(a, np.int32) for a in (blocks, slots, [0] * len(blocks))]
    return CopyJob(number, (BlockMap(*where),), request_id)


def told(half: WorkerHalf) -> tuple[dict[int, int], set[int]]:
    acknowledgements = half.take_acknowledgements()
    assert acknowledgements is not None
    return acknowledgements.ended, acknowledgements.failed


def test_a_fence_waits_for_the_jobs_it_names_and_no_others(rank: Rank) -> None:
    rank.half.start_stores(StepOrders(stores=[job(1, [3], [0]), job(2, [4], [1])]))
    rank.half.start_loads(StepOrders(loads=[job(3, [5], [2], "r")]))
    rank.half.fence(StepOrders())
    rank.half.fence(StepOrders(fence=[3, 99]))  # A load is no store, 99 is long over.
    assert rank.copier.waits == 0
    rank.half.fence(StepOrders(fence=[1]))
    assert rank.copier.waits == 1
    assert rank.share[:2, 0].tolist() == [3, 0]
    assert rank.half.take_loaded() == Loaded()
    assert told(rank.half) == ({1: 1}, set())
    rank.copier.run(GATHER)
    assert told(rank.half) == ({2: 1}, set())


def test_a_fence_over_a_failed_store_goes_on(rank: Rank) -> None:
    rank.half.start_stores(StepOrders(stores=[job(1, [3], [0])]))
    rank.copier.to_fail[GATHER] = 1
    rank.half.fence(StepOrders(fence=[1]))
    assert told(rank.half) == ({1: 1}, {1})


def test_every_job_is_acknowledged_once_when_it_has_ended(rank: Rank) -> None:
    orders = StepOrders(loads=[job(1, [5], [0], "r")], stores=[job(2, [6], [1])])
    rank.half.start_loads(orders)
    rank.half.start_stores(orders)
    assert rank.half.take_loaded() == Loaded()
    assert rank.half.take_acknowledgements() is None
    rank.copier.run(SCATTER)
    rank.copier.run(GATHER)
    assert rank.half.take_loaded() == Loaded({"r"})
    assert told(rank.half) == ({1: 1, 2: 1}, set())
    assert rank.half.take_loaded() == Loaded()
    assert rank.half.take_acknowledgements() is None


def test_a_failed_load_reports_its_blocks_and_its_request(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    loads = [job(1, [5, 6], [0, 1], "bad"), job(2, [7], [2], "good")]
    rank.half.start_loads(StepOrders(loads=loads))
    rank.copier.to_fail[SCATTER] = 1
    rank.copier.run_all(SCATTER)
    assert rank.half.take_loaded() == Loaded({"bad", "good"}, {"bad"}, {5, 6})
    assert rank.half.take_loaded() == Loaded()
    assert told(rank.half) == ({1: 1, 2: 1}, {1})
    assert rank.pages[5, 0] == GARBAGE
    assert rank.pages[7, 0] == 0
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_blocks_that_were_promised_in_vain_are_bad_at_once(rank: Rank) -> None:
    rank.half.start_loads(StepOrders(lost={"r": [3, 4]}))
    assert rank.half.take_loaded() == Loaded({"r"}, {"r"}, {3, 4})
    assert rank.half.take_acknowledgements() is None


def test_a_job_has_ended_when_all_ranks_have_ended_it() -> None:
    ranks = [Rank(), Rank()]
    book = JobBook(len(ranks))
    store = book.add_store([0, 1], [3, 4])
    load = book.add_load("r")
    orders = StepOrders(
        loads=[job(load.job_id, [5], [2], "r")], stores=[job(store.job_id, [3, 4], [0, 1])]
    )
    for rank in ranks:
        rank.half.start_loads(orders)
        rank.half.start_stores(orders)
    assert book.reading({4, 9}) == [store.job_id]
    assert book.reading({5, 9}) == book.reading(set()) == []

    ranks[0].copier.close()
    ranks[0].half.take_loaded()
    first = ranks[0].half.take_acknowledgements()
    assert first is not None
    assert book.settle(first) == []
    assert book.reading({4}) == [store.job_id]

    ranks[1].copier.to_fail[SCATTER] = 1
    ranks[1].copier.close()
    ranks[1].half.take_loaded()
    second = ranks[1].half.take_acknowledgements()
    assert second is not None
    ended = {job.job_id: job for job in book.settle(second)}
    assert set(ended) == {store.job_id, load.job_id}
    assert not ended[store.job_id].has_failed
    assert ended[load.job_id].has_failed
    assert len(book) == 0
    assert book.settle(second) == []


def test_acknowledgements_of_ranks_add_up() -> None:
    """Bytes too; of the seconds, those of the slowest count."""
    one = Acknowledgements({1: 1, 2: 1}, {2}, {1: 10, 2: 20}, {1: 0.5, 2: 0.5})
    other = Acknowledgements({2: 1, 3: 1}, {3}, {2: 5, 3: 7}, {2: 0.25, 3: 1.0})
    both = Acknowledgements(
        {1: 1, 2: 2, 3: 1}, {2, 3}, {1: 10, 2: 25, 3: 7}, {1: 0.5, 2: 0.5, 3: 1.0}
    )
    assert one.merged(other) == both
    assert one.ended == {1: 1, 2: 1}


def test_a_job_of_several_parts_ends_with_the_last_of_them(rank: Rank) -> None:
    parts = job(1, [5], [0], "r").parts + job(1, [6], [1]).parts
    rank.half.start_loads(StepOrders(loads=[CopyJob(1, parts, "r")]))
    rank.copier.run(SCATTER)
    assert rank.half.take_loaded() == Loaded()
    rank.copier.to_fail[SCATTER] = 1
    rank.copier.run(SCATTER)
    assert rank.half.take_loaded() == Loaded({"r"}, {"r"}, {5, 6})
    acknowledgements = rank.half.take_acknowledgements()
    assert acknowledgements is not None
    assert acknowledgements.copied_bytes == {1: 2 * PAGE}


def test_ranks_with_the_same_bytes_store_each_block_once_between_them() -> None:
    """And each of them can load all of it, and acknowledges every job."""
    ranks = [Rank(), Rank(), Rank()]
    share = ranks[0].share
    orders = StepOrders(stores=[job(1, [3, 4, 5, 6], [0, 1, 2, 3]), job(2, [3], [3])])
    for number, rank in enumerate(ranks):
        rank.copier = GatedCopier([rank.pages], share, 1)
        rank.half = WorkerHalf(rank.copier, [PAGE], ManualClock(), number, len(ranks))
        rank.half.start_stores(orders)
        rank.copier.run_all(GATHER)
        told_bytes = rank.half.take_acknowledgements()
        assert told_bytes is not None
        assert told_bytes.ended == {1: 1, 2: 1}
        assert sum(told_bytes.copied_bytes.values()) == PAGE * (3 if number == 0 else 1)
    assert share[:, 0].tolist() == [3, 4, 5, 3]


def test_a_store_that_hangs_is_given_up_at_the_fence_and_has_failed_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its blocks are another request's by then, so what it read of them is wrong."""
    monkeypatch.setattr(worker, "FENCE_SECONDS", 0.02)
    scene = Scene()
    half = WorkerHalf(scene.copier, [128], MonotonicClock())
    scene.cuda.stall(COMPUTE)
    half.start_stores(StepOrders(stores=[job(1, [3], [0]), job(2, [4], [1])]))
    for _ in range(2):
        half.fence(StepOrders(fence=[1]))
    assert half.take_acknowledgements() is None, "its slot is not for others yet"
    scene.cuda.go_on(COMPUTE)
    scene.cuda.wait_until(lambda: scene.cuda.given(scene.stores, "record") == 2)
    scene.cuda.run_all()
    monkeypatch.setattr(worker, "FENCE_SECONDS", 60.0)
    half.fence(StepOrders(fence=[2]))
    assert told(half) == ({1: 1, 2: 1}, {1})
    (error,) = warnings(caplog)
    assert "store job 1 has not ended" in error.getMessage()
    scene.end()


def test_a_lost_device_is_not_told_of_again_with_each_job(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    half = WorkerHalf(scene.copier, [128], MonotonicClock())
    scene.cuda.fail("copy", code=700, sticky=True)
    half.start_stores(StepOrders(stores=[job(1, [3], [0])]))
    half.fence(StepOrders(fence=[1]))
    assert told(half) == ({1: 1}, {1})
    before = warnings(caplog)
    half.start_loads(StepOrders(loads=[job(2, [5, 6], [0, 1], "r")]))
    half.start_stores(StepOrders(stores=[job(3, [3], [0])]))
    assert half.take_loaded() == Loaded({"r"}, {"r"}, {5, 6})
    assert told(half) == ({2: 1, 3: 1}, {2, 3})
    assert len(before) == 2
    assert warnings(caplog) == before
    half.close()


def test_with_a_real_copier_the_fence_blocks_until_the_source_is_read() -> None:
    class Slow(HostCopier):
        may_go_on = threading.Event()

        def _carry_out(self, *copy: object) -> None:
            assert self.may_go_on.wait(60)
            super()._carry_out(*copy)  # type: ignore[arg-type]

    rank = Rank()
    copier = Slow([HostPages([rank.pages], ShareLayout((PAGE,), 1))], rank.share)
    half = WorkerHalf(copier, [PAGE], ManualClock())
    half.start_stores(StepOrders(stores=[job(1, [3], [0])]))
    passed = threading.Event()

    def overwrite() -> None:
        half.fence(StepOrders(fence=[1]))
        rank.pages[3] = 99
        passed.set()

    thread = threading.Thread(target=overwrite)
    thread.start()
    assert not passed.wait(0.03)
    copier.may_go_on.set()
    thread.join(60)
    assert passed.is_set()
    assert rank.share[0, 0] == 3
    assert told(half) == ({1: 1}, set())
    half.close()
    half.close()
    with pytest.raises(ClosedError):
        half.start_stores(StepOrders(stores=[job(2, [3], [0])]))
