"""A writer of files killed in a storm of writes, again and again: no wrong byte, no damage, nothing
lost that was acknowledged and that eviction had not reached."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fs_places import files, opened
from storms import killed_storm
from tiering.testing.examples import CHUNK_BYTES, blank, key_number, payload_of
from tiering.tiers.base import Read
from tiering.tiers.files.limits import Limits, max_bytes_for

pytestmark = pytest.mark.slow

KILLS, BATCH, CHUNKS = 20, 6, 40
LIMITS = Limits(max_bytes_for(CHUNKS, CHUNK_BYTES), min_free_bytes=0)

STORM = """
    import asyncio, os, sys
    from test_fs_kill import BATCH, LIMITS, Path, key_number, opened, payload_of
    from tiering.testing.examples import views
    from tiering.tiers.base import Write
    from tiering.tiers.files import books
    from tiering_kernels.engines import open_engine

    books.COUNT_SECONDS_MAX = 60.0  # as in the tests' own process
    root, first, durability, engine = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]

    async def storm(first):
        io = open_engine(engine)
        async with opened(root, limits=LIMITS, durability=durability, io=io) as tier:
            os.write(1, b"ready\\n")
            while True:
                keys = [key_number(first + at) for at in range(BATCH)]
                outcomes = await tier.write(keys, views([payload_of(key) for key in keys]))
                assert outcomes == [Write.STORED] * BATCH, outcomes
                first += BATCH
                os.write(1, b"%d\\n" % first)

    asyncio.run(storm(first))
"""


@pytest.mark.parametrize("durability", ["none", "batch"])
async def test_nothing_acknowledged_is_lost_but_to_eviction(
    tmp_path: Path, durability: str
) -> None:
    chance, first, acknowledged = random.Random(len(durability)), 0, set[int]()
    for kill in range(KILLS // 2):
        engine = ("uring", "threads", "portable")[kill % 3]
        reached = killed_storm(STORM, first, 25, chance, tmp_path, first, durability, engine)
        acknowledged |= set(range(first, reached))
        first = reached + BATCH  # what was under way may be there or not
        numbers = range(first)[::-1]  # the last is read first, and stays the most recently used
        keys = [key_number(number) for number in numbers]
        async with opened(tmp_path, limits=LIMITS) as tier:
            buffers = blank(len(keys))
            outcomes = await tier.read(keys, buffers)
            hits = [at for at, outcome in enumerate(outcomes) if outcome is Read.HIT]
            assert all(bytes(buffers[at]) == payload_of(keys[at]) for at in hits)
            assert {outcomes[at] for at in set(range(len(keys))).difference(hits)} <= {Read.MISS}
            assert not any(name.startswith("damaged") for name in tier.stats())
        found = {numbers[at] for at in hits}
        # What was under way had taken the files of a batch, and evicted as much.
        latest = set(range(first - CHUNKS + 2 * BATCH, first))
        assert found >= latest & acknowledged
        assert len(found) <= CHUNKS
        assert files(tmp_path, "*.tmp") == []
    assert len(acknowledged) > CHUNKS, "the storms were killed before they began"
