"""The process of the tiers lives exactly as long as the engine, and the engine outlives it."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import process_scene
from process_scene import (
    NEVER,
    ROWS,
    Scene,
    fs,
    is_alive,
    make_region,
    opened,
    portal_over,
    steered,
    until,
    write_own_tiers,
)
from tiering.engine import Engine
from tiering.errors import ClosedError, TieringError
from tiering.events import NoEvents
from tiering.policy.lru import LruPolicy
from tiering.process import keeper
from tiering.process import link as link_module
from tiering.process.link import Link
from tiering.process.messages import Came, Frames, reports
from tiering.residency.core import Residency
from tiering.residency.plan import Cascade, Contains, Drop, Promote, Verdict
from tiering.testing.clocks import ManualClock
from tiering.testing.examples import key_number

pytestmark = pytest.mark.slow

A, B = key_number(1), key_number(2)
FAILED = (Verdict.FAILED,)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_own_tiers(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def is_open(scene: Scene) -> bool:
    scene.pump()
    link = scene.portal._link()
    return link is not None and link.is_open and not link.is_silent


def has_news_unread(link: Link) -> bool:
    """Whether news waits at this end of the stream; what tiers count comes in between."""
    with contextlib.suppress(BlockingIOError):
        frames = Frames()
        frames.feed(link.stream.recv(1 << 18, socket.MSG_PEEK))
        return any(isinstance(reports.decode(frame), Came) for frame in frames.take())
    return False


def kill_and_wait_for_the_next(scene: Scene) -> None:
    before = scene.portal.restarts
    os.kill(scene.pid, signal.SIGKILL)
    until(lambda: (scene.pump(), scene.portal.restarts > before)[1])


# The child dies


def test_steps_under_way_fail_once_the_child_cannot_touch_a_slot_any_more(own: Path) -> None:
    with opened(own, steered(own)) as scene:
        (own / "hold").touch()
        scene.portal.submit([Promote(1, 0, (A,), (3,), NEVER), Cascade(2, 0, (B,), (4,))])
        until((own / "held").exists)
        pid = scene.pid
        os.kill(pid, signal.SIGKILL)
        assert scene.outcomes(1, 2) == [FAILED, FAILED]
        assert not is_alive(pid)
        scene.fill(3, A)
        until(lambda: is_open(scene))
        assert scene.holds(3, A), "the slot was still being written to"


def test_no_outcome_comes_while_the_child_may_still_write(own: Path) -> None:
    with opened(own, steered(own)) as scene:
        (own / "hold").touch()
        scene.portal.submit([Promote(1, 0, (A,), (3,), NEVER)])
        until((own / "held").exists)
        link = scene.portal._link()
        assert link is not None
        # As if it had closed its end, and lived on; stopped, or it would end at what it says next.
        os.kill(link.process.pid, signal.SIGSTOP)
        link.stream.shutdown(0)
        for _ in range(100):
            assert scene.portal.drain() == []
        with pytest.raises(ClosedError, match="not running"):
            scene.portal.submit([Drop(2, 0, (A,))])
        os.kill(link.process.pid, signal.SIGKILL)
        assert scene.outcomes(1) == [FAILED]


def test_what_the_child_said_before_it_died_counts(own: Path) -> None:
    with opened(own, steered(own)) as scene:
        (own / "hold").touch()
        scene.fill(0, A)
        scene.portal.submit([Cascade(1, 0, (A,), (0,))])
        link = scene.portal._link()
        assert link is not None
        assert select.select([link.stream], [], [], NEVER)[0], "what is counted, meanwhile"
        assert not has_news_unread(link)
        (own / "hold").unlink()
        until(lambda: has_news_unread(link))
        os.kill(link.process.pid, signal.SIGKILL)
        link.ended.wait(30)
        assert scene.outcomes(1) == [(Verdict.STORED,)]


def test_it_is_started_again_and_finds_what_was_stored(
    own: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "PAUSE_SECONDS", 3.0)
    with caplog.at_level(logging.INFO, "tiering"), opened(own, fs(own / "kv")) as scene:
        (tier,) = scene.portal.tiers
        scene.fill(0, A)
        scene.portal.submit([Cascade(1, 0, (A,), (0,))])
        scene.outcomes(1)
        until(lambda: (scene.pump(), tier.stats()["writes_stored"] == 1)[1])
        first = scene.pid
        os.kill(first, signal.SIGKILL)
        until(lambda: (scene.pump(), scene.portal._link() is None)[1])
        with pytest.raises(ClosedError, match="not running"):
            scene.portal.submit([Contains(2, 0, (A,), NEVER)])
        assert tier.stats()["writes_stored"] == 1
        assert not any(name.startswith("now_") for name in tier.stats())
        until(lambda: is_open(scene))
        assert scene.pid != first
        scene.portal.submit([Promote(3, 0, (A,), (5,), NEVER), Cascade(4, 0, (B,), (1,))])
        assert scene.outcomes(3, 4) == [(Verdict.HIT,), (Verdict.STORED,)]
        assert scene.holds(5, A)
        assert scene.portal.restarts == 1
        until(lambda: (scene.pump(), tier.stats()["writes_stored"] == 2)[1])
        assert tier.stats()["reads_hit"] == 1
    told = [record.getMessage() for record in caplog.records if "process" in record.getMessage()]
    assert told == [
        "the process of the tiers ended (killed by SIGKILL): they are out of use, and it is "
        "started again in 3 seconds",
        "the process of the tiers runs again: they are back in use",
    ]


def test_a_bug_in_a_tier_ends_the_child_and_not_the_tiers(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(own, steered(own)) as scene:
        (own / "raise").touch()
        scene.portal.submit([Contains(1, 0, (A,), NEVER)])
        assert scene.outcomes(1) == [FAILED]
        until(lambda: "KeyError: 'a bug'" in caplog.text and "(exit status 1)" in caplog.text)
        (own / "raise").unlink()
        until(lambda: is_open(scene))
        scene.portal.submit([Contains(2, 0, (A,), NEVER)])
        assert scene.outcomes(2) == [(Verdict.MISS,)]


def test_tiers_that_cannot_be_opened_again_are_tried_after_pauses_that_grow(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(own, steered(own)) as scene:
        (own / "refuse").touch()
        os.kill(scene.pid, signal.SIGKILL)
        refusal = "cannot be opened again: steered: 01: not today"
        until(lambda: (scene.pump(), caplog.text.count(refusal) >= 2)[1])
        (own / "refuse").unlink()
        until(lambda: is_open(scene))
        assert scene.portal.restarts == 1
        pauses = [r.args[1] for r in caplog.records if r.args and "started again" in r.msg]
        assert pauses == [0.5 * 2**n for n in range(len(pauses))]
        assert len(pauses) >= 3


def test_the_core_goes_on_without_tiers_and_then_with_them_again(own: Path) -> None:
    with opened(own, steered(own)) as scene:
        core = Residency(ROWS, 1, LruPolicy(ROWS), ManualClock(), 10.0)
        engine = Engine(core, scene.portal, NoEvents())
        core.open("a")
        slots = core.reserve("a", [A, B], 0).slots
        for slot, key in zip(slots, [A, B], strict=True):
            scene.fill(slot, key)
        core.filled(slots)
        core.close("a")
        until(lambda: (engine.pump(), core.is_settled)[1])
        core.reset()
        core.open("b")
        core.ask("b", [A, B])
        until(lambda: (engine.pump(), not core.is_asking("b"))[1])
        (own / "hold").touch()
        core.hold("b", [A, B])
        until(lambda: (engine.pump(), (own / "held").exists())[1])
        assert core.held("b") is None
        os.kill(scene.pid, signal.SIGKILL)
        until(lambda: (engine.pump(), core.held("b") == 0)[1])
        assert core.is_settled
        assert not core.index.slots.load_pins.any()
        assert not core.index.slots.write_pins.any()
        core.close("b")
        (own / "hold").unlink()
        core.open("c")
        core.ask("c", [key_number(9)])
        engine.pump()
        assert not core.is_asking("c"), "a miss at once"
        until(lambda: (engine.pump(), scene.portal.restarts == 1)[1])
        core.open("d")
        core.ask("d", [key_number(9)])
        until(lambda: (engine.pump(), not core.is_asking("d"))[1])
        assert core.counters["lookups_failed"] == 1


def test_a_child_that_takes_no_orders_holds_up_nobody(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "BACKLOG_BYTES_MAX", 200_000)
    keys = tuple(key_number(number) for number in range(1000))
    with opened(own, fs(own / "kv")) as scene:
        os.kill(scene.pid, signal.SIGSTOP)
        count = 0
        while not scene.news:
            assert count < 1000
            scene.portal.submit([Contains(count, 0, keys, NEVER)])
            scene.pump()
            count += 1
        assert scene.outcomes(count - 1) == [FAILED * 1000], "more than may wait"
        os.kill(scene.pid, signal.SIGCONT)
        assert set(scene.outcomes(*range(count - 1))) == {(Verdict.MISS,) * 1000}
        scene.portal.submit([Contains(count, 0, (A,), NEVER)])
        assert scene.outcomes(count) == [(Verdict.MISS,)]


@pytest.mark.parametrize("garbage", [b"\xff" * 8, b"\x01\x00\x00\x00\xc1"])
def test_a_child_that_is_not_understood_is_killed(
    own: Path, caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    with opened(own, fs(own / "kv")) as scene:
        link = scene.portal._link()
        assert link is not None
        link._frames.feed(garbage)
        scene.portal.submit([Contains(1, 0, (A,), NEVER)])
        until(lambda: (scene.pump(), scene.portal.restarts == 1)[1])
        assert len(scene.news) == 1, "one outcome, right or failed"
        assert link.how_it_ended() == "killed by SIGKILL"
    assert "is not understood, and is killed" in caplog.text


def test_close_while_there_is_no_child_starts_none(own: Path) -> None:
    with opened(own, fs(own / "kv")) as scene:
        os.kill(scene.pid, signal.SIGKILL)
        until(lambda: not is_open(scene))
        kept = scene.portal._keeper
        assert kept is not None
        assert scene.portal.close(1.0) is True
        assert not kept._thread.is_alive()
        assert not kept.links


def test_a_child_that_cannot_be_started_says_so(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    region = make_region(own)
    monkeypatch.setattr(sys, "executable", str(own / "no-python"))
    portal = portal_over(region, fs(own / "kv"))
    with pytest.raises(TieringError, match=r'cannot be started .* write "thread" for loop'):
        portal.start()
    assert portal.close(1.0) is True
    region.close()


def test_no_descriptor_is_left_of_children_that_are_over(own: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = descriptors()
    with opened(own, fs(own / "kv")) as scene:
        during = descriptors()
        kill_and_wait_for_the_next(scene)
        assert descriptors() == during
    assert descriptors() == before


# The engine dies


@contextmanager
def engine(folder: Path, *tiers: dict[str, Any], **options: Any) -> Iterator[tuple[Any, int]]:
    """An engine in a process of its own, and the pid of its child."""
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen(
        [sys.executable, process_scene.__file__, str(folder), json.dumps([*tiers])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        **options,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_the_child_dies_with_an_engine_that_is_killed(own: Path) -> None:
    with engine(own, fs(own / "kv")) as (process, child):
        assert is_alive(child)
        process.kill()
        until(lambda: not is_alive(child))


def test_the_kernel_ends_it_though_a_fork_of_the_engine_holds_the_stream(own: Path) -> None:
    with engine(own, fs(own / "kv"), steered(own, forks=True)) as (process, child):
        holder = int(process.stdout.readline())
        try:
            process.kill()
            until(lambda: not is_alive(child))
            assert is_alive(holder)
        finally:
            os.kill(holder, signal.SIGKILL)


def test_it_ends_at_the_end_of_the_stream_whatever_its_loop_does(own: Path) -> None:
    with opened(own, steered(own)) as scene:
        (own / "hang").touch()
        scene.portal.submit([Contains(1, 0, (A,), NEVER)])
        until((own / "hangs").exists)
        (own / "hang").unlink()
        link = scene.portal._link()
        assert link is not None
        link.stream.shutdown(2)
        until(lambda: not is_alive(link.process.pid))
        assert scene.outcomes(1) == [FAILED]
        assert link.how_it_ended() == "exit status 3"


def test_signals_for_the_engine_are_not_the_childs(own: Path) -> None:
    with opened(own, fs(own / "kv")) as scene:
        pid = scene.pid
        assert os.getpgid(pid) == os.getpgid(0), "what ends the engine's group ends it, too"
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        scene.portal.submit([Contains(1, 0, (A,), NEVER)])
        assert scene.outcomes(1) == [(Verdict.MISS,)]
        assert scene.pid == pid
