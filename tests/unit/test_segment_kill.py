"""A process killed in the middle of a storm of writes, again and again: no wrong byte, no damage,
nothing lost that was acknowledged and that eviction had not reached."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from segment_places import KEYS, an_engine, engines, opened
from storms import killed_storm
from tiering.testing.examples import blank, key_number, payload_of
from tiering.tiers.base import Read
from tiering.tiers.disk import diskio

pytestmark = pytest.mark.slow

BATCH, COUNT = 6, 240
STORM = """
    import asyncio, os, sys
    from pathlib import Path

    from segment_places import an_engine, make_tier
    from tiering.testing.examples import key_number, payload_of, views
    from tiering.tiers.disk import diskio
    from tiering.tiers.base import Write

    diskio.probe = lambda *args: diskio.Direct(reads=True, writes=sys.argv[3] != "portable")


    async def storm(root, first, engine, slots, count):
        tier = make_tier(root, slots, io=an_engine(engine))
        await tier.open()
        os.write(1, b"ready\\n")
        while count > 0:
            keys = [key_number(first + at) for at in range(6)]
            outcomes = await tier.write(keys, views([payload_of(key) for key in keys]))
            assert outcomes == [Write.STORED] * 6, outcomes
            first += 6
            count -= 6
            os.write(1, b"%d\\n" % first)
        sys.stdin.read()


    root, first, engine, slots, count = sys.argv[1:]
    asyncio.run(storm(Path(root), int(first), engine, int(slots), int(count)))
"""


@pytest.fixture(autouse=True)
def one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diskio.Direct(reads=False, writes=False)
    monkeypatch.setattr(diskio, "probe", lambda *args: found)


async def found_after(root: Path, engine: str, slots: int, highest: int) -> set[int]:
    """Which key numbers can be read; each is right, and nothing at all is wrong. The last number
    is read first, so that it stays the most recently used."""
    numbers = range(highest)[::-1]
    keys = [key_number(number) for number in numbers]
    async with opened(root, slots, io=an_engine(engine)) as tier:
        buffers = blank(len(keys))
        outcomes = await tier.read(keys, buffers)
        hits = [at for at, outcome in enumerate(outcomes) if outcome is Read.HIT]
        assert all(bytes(buffers[at]) == payload_of(keys[at]) for at in hits)
        assert {outcome for outcome in outcomes if outcome is not Read.HIT} <= {Read.MISS}
        stats = tier.stats()
        assert [stats[name] for name in ("stale", "damaged_checksum", "damaged_frame")] == [0] * 3
    return {numbers[at] for at in hits}


async def test_nothing_acknowledged_is_lost_where_nothing_is_evicted(tmp_path: Path) -> None:
    chance, first, acknowledged = random.Random(5), 0, set[int]()
    for engine in (engines() * 7)[:7]:
        how = tmp_path, first, engine, 2000, COUNT
        reached = killed_storm(STORM, first, COUNT // BATCH, chance, *how)
        acknowledged |= set(range(first, reached))
        assert await found_after(tmp_path, engine, 2000, reached) >= acknowledged
        first = reached + BATCH  # what was under way may be there or not
    assert len(acknowledged) > 100, "the storms were killed before they began"


async def test_what_is_kept_of_a_storm_with_eviction_is_the_latest(tmp_path: Path) -> None:
    chance, first, slots, acknowledged = random.Random(6), 0, 40, set[int]()
    for engine in (engines() * 13)[:13]:
        how = tmp_path, first, engine, slots, COUNT
        reached = killed_storm(STORM, first, COUNT // BATCH, chance, *how)
        acknowledged |= set(range(first, reached))
        first = reached + BATCH
        found = await found_after(tmp_path, engine, slots, first)
        # What was under way had evicted a batch, whether or not it is there now; and of the
        # oldest batch that is left, the tail may have gone before the head.
        latest = set(range(first - slots + BATCH, first))
        assert found >= latest & acknowledged
        assert len(found) <= slots
    assert len(acknowledged) > slots * 4


def test_the_numbers_of_the_storms_are_those_of_the_other_tests() -> None:
    assert key_number(0) == KEYS[0]
