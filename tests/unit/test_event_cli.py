"""`tiering events`: what it prints, how it ends, and its comparison with a directory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import fs_places
import segment_places
from event_streams import (
    LOOPBACK,
    bare_publisher,
    cleared,
    payload,
    removed,
    stored,
    wait_until,
)
from fs_places import KEYS, file_of
from tiering.cli import events_check, main
from tiering.events.blocks import MEDIUM_STORAGE, BlockStored
from tiering.events.mirror import hash_number
from tiering.events.publisher import ZmqPublisher
from tiering.events.subscriber import EventSubscriber, Received
from tiering.keys import chunk_key, split_key
from tiering.maintenance import StoredChunks
from tiering.testing import examples

Output = pytest.CaptureFixture[str]

QUICK = ("--interval", "0.1")


class LateClock:
    """Stands still until all that was published has come, however long a busy machine takes."""

    began: float | None = None

    def now(self) -> float:
        return 0.0 if self.began is None else time.monotonic() - self.began


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[ZmqPublisher]:
    """Whoever reads it has all of `--seconds` for what comes after all that there is."""
    clocks: list[LateClock] = []
    receive = EventSubscriber.receive

    def clock() -> LateClock:
        clocks.append(LateClock())
        return clocks[-1]

    async def heard(subscriber: EventSubscriber, seconds: float) -> list[Received]:
        found = await receive(subscriber, seconds)
        stats = subscriber.stats()
        was_answered = stats.replays > stats.replays_failed and subscriber.is_settled
        if clocks[-1].began is None and was_answered and stats.batches >= made.stats().batches:
            clocks[-1].began = time.monotonic()
        return found

    monkeypatch.setattr("tiering.cli.events.MonotonicClock", clock)
    monkeypatch.setattr(EventSubscriber, "receive", heard)
    with ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK) as made:
        yield made


def at(publisher: ZmqPublisher, *more: str) -> list[str]:
    """When all is sent: an answer has all of it."""
    wait_until(lambda: not publisher.stats().queued)
    return ["events", publisher.endpoint, "--replay", str(publisher.replay_endpoint), *more]


def fill(root: Path, keys: Sequence[bytes] = KEYS, **kinds: Any) -> None:
    async def store() -> None:
        async with fs_places.opened(root, **kinds) as tier:
            await examples.stored(tier, keys)

    asyncio.run(store())


def hash_of(key: bytes) -> int:
    return hash_number(split_key(key)[0])


def announced(*keys: bytes, group: int = 0) -> BlockStored:
    return stored(*map(hash_of, keys), medium=MEDIUM_STORAGE, group=group)


def last_json(capsys: Output) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_line_an_interval_and_a_summary(publisher: ZmqPublisher, capsys: Output) -> None:
    publisher.publish([stored(1, 2, 3), stored(9, medium="STORAGE"), removed(1, 7)])
    assert main(at(publisher, *QUICK, "--seconds", "0.5")) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert any("CPU 2 (+" in line and "STORAGE 1 (+" in line for line in lines)
    assert "  batches 1  missed 0  undecodable 0  anomalies 1  restarts 0" in lines[0]
    assert f"events: connected to {publisher.endpoint}\n" in err
    summary = next(line for line in lines if line.startswith(publisher.endpoint))
    assert summary.endswith("1 batch, 3 events; missed 0; undecodable 0; anomalies 1; restarts 0")
    table = [line.split() for line in lines[lines.index(summary) + 2 :]]
    assert table == [
        ["CPU", "3", "1", "2", "0", "1", "0"],
        ["STORAGE", "1", "0", "1", "0", "0", "0"],
    ]


def test_json_is_one_object_a_line(publisher: ZmqPublisher, capsys: Output) -> None:
    publisher.publish([stored(1, 2, 3), cleared(), stored(1)])
    assert main(at(publisher, *QUICK, "--seconds", "0.3", "--json")) == 0
    *lines, last = map(json.loads, capsys.readouterr().out.splitlines())
    first = lines[0]
    assert first["media"]["CPU"]["resident"] == 1
    assert first["media"]["CPU"]["stored_per_second"] > 0
    assert {"seconds", "batches", "missed", "undecodable", "anomalies", "restarts"} <= set(first)
    summary = last["summary"]
    assert summary["media"]["CPU"]["stored"] == 4
    assert summary["cleared"] == 1
    assert summary["saw_start"] is True
    assert summary["interrupted"] is False
    assert summary["stream"]["batches"] == 1


def test_a_stream_that_was_not_seen_from_its_start_is_said(
    publisher: ZmqPublisher, capsys: Output
) -> None:
    with ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK, buffer_batches_max=2) as short:
        for number in range(5):
            short.publish([stored(number)])
        wait_until(lambda: short.stats().batches == 5)
        assert main(at(short, *QUICK, "--seconds", "0.3")) == 0
    out, err = capsys.readouterr()
    assert "the stream was not seen from its start (batch 0): give --replay" in out
    assert "events: 3 batches before 3 missed\n" in err


@pytest.mark.slow
def test_gaps_after_the_start_are_said(capsys: Output) -> None:
    with bare_publisher() as bare:
        process = started(bare.endpoint, "--json", "--interval", "0.05", "--seconds", "20")
        try:
            wait_until(bare.count_subscriptions)
            for number in (0, 4):
                bare.send(number, payload(stored(number)))
            assert process.stdout is not None
            for line in process.stdout:
                if json.loads(line)["missed"] == 3:
                    break
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    summary = json.loads(out.splitlines()[-1])["summary"]
    assert (summary["saw_start"], summary["missed_since_start"]) == (True, 3)


@pytest.mark.slow
def test_a_restart_is_said_and_what_was_announced_is_forgotten(tmp_path: Path) -> None:
    places = (f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay")
    process = started(places[0], "--replay", places[1], "--json", "--interval", "0.05")
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        told = ""
        for count, resident in ((3, 3), (2, 2)):
            with ZmqPublisher(places[0], replay_endpoint=places[1]) as publisher:
                publisher.publish([stored(*range(count))])
                for line in process.stdout:
                    found = json.loads(line)
                    if found["media"].get("CPU", {}).get("resident") == resident:
                        break
            if count == 3:
                # It looks now and then: a connection that is back by then was not lost to it.
                while f"the connection to {places[0]} is lost; waiting" not in told:
                    told += process.stderr.readline()
        assert found["restarts"] == 1
        assert found["anomalies"] == 0
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "the publisher was restarted: what it had announced is forgotten" in err


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tiering", "events", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_ctrl_c_ends_with_a_summary(publisher: ZmqPublisher) -> None:
    publisher.publish([stored(1)])
    process = started(publisher.endpoint, *QUICK)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"{publisher.endpoint}: " in out
    assert " s, interrupted; " in out
    assert "Traceback" not in err


def test_a_reader_that_leaves_is_no_traceback(publisher: ZmqPublisher) -> None:
    process = started(publisher.endpoint, "--interval", "0.02")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


def test_nobody_who_publishes_is_a_failure_in_one_sentence(tmp_path: Path, capsys: Output) -> None:
    endpoint = f"ipc://{tmp_path}/nobody"
    assert main(["events", endpoint, *QUICK, "--seconds", "0.2"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err == [
        f"events: nobody publishes at {endpoint} yet; waiting",
        f"tiering: {endpoint}: nobody published there",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tcp://nowhere"], "tiering: endpoint = 'tcp://nowhere': is not tcp://HOST:PORT; write"),
        (["tcp://a:1", "--replay", "x"], "tiering: replay_endpoint = 'x': is no endpoint"),
        (["tcp://a:1", "--check", "/nowhere"], "tiering: /nowhere does not exist; give the root"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    arguments: list[str], sentence: str, capsys: Output
) -> None:
    assert main(["events", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(sentence)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--interval", "--seconds"])
def test_times_are_above_0(option: str, capsys: Output) -> None:
    with pytest.raises(SystemExit) as left:
        main(["events", "tcp://a:1", option, "0"])
    assert left.value.code == 2
    assert "0 is not a number above 0" in capsys.readouterr().err


def test_without_pyzmq_it_says_which_extra_is_missing(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise ImportError('no zmq here')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "tiering", "events", "tcp://a:1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "with its extra `events`" in done.stderr


# --check


def test_what_was_announced_is_what_is_on_the_disk(
    publisher: ZmqPublisher, tmp_path: Path, capsys: Output
) -> None:
    fill(tmp_path / "files")
    segment_keys = [examples.key_number(number) for number in range(100, 106)]

    async def fill_segments() -> None:
        async with segment_places.opened(tmp_path / "segments") as tier:
            await examples.stored(tier, segment_keys)

    asyncio.run(fill_segments())
    publisher.publish([announced(*KEYS), stored(1)])
    publisher.publish([announced(*segment_keys)])
    roots = [str(tmp_path / "files"), str(tmp_path / "segments")]
    assert main(at(publisher, *QUICK, "--check", *roots)) == 0
    told = "check: STORAGE is what is on the disk, 26 chunks of 26 blocks\n"
    assert told in capsys.readouterr().out


def test_what_differs_is_told_by_side_and_is_exit_code_4(
    publisher: ZmqPublisher, tmp_path: Path, capsys: Output
) -> None:
    fill(tmp_path)
    publisher.publish([announced(*KEYS[2:]), stored(77, 78, medium=MEDIUM_STORAGE)])
    assert main(at(publisher, *QUICK, "--seconds", "0.5", "--check", str(tmp_path))) == 4
    out = capsys.readouterr().out
    assert "20 chunks of 20 blocks: 2 missing, 2 surplus\n" in out
    assert f"  on the disk, and not announced, group 0: 2: {hash_of(KEYS[0]):#018x}, " in out
    assert f"  announced, and not on the disk, group 0: 2: {77:#018x}, {78:#018x}\n" in out
    assert main(at(publisher, *QUICK, "--seconds", "0.5", "--json", "--check", str(tmp_path))) == 4
    check = last_json(capsys)["check"]
    assert check["equal"] is False
    assert check["surplus"] == {"0": {"count": 2, "first": [77, 78]}}
    assert check["missing"]["0"]["count"] == 2


@pytest.mark.slow
def test_a_difference_that_is_being_made_up_for_is_waited_for(
    publisher: ZmqPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """The engine tells of a chunk only after the look at the disk."""
    fill(tmp_path)
    publisher.publish([announced(*KEYS[1:])])
    looks, real = [], events_check.on_disk

    def look(roots: Sequence[Path], only: Sequence[str]) -> list[StoredChunks]:
        found = real(roots, only)
        looks.append(found)
        if len(looks) == 1:
            publisher.publish([announced(KEYS[0])])
            wait_until(lambda: publisher.stats().batches == 2)
        return found

    monkeypatch.setattr(events_check, "on_disk", look)
    assert main(at(publisher, "--interval", "1", "--check", str(tmp_path))) == 0
    assert "check: STORAGE is what is on the disk" in capsys.readouterr().out
    assert len(looks) == 2


def test_an_engine_that_has_told_of_nothing_is_compared_too(
    publisher: ZmqPublisher, tmp_path: Path, capsys: Output
) -> None:
    fill(tmp_path)
    assert main(at(publisher, *QUICK, "--check", str(tmp_path))) == 4
    assert "20 missing, 0 surplus" in capsys.readouterr().out


def test_chunks_of_several_blocks_stand_for_the_blocks_before_them(
    publisher: ZmqPublisher, tmp_path: Path, capsys: Output
) -> None:
    fill(tmp_path, KEYS[:3], blocks_per_chunk=3)
    chains = [(number * 10 + 1, number * 10 + 2, hash_of(KEYS[number])) for number in range(3)]
    publisher.publish([stored(*chain, medium=MEDIUM_STORAGE) for chain in chains])
    assert main(at(publisher, *QUICK, "--check", str(tmp_path))) == 0
    assert "3 chunks of 9 blocks" in capsys.readouterr().out
    publisher.publish(
        [removed(11, medium=MEDIUM_STORAGE), removed(hash_of(KEYS[2]), medium=MEDIUM_STORAGE)]
    )
    assert main(at(publisher, *QUICK, "--seconds", "0.5", "--json", "--check", str(tmp_path))) == 4
    check = last_json(capsys)["check"]
    assert check["missing"]["0"]["count"] == 2, "one inside of a chunk, one that names a chunk"
    assert sorted(check["surplus"]["0"]["first"]) == [21, 22]


def test_groups_without_full_attention_are_left_out_unless_announced(
    publisher: ZmqPublisher, tmp_path: Path, capsys: Output
) -> None:
    groups = ("full attention", "Group(kind=<Kind.WINDOW: 'sliding window'>, blocks_per_chunk=1)")
    window = [chunk_key(bytes([number]) * 32, 1) for number in range(4)]
    fill(tmp_path, [*KEYS, *window], groups=groups)
    publisher.publish([announced(*KEYS)])
    assert main(at(publisher, *QUICK, "--check", str(tmp_path))) == 0
    assert "left out: group 1, not of full attention: 4 chunks\n" in capsys.readouterr().out
    publisher.publish([announced(*window[:3], group=1)])
    assert main(at(publisher, *QUICK, "--seconds", "0.5", "--check", str(tmp_path))) == 4
    assert "1 missing, 0 surplus" in capsys.readouterr().out


def test_only_the_namespace_that_was_named_is_compared(
    publisher: ZmqPublisher, tmp_path: Path, capsys: Output
) -> None:
    fill(tmp_path)
    fill(tmp_path, KEYS[:5], model="acme/other")
    other = examples.example_namespace(model="acme/other").directory
    publisher.publish([announced(*KEYS[:5])])
    command = at(publisher, *QUICK, "--seconds", "0.5", "--check", str(tmp_path))
    assert main([*command, "--namespace", other]) == 0
    assert main(command) == 4
    assert main([*command, "--namespace", "nothing"]) == 1
    assert "one of those there, without _r<rank>: " in capsys.readouterr().err


def test_what_could_not_be_looked_into_is_exit_code_1(
    publisher: ZmqPublisher, tmp_path: Path, capsys: Output
) -> None:
    async def fill_segments() -> None:
        async with segment_places.opened(tmp_path) as tier:
            await examples.stored(tier, KEYS[:3])

    asyncio.run(fill_segments())
    (segment_places.segments_of(tmp_path) / "table").rename(tmp_path / "table")
    publisher.publish([cleared()])
    assert main(at(publisher, *QUICK, "--check", str(tmp_path))) == 1
    assert "  not looked into: directory = " in capsys.readouterr().out


def test_a_chunk_that_vanishes_from_the_disk_alone_is_surplus(
    publisher: ZmqPublisher, tmp_path: Path, capsys: Output
) -> None:
    fill(tmp_path)
    publisher.publish([announced(*KEYS)])
    file_of(tmp_path, KEYS[4]).unlink()
    assert main(at(publisher, *QUICK, "--seconds", "0.5", "--check", str(tmp_path))) == 4
    assert f"not on the disk, group 0: 1: {hash_of(KEYS[4]):#018x}" in capsys.readouterr().out
