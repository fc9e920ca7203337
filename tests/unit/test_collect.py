"""What `gc` finds and removes: orphans, left-overs of the dead, and nothing that is in use."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fs_places
import segment_places
from fs_places import KEYS, NAMESPACE, file_of
from tiering.errors import ConfigError
from tiering.testing.examples import example_namespace, stored
from tiering.tiers.disk import temps
from tiering.tiers.files.manifest import Manifest
from tiering.tiers.upkeep.collect import Candidate, Collector, Plan

DAY = 86400.0
OTHER = example_namespace(model="other")


class Later:
    """The real time, some days on: files cannot be told to be older than their inode's change."""

    def __init__(self, days: float = 0) -> None:
        self._days = days

    def now(self) -> float:
        return time.time() + self._days * DAY


def collector(root: Path, days: float = 0, named: tuple[str, ...] = ()) -> Collector:
    return Collector(root, Later(days), 30 * DAY, named)


def collected(root: Path, days: float = 0, named: tuple[str, ...] = ()) -> Plan:
    found = collector(root, days, named)
    plan = found.plan()
    found.carry_out(plan, lambda done, total: None)
    return plan


def only(plan: Plan) -> Candidate:
    (candidate,) = plan.namespaces
    return candidate


async def fill_files(root: Path, model: str = "org/model", rank: int = 0) -> None:
    async with fs_places.opened(root, model=model, rank=rank) as tier:
        await stored(tier, KEYS)


async def fill_segments(root: Path) -> None:
    async with segment_places.opened(root, slots=8, clock=Later()) as tier:
        await stored(tier, KEYS[:6])


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def tree(root: Path) -> list[tuple[str, int]]:
    own = [path for path in root.rglob("*") if ".manifest" not in path.parts]
    return sorted((str(path), path.lstat().st_mtime_ns) for path in own)


def booked(root: Path) -> int:
    manifest = Manifest(root / ".manifest" / "manifest.sqlite3", "test", 0.0)
    try:
        return manifest.totals().chunks
    finally:
        manifest.leave()
        manifest.close()


async def test_what_was_used_lately_is_kept(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    await fill_segments(tmp_path)
    before = tree(tmp_path)
    assert only(collected(tmp_path, days=29)).outcome == "kept"
    assert tree(tmp_path) == before


async def test_a_plan_changes_nothing(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    before = tree(tmp_path)
    candidate = only(collector(tmp_path, days=31).plan())
    assert (candidate.why, candidate.outcome) == ("orphaned", "would be removed")
    assert candidate.chunks == len(KEYS)
    assert candidate.contents.bytes > len(KEYS) * 8192
    assert tree(tmp_path) == before


async def test_orphans_go_with_all_that_is_theirs_and_out_of_the_books(tmp_path: Path) -> None:
    for rank in (0, 1):
        await fill_files(tmp_path, rank=rank)
    await fill_segments(tmp_path)
    segment_places.segments_of(tmp_path).with_suffix(".quarantine").mkdir()
    for end in ("", "-wal", "-shm"):
        (tmp_path / NAMESPACE.directory / f"catalogue.sqlite3{end}").touch()
    assert booked(tmp_path) == 2 * len(KEYS)
    calls: list[tuple[int, int]] = []
    found = collector(tmp_path, days=31)
    plan = found.plan()
    found.carry_out(plan, lambda done, total: calls.append((done, total)))
    assert only(plan).outcome == "removed"
    assert only(plan).chunks == 2 * len(KEYS) + 6
    assert names(tmp_path) == [".manifest"]
    assert booked(tmp_path) == 0
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1] > 10


async def test_use_counts_as_use_though_no_file_changes(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    directory = NAMESPACE.directory + "_r0"
    manifest = Manifest(tmp_path / ".manifest" / "manifest.sqlite3", "test", 0.0)
    manifest.touch(directory, {KEYS[0]: int(Later(20).now() * 1e6)})
    manifest.leave()
    manifest.close()
    assert only(collected(tmp_path, days=49)).outcome == "kept"
    assert only(collected(tmp_path, days=51)).outcome == "removed"


async def test_only_what_is_named_goes_however_young(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    await fill_files(tmp_path, model="other")
    plan = collected(tmp_path, named=(OTHER.directory,))
    assert {each.model: each.outcome for each in plan.namespaces} == {
        "org/model": "kept",
        "other": "removed",
    }
    assert names(tmp_path) == [".manifest", NAMESPACE.directory, f"{NAMESPACE.directory}_r0"]
    assert booked(tmp_path) == len(KEYS)
    with pytest.raises(ConfigError, match=f"no such namespace.*{NAMESPACE.directory}"):
        collected(tmp_path, named=(OTHER.directory,))


async def test_a_namespace_that_an_engine_has_open_is_refused_with_its_process(
    tmp_path: Path,
) -> None:
    await fill_files(tmp_path, model="other")
    async with fs_places.opened(tmp_path) as tier:
        await stored(tier, KEYS)
        before = tree(tmp_path)
        plan = collected(tmp_path, named=(NAMESPACE.directory,))
        refused = next(each for each in plan.namespaces if each.why)
        assert refused.outcome == "refused"
        assert f"process {os.getpid()} may have it open" in refused.refusal
        assert tree(tmp_path) == before
    assert collected(tmp_path, named=(NAMESPACE.directory,)).going


async def test_a_segment_engine_is_known_by_its_lock(tmp_path: Path) -> None:
    async with segment_places.opened(tmp_path, slots=8, clock=Later()) as tier:
        await stored(tier, KEYS[:6])
        candidate = only(collected(tmp_path, days=31))
        assert candidate.outcome == "refused"
        assert f"process {os.getpid()} has it open" in candidate.refusal
    assert only(collected(tmp_path, days=31)).outcome == "removed"


async def test_an_engine_that_started_later_cannot_have_it_open(tmp_path: Path) -> None:
    await fill_files(tmp_path, model="other")
    past = time.time() - 300 * DAY
    for path in (tmp_path / OTHER.directory, *(tmp_path / OTHER.directory).rglob("*")):
        os.utime(path, (past, past))
    async with fs_places.opened(tmp_path):
        plan = collected(tmp_path, named=(OTHER.directory,))
        assert [each.outcome for each in plan.namespaces] == ["kept", "removed"]


async def test_an_engine_that_opens_it_after_the_plan_keeps_it(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    found = collector(tmp_path, named=(NAMESPACE.directory,))
    plan = found.plan()
    async with fs_places.opened(tmp_path):
        found.carry_out(plan, lambda done, total: None)
    assert only(plan).outcome == "refused"
    assert file_of(tmp_path, KEYS[0]).exists()


async def test_a_manifest_that_cannot_be_asked_is_no_permission(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    (tmp_path / ".manifest" / "manifest.sqlite3").write_bytes(b"no table" * 1000)
    candidate = only(collected(tmp_path, days=31))
    assert candidate.outcome == "refused"
    assert "the manifest does not tell whether an engine has it open" in candidate.refusal
    assert file_of(tmp_path, KEYS[0]).exists()


async def test_what_is_not_recognised_keeps_a_namespace(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    await fill_segments(tmp_path)
    rank_dir = tmp_path / f"{NAMESPACE.directory}_r0"
    (tmp_path / "outside").mkdir()
    precious = tmp_path / "outside" / "file"
    precious.touch()
    group = file_of(tmp_path, KEYS[0]).parent
    for path in (
        rank_dir / "notes.txt",
        tmp_path / NAMESPACE.directory / "notes.txt",
        group / "notes.txt",
        segment_places.segments_of(tmp_path) / "notes.txt",
    ):
        path.touch()
        candidate = only(collected(tmp_path, days=31))
        assert (candidate.outcome, candidate.why) == ("refused", "orphaned")
        assert f"{path} is no part of it" in candidate.refusal
        path.unlink()
    link = rank_dir / "000"
    link.symlink_to(tmp_path / "outside")
    assert only(collected(tmp_path, days=31)).outcome == "refused"
    link.unlink()
    assert only(collected(tmp_path, days=31)).outcome == "removed"
    assert precious.exists()


async def test_links_beside_namespaces_are_left_alone(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    await fill_files(root)
    await fill_files(outside, model="other")
    link = root / f"{OTHER.directory}_r0"
    link.symlink_to(outside / f"{OTHER.directory}_r0")
    (root / "lost+found").mkdir()
    before = tree(outside)
    collected(root, days=31)
    assert names(root) == [".manifest", "lost+found", link.name]
    assert tree(outside) == before


@pytest.mark.parametrize("made", [[], ["some", "lost+found"]])
def test_a_root_without_any_namespace_is_refused(made: list[str], tmp_path: Path) -> None:
    for name in made:
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"has no namespace in it; name the root_dir"):
        collected(tmp_path)
    assert names(tmp_path) == sorted(made)


async def test_chunks_that_nothing_describes_go_after_an_hour(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    (tmp_path / NAMESPACE.directory / "config.json").unlink()
    assert only(collected(tmp_path)).outcome == "kept"
    candidate = only(collected(tmp_path, days=0.1))
    assert (candidate.why, candidate.outcome) == ("no config.json", "removed")


def dead_temp_name() -> str:
    """A temp file's name of a process that has ended."""
    code = "from tiering.tiers.disk.temps import temp_name; print(temp_name())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


async def test_temp_files_of_the_dead_go_and_leave_the_age_as_it_is(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    staging = tmp_path / NAMESPACE.directory / "tmp_r0"
    dead, live = staging / dead_temp_name(), staging / temps.temp_name()
    other = staging / "other.tmp"
    for path in (dead, live, other):
        path.touch()
    past = time.time() - 10 * DAY
    os.utime(staging, (past, past))
    assert collector(tmp_path).plan().temp_files == [dead]
    assert dead.exists()
    assert collected(tmp_path).temp_files == [dead]
    assert sorted(staging.iterdir()) == sorted([live, other])
    assert staging.stat().st_mtime == pytest.approx(past)


async def test_empty_directories_go_and_others_stay(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    rank_dir = tmp_path / f"{NAMESPACE.directory}_r0"
    gone = file_of(tmp_path, KEYS[0])
    gone.unlink()
    (rank_dir / "fff").mkdir(exist_ok=True)
    stays = file_of(tmp_path, KEYS[1]).parent
    (stays.parent / "ee_g7").mkdir()
    plan = collected(tmp_path)
    assert len(plan.empty_directories) == 4
    assert not gone.parent.parent.exists()
    assert not (rank_dir / "fff").exists()
    assert [path.name for path in stays.parent.iterdir()] == [stays.name]
    assert collected(tmp_path).empty_directories == []


async def test_what_an_interrupted_run_left_is_removed_and_nothing_like_it(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    dead = tmp_path / f".removed-{dead_temp_name().removesuffix('.tmp')}"
    live = tmp_path / f".removed-{temps.owner_name()}"
    strange = tmp_path / ".removed-mine"
    for path in (dead, live, strange):
        (path / "some" / "000").mkdir(parents=True)
        (path / "some" / "000" / "file").touch()
    assert collector(tmp_path).plan().left_overs == [dead]
    collected(tmp_path)
    assert not dead.exists()
    assert live.exists()
    assert strange.exists()


async def test_two_runs_that_remove_the_same_leave_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill_files(tmp_path)
    found = collector(tmp_path, days=31)
    plan = found.plan()
    rmtree, met = shutil.rmtree, set[str]()

    def meets_another(path: str) -> None:
        if path not in met:
            met.add(path)
            raise FileNotFoundError(2, "No such file or directory", f"{path}/taken by the other")
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", meets_another)
    found.carry_out(plan, lambda done, total: None)
    assert names(tmp_path) == [".manifest"]
    assert plan.problems == []


async def test_what_cannot_be_moved_is_told_and_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await fill_files(tmp_path)

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr("tiering.tiers.upkeep.collect.os.rename", refuse)
    candidate = only(collected(tmp_path, days=31))
    assert candidate.outcome == "failed"
    assert "Permission denied" in candidate.refusal
    assert file_of(tmp_path, KEYS[0]).exists()
    assert booked(tmp_path) == len(KEYS)


def test_what_an_engine_begins_anew_meanwhile_is_not_forgotten(tmp_path: Path) -> None:
    asyncio.run(fill_files(tmp_path))
    found = collector(tmp_path, days=31)
    plan = found.plan()
    anew: list[int] = []

    def begin(done: int, total: int) -> None:
        if not anew:
            anew.append(done)
            asyncio.run(fill_files(tmp_path))

    found.carry_out(plan, begin)
    assert only(plan).outcome == "removed"
    assert booked(tmp_path) == len(KEYS)
    assert all(file_of(tmp_path, key).exists() for key in KEYS)
