"""What chunks on a disk hold, written beside them: shared, bounded, and of no harm when broken."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tiering.events.descriptions import Description, Suspects, Told
from tiering.testing.clocks import ManualClock
from tiering.tiers.disk import catalogue as module
from tiering.tiers.disk import mounts
from tiering.tiers.disk.catalogue import Catalogue, catalogue_path

KEYS = [bytes([at]) * 36 for at in range(8)]
TOLD = [Description(key[:8], b"", key[:4] * 4, "adapter", [["salt"], None]) for key in KEYS]
PAIRS = list(zip(KEYS, TOLD, strict=True))
SECONDS = 60.0

Make = Callable[..., Catalogue]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Catalogue] = []

    def make(
        prepare: Callable[[], Path] | None = None, clock: ManualClock | None = None
    ) -> Catalogue:
        path = tmp_path / "catalogue.sqlite3"
        made.append(Catalogue(prepare or (lambda: path), clock))
        return made[-1]

    yield make
    for each in made:
        each.close()


def answers(catalogue: Catalogue, keys: list[bytes]) -> Told:
    assert catalogue.ask(keys)
    give_up = time.monotonic() + SECONDS
    while time.monotonic() < give_up:
        for answer in catalogue.take():
            if isinstance(answer, Told):
                return answer
        time.sleep(0.001)
    raise AssertionError("no answer")


def test_what_was_kept_is_told_to_any_engine_until_it_is_forgotten(make: Make) -> None:
    one, other = make(), make()
    one.keep(PAIRS[:4])
    assert answers(one, KEYS[:5]) == Told(PAIRS[:4], [KEYS[4]])
    assert answers(other, KEYS[:1]) == Told(PAIRS[:1], [])
    other.keep(PAIRS[3:6])
    other.forget(KEYS[:1])
    assert answers(other, KEYS).missing == [KEYS[0], *KEYS[6:]]
    one.close()
    assert answers(make(), KEYS).missing == [KEYS[0], *KEYS[6:]]


def test_the_file_is_for_its_owner_alone(make: Make, tmp_path: Path) -> None:
    catalogue = make()
    catalogue.keep(PAIRS)
    answers(catalogue, KEYS)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {0o600}


def test_suspects_are_those_from_before(make: Make) -> None:
    clock = ManualClock()
    catalogue = make(clock=clock)
    clock.advance(100)
    catalogue.keep(PAIRS[:3])
    answers(catalogue, KEYS)
    clock.advance(100)
    catalogue.keep(PAIRS[3:])
    catalogue.suspect(150.0)
    catalogue.suspect(150.0, KEYS[1])
    catalogue.suspect(150.0, KEYS[2])
    assert catalogue.ask([])
    found = []
    give_up = time.monotonic() + SECONDS
    while catalogue.is_asked and time.monotonic() < give_up:
        found += [answer for answer in catalogue.take() if isinstance(answer, Suspects)]
    assert found == [Suspects(KEYS[:3]), Suspects(KEYS[2:3])]


@pytest.mark.parametrize("damage", ["text", "version", "row"])
def test_a_broken_file_is_made_anew(
    damage: str, make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "catalogue.sqlite3"
    first = make()
    first.keep(PAIRS)
    answers(first, KEYS)
    first.close()
    if damage == "text":
        path.write_bytes(b"no database at all, but long enough to be taken for one" * 100)
    else:
        with sqlite3.connect(path) as database:
            if damage == "version":
                database.execute("PRAGMA user_version = 99")
            else:
                database.execute("UPDATE chunk SET body = x'c1'")
        database.close()
    catalogue = make()
    assert answers(catalogue, KEYS).missing == KEYS
    catalogue.keep(PAIRS)
    assert answers(catalogue, KEYS).described == PAIRS
    assert catalogue.counters.snapshot()["catalogue_errors"] == 1
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1


def test_one_that_is_removed_under_those_who_use_it_is_made_anew_for_all(
    make: Make, tmp_path: Path
) -> None:
    one, other = make(), make()
    one.keep(PAIRS[:2])
    other.keep(PAIRS[2:4])
    answers(one, KEYS)
    assert answers(other, KEYS).missing == KEYS[4:]
    for path in tmp_path.iterdir():
        path.unlink()
    assert answers(one, KEYS).missing == KEYS
    one.keep(PAIRS[:2])
    assert answers(one, KEYS[:2]).missing == []
    assert answers(other, KEYS).described == PAIRS[:2]
    other.keep(PAIRS[2:4])
    assert answers(other, KEYS[:4]).missing == []
    assert answers(one, KEYS).described == PAIRS[:4]


def test_one_that_an_engine_finds_broken_is_not_taken_from_another_that_made_it_anew(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "catalogue.sqlite3"
    one, other = make(), make()
    one.keep(PAIRS[:2])
    answers(one, KEYS)

    def broken(body: bytes) -> Description:
        for each in tmp_path.iterdir():
            each.unlink()
        other.keep(PAIRS[4:6])
        answers(other, [])
        raise msgspec.DecodeError("not a description")

    monkeypatch.setattr(module, "decode", broken)
    answers(one, KEYS)
    monkeypatch.undo()
    assert answers(one, KEYS).described == PAIRS[4:6]
    assert path.exists()
    assert answers(other, KEYS).described == PAIRS[4:6]


def test_where_there_can_be_none_every_question_is_answered(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare() -> Path:
        raise OSError("not here")

    catalogue = make(prepare)
    catalogue.keep(PAIRS)
    for _ in range(3):
        assert answers(catalogue, KEYS).missing == KEYS
    assert catalogue.counters.snapshot()["catalogue_errors"] == 4
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1


def test_what_is_too_much_is_left_out_and_counted(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "TASKS_MAX", 2)
    is_open = threading.Event()

    def prepare() -> Path:
        is_open.wait(SECONDS)
        return tmp_path / "catalogue.sqlite3"

    catalogue = make(prepare)
    for pair in PAIRS:
        catalogue.keep([pair])
    skipped = catalogue.counters.snapshot()["catalogue_skipped"]
    assert skipped >= 5
    assert not catalogue.ask(KEYS)
    assert not catalogue.is_asked
    is_open.set()


def test_a_network_file_system_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert catalogue_path(tmp_path, "a_0123456789ab").name == "catalogue.sqlite3"
    # No network file system can be had here; what kind this one is, is asked of one function.
    monkeypatch.setattr(mounts, "kind_of", lambda directory: "nfs4")
    with pytest.raises(OSError, match="locks cannot be trusted"):
        catalogue_path(tmp_path, "a_0123456789ab")
