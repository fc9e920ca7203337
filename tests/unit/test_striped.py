"""Chunks over several roots: which root has which, and what a root that fails costs."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fs_places import make_tier
from tiering.errors import ClosedError, ConfigError, DamagedChunk, TierError
from tiering.testing.clocks import ManualClock
from tiering.testing.examples import blank, key_number, payload_of, scanned, stored, views
from tiering.testing.memory import MemoryTier, checked
from tiering.tiers.base import Delete, Failed, Read, Tier, Write
from tiering.tiers.wrappers.guarded import GuardedTier
from tiering.tiers.wrappers.striped import StripedTier
from wrapped import KEYS, StubbornTier, told, until


def roots(count: int, make: Callable[[str], MemoryTier] | None = None) -> list[Any]:
    return [(make or (lambda name: MemoryTier(name=name)))(f"root{i}") for i in range(count)]


@asynccontextmanager
async def striped(tiers: Sequence[Tier]) -> AsyncIterator[tuple[StripedTier, ManualClock]]:
    clock = ManualClock()
    tier = StripedTier(tiers, clock)
    await tier.open()
    try:
        yield tier, clock
    finally:
        for root in tiers:
            if isinstance(root, MemoryTier):
                root.let_all_go()  # a test that failed must not hang
        await tier.close()


async def places(tiers: Sequence[MemoryTier], keys: Sequence[bytes]) -> dict[bytes, str]:
    """The name of the root that has each of `keys`."""
    for tier in tiers:
        tier.chunks.clear()
    async with striped(tiers) as (tier, _):
        await tier.write(keys, views([b""] * len(keys)))
    found = [(key, tier.name) for tier in tiers for key in tier.chunks]
    assert len(found) == len(keys)
    return dict(found)


def owned(tier: StripedTier, root: MemoryTier) -> list[int]:
    """Which of KEYS lie in `root`, all of them stored."""
    return [i for i, key in enumerate(KEYS) if key in root.chunks]


# Which root has which key


async def test_keys_are_spread_evenly() -> None:
    keys = [key_number(i, group=i % 2) for i in range(8000)]
    counts = Counter((await places(roots(4), keys)).values())
    assert all(1840 < count < 2160 for count in counts.values()), counts  # four deviations


async def test_a_new_root_takes_its_share_and_moves_nothing_else() -> None:
    keys = [key_number(i) for i in range(4000)]
    before, after = await places(roots(3), keys), await places(roots(4), keys)
    moved = [key for key in keys if before[key] != after[key]]
    assert {after[key] for key in moved} == {"root3"}
    assert 890 < len(moved) < 1110


async def test_the_order_of_the_roots_does_not_matter() -> None:
    tiers = roots(4)
    assert await places(tiers, KEYS) == await places(tiers[::-1], KEYS)


async def test_the_place_of_a_key_is_the_same_for_ever() -> None:
    """What has been stored is lost if this changes."""
    found = await places(roots(3), KEYS)
    assert "".join(found[key][-1] for key in KEYS) == "010110021212121122212001"


def test_roots_have_different_names() -> None:
    for wrong in ([], [MemoryTier(), MemoryTier()]):
        with pytest.raises(ValueError, match="roots need different names"):
            StripedTier(wrong, ManualClock())
    assert StripedTier(roots(1), ManualClock()).name == "root0"
    assert StripedTier(roots(3), ManualClock()).name == "root0 +2"


# Calls


async def test_each_method_of_a_tier_reaches_every_root() -> None:
    tiers = roots(3)
    uses: dict[str, Callable[[StripedTier], Any]] = {
        "contains": lambda tier: tier.contains(KEYS),
        "read": lambda tier: tier.read(KEYS, blank(24)),
        "write": lambda tier: stored(tier, KEYS),
        "delete": lambda tier: tier.delete(KEYS),
        "touch": lambda tier: tier.touch(KEYS),
    }
    async with striped(tiers) as (tier, _):
        for operation, use in uses.items():
            for root in tiers:
                root.calls.clear()
            await use(tier)
            calls = [call for root in tiers for call in root.calls]
            assert [name for name, _ in calls] == [operation] * 3
            assert sorted(key for _, keys in calls for key in keys) == sorted(KEYS)
            for _, keys in calls:
                assert list(keys) == [key for key in KEYS if key in keys]  # the head stays first
        await stored(tier, KEYS)
        assert await scanned(tier) == sorted(KEYS)
        assert tier.stats()["now_chunks"] == 24
        assert all(root.is_open for root in tiers)
    assert not any(root.is_open for root in tiers)
    elsewhere = {"name", "stats", "scan", "open", "close", "watch"}
    assert Tier.__abstractmethods__ == set(uses) | elsewhere


async def test_a_failed_root_fails_its_share_alone_and_is_named() -> None:
    tiers = roots(3)
    async with striped(tiers) as (tier, _):
        await stored(tier, KEYS)
        mine = owned(tier, tiers[1])
        tiers[1].errors = dict.fromkeys(
            ("read", "contains", "write", "delete", "touch"), TierError("root1", None, "EIO")
        )
        answers: list[list[Any]] = [
            await tier.read(KEYS, buffers := blank(24)),
            await tier.contains(KEYS),
            await tier.write(KEYS, blank(24)),
        ]
        for outcomes, well in zip(answers, (Read.HIT, Read.HIT, Write.ALREADY_THERE), strict=True):
            for i, outcome in enumerate(outcomes):
                if i not in mine:
                    assert outcome is well
                    continue
                assert isinstance(outcome, Failed)
                assert str(outcome.error) == f"root0 +2: {KEYS[i].hex()}: root1: EIO"
                assert (outcome.error.tier, outcome.error.key) == (tier.name, KEYS[i])
                assert outcome.error.__traceback__ is None
        assert all(buffers[i] == payload_of(KEYS[i]) for i in range(24) if i not in mine)
        with pytest.raises(TierError, match="EIO"):
            await tier.touch(KEYS)
        assert [
            i for i, gone in enumerate(await tier.delete(KEYS)) if isinstance(gone, Failed)
        ] == (mine)
        assert len(tiers[0].chunks) + len(tiers[2].chunks) == 0


async def test_a_failure_of_one_key_names_its_root_and_keeps_its_kind() -> None:
    tiers = roots(2)
    async with striped(tiers) as (tier, _):
        await stored(tier, KEYS)
        kinds = (DamagedChunk, TierError)
        for root, kind in zip(tiers, kinds, strict=True):
            key = next(iter(root.chunks))
            root.reads = {key: Failed(kind(root.name, key, "wrong"))}
            (outcome,) = await tier.read([key], blank(1))
            assert isinstance(outcome, Failed)
            assert type(outcome.error) is kind
            assert str(outcome.error) == f"root0 +1: {key.hex()}: {root.name}: wrong"


async def test_roots_work_at_once() -> None:
    tiers = roots(3)
    async with striped(tiers) as (tier, _):
        await stored(tier, KEYS)
        for root in tiers:
            root.calls.clear()
            root.hold("read")
        reading = asyncio.create_task(tier.read(KEYS, blank(24)))
        await until(lambda: all(root.calls for root in tiers))
        for root in tiers:
            root.let_go("read")
        assert await reading == [Read.HIT] * 24


async def test_a_cancelled_read_waits_for_every_root() -> None:
    tiers = roots(3, StubbornTier)
    async with striped(tiers) as (tier, _):
        await stored(tier, KEYS)
        gates = [root.hang(next(iter(root.chunks))) for root in tiers]
        reading = asyncio.create_task(tier.read(KEYS, blank(24)))
        await until(lambda: all(root.calls[-1][0] == "read" for root in tiers))
        reading.cancel()
        for gate in gates:
            done, _ = await asyncio.wait({reading}, timeout=0.01)
            assert not done
            reading.cancel()
            gate.set()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_a_bug_is_raised_when_every_root_has_come_back() -> None:
    tiers = roots(2, StubbornTier)
    async with striped(tiers) as (tier, _):
        await stored(tier, KEYS)
        tiers[0].errors["read"] = LookupError("a bug")
        gate = tiers[1].hang(next(iter(tiers[1].chunks)))
        reading = asyncio.create_task(tier.read(KEYS, blank(24)))
        done, _ = await asyncio.wait({reading}, timeout=0.01)
        assert not done
        gate.set()
        with pytest.raises(LookupError, match="a bug"):
            await reading
        with pytest.raises(ValueError, match="24 keys with 1 buffers"):
            await tier.read(KEYS, blank(1))


async def test_stats_are_sums() -> None:
    tiers = roots(2)
    async with striped([GuardedTier(root, ManualClock(), errors_max=1) for root in tiers]) as (
        tier,
        _,
    ):
        await stored(tier, KEYS)
        for root in tiers:
            root.reads = dict.fromkeys(KEYS, Failed(TierError(root.name, None, "EIO")))
        await tier.read(KEYS, blank(24))
        assert await tier.read(KEYS, blank(24)) == [Read.MISS] * 24
        found = tier.stats()
    assert (found["now_chunks"], found["trips"], found["now_loads_out"]) == (24, 2, 2)
    assert (found["refused_loads"], found["now_roots_out"]) == (24, 0)


async def test_what_a_new_root_took_over_is_not_listed_where_it_lay() -> None:
    tiers = roots(3)
    async with striped(tiers[:2]) as (tier, _):
        await stored(tier, KEYS)
    async with striped(tiers) as (tier, _):
        there = await tier.contains(KEYS)
        assert Read.MISS in there
        found = [key for key, hit in zip(KEYS, there, strict=True) if hit is Read.HIT]
        assert await scanned(tier) == sorted(found)


async def test_a_root_that_cannot_be_listed_is_told_after_the_others() -> None:
    class Unlisted(MemoryTier):
        async def scan(self) -> AsyncIterator[list[bytes]]:
            raise TierError(self.name, None, "cannot list")
            yield []

    tiers = [Unlisted(name="root0"), *roots(3)[1:]]
    found: list[bytes] = []
    async with striped(tiers) as (tier, _):
        await stored(tier, KEYS)
        batches = tier.scan()
        for _ in tiers[1:]:
            found += await anext(batches)
        with pytest.raises(TierError, match="root0: cannot list"):
            await anext(batches)
    assert sorted(found) == sorted([*tiers[1].chunks, *tiers[2].chunks])


# Roots that are out


def away() -> ConfigError:
    error = ConfigError("root_dir", "/mnt/b", "No such file or directory", "mount it")
    error.__cause__ = FileNotFoundError(errno.ENOENT, "No such file or directory")
    return error


def read_only() -> ConfigError:
    error = ConfigError("root_dir", "/mnt/b", "Read-only file system", "mount it writable")
    error.__cause__ = OSError(errno.EROFS, "Read-only file system")
    return error


@pytest.mark.parametrize(
    "error", [TierError("root1", None, "Input/output error"), away(), read_only()], ids=str
)
async def test_a_root_whose_disk_is_away_costs_its_share_alone(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = roots(3)
    home = await places(tiers, KEYS)
    tiers[1].errors["open"] = error
    for root in tiers:
        root.chunks.clear()
        root.calls.clear()
    async with striped(tiers) as (tier, _):
        written = await tier.write(KEYS, views([payload_of(key) for key in KEYS]))
        asked = await tier.contains(KEYS)
        read = await tier.read(KEYS, blank(24))
        await tier.touch(KEYS)
        deleted = await tier.delete(KEYS)
        assert len(await scanned(tier)) == 0
        for key, *outcomes in zip(KEYS, written, asked, read, deleted, strict=True):
            if home[key] != "root1":
                assert outcomes == [Write.STORED, Read.HIT, Read.HIT, Delete.DELETED]
            else:
                assert outcomes[:3] == [Write.REFUSED, Read.MISS, Read.MISS]
                assert "root1: out of service" in str(outcomes[3].error)
        lost = Counter(home.values())["root1"]
        found = tier.stats()
        assert found["now_roots_out"] == 1
        assert (found["refused_loads"], found["refused_stores"]) == (2 * lost, lost)
    assert [name for name, _ in tiers[1].calls] == ["open"]
    (warning,) = told(caplog, logging.WARNING)
    assert warning.startswith("root1: left out")
    assert str(error) in warning


async def test_a_users_mistake_in_one_root_is_raised_and_the_others_are_closed() -> None:
    tiers = roots(3)
    tiers[0].errors["open"] = TierError("root0", None, "EIO")
    tiers[1].errors["open"] = ConfigError("root_dir", "/mnt/b", "Permission denied", "allow it")
    with pytest.raises(ConfigError, match=r"root1: Permission denied; allow it"):
        await StripedTier(tiers, ManualClock()).open()
    assert not tiers[2].is_open
    assert tiers[2].calls == [("open", ()), ("close", ())]


async def test_where_no_root_opens_the_first_error_is_raised() -> None:
    tiers = roots(2)
    tiers[0].errors["open"] = TierError("root0", None, "EIO")
    tiers[1].errors["open"] = away()
    tier = StripedTier(tiers, ManualClock())
    with pytest.raises(TierError, match="root0: EIO"):
        await tier.open()
    with pytest.raises(ClosedError):
        await tier.contains(KEYS)


async def test_a_missing_directory_of_the_fs_tier_counts_as_a_disk_that_is_away(
    tmp_path: Path,
) -> None:
    here, missing = make_tier(tmp_path / "here"), make_tier(tmp_path / "not mounted" / "kv")
    async with striped([missing, here]) as (tier, _):
        assert tier.stats()["now_roots_out"] == 1
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="name a directory"):
        await StripedTier([here, make_tier(tmp_path / "file")], ManualClock()).open()


async def test_a_root_that_was_out_is_tried_again_while_in_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    tiers = roots(2)
    tiers[1].errors["open"] = away()
    async with striped(tiers) as (tier, clock):
        for seconds, attempts in ((29.9, 1), (0.1, 2), (29.9, 2), (0.1, 3)):
            clock.advance(seconds)
            for _ in range(3):
                await tier.contains(KEYS)
            await until(lambda: tier._reopening is None or tier._reopening.done())
            assert tiers[1].calls == [("open", ())] * attempts
        tiers[1].errors = {}
        clock.advance(30)
        await tier.touch(KEYS)
        await until(lambda: tiers[1].is_open)
        assert tier.stats()["now_roots_out"] == 0
        await stored(tier, KEYS)
        clock.advance(30)
        await tier.contains(KEYS)
        assert [name for name, _ in tiers[1].calls].count("open") == 4
    assert not tiers[1].is_open
    assert len(told(caplog, logging.WARNING)) == 1
    assert told(caplog)[1:] == ["root1: in service again"]


async def test_close_ends_an_attempt_to_open_a_root_again() -> None:
    class Hanging(MemoryTier):
        cancelled = False

        async def open(self) -> None:
            if not self.calls:
                await super().open()
            self.calls.append(("opening", ()))
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    tiers = [MemoryTier(name="root0"), Hanging(name="root1")]
    tiers[1].errors["open"] = away()
    async with striped(tiers) as (tier, clock):
        clock.advance(30)
        await tier.contains(KEYS)
        await until(lambda: tiers[1].calls[-1][0] == "opening")
        clock.advance(30)
        await tier.contains(KEYS)
        assert len(tiers[1].calls) == 2
    assert isinstance(tiers[1], Hanging)
    assert tiers[1].cancelled


async def test_a_cancelled_open_closes_what_had_opened() -> None:
    class Hanging(MemoryTier):
        async def open(self) -> None:
            self.calls.append(("open", ()))
            await asyncio.Event().wait()

    tiers = [MemoryTier(name="root0"), Hanging(name="root1")]
    opening = asyncio.create_task(StripedTier(tiers, ManualClock()).open())
    await until(lambda: tiers[0].is_open and tiers[1].calls)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not tiers[0].is_open


async def test_every_root_is_closed_and_then_the_first_error_raised() -> None:
    class Failing(MemoryTier):
        async def close(self) -> None:
            await super().close()
            raise TierError(self.name, None, "cannot sync")

    tiers = [Failing(name="root0"), MemoryTier(name="root1")]
    tier = StripedTier(tiers, ManualClock())
    await tier.open()
    with pytest.raises(RuntimeError, match="already open"):
        await tier.open()
    with pytest.raises(TierError, match="root0: cannot sync"):
        await tier.close()
    assert not tiers[1].is_open
    tiers[1].chunks[KEYS[0]] = checked(payload_of(KEYS[0]))
    assert tier.stats()["now_chunks"] == 1  # also of a closed tier
