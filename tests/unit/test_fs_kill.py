"""A writer of files killed in a storm of writes, again and again: no wrong byte, no damage, nothing
lost that was acknowledged and that eviction had not reached."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fs_places import files, opened
from tiering.testing.examples import CHUNK_BYTES, blank, key_number, payload_of
from tiering.tiers.base import Read
from tiering.tiers.files.limits import Limits, max_bytes_for

pytestmark = pytest.mark.slow

KILLS, BATCH, CHUNKS = 20, 6, 40
LIMITS = Limits(max_bytes_for(CHUNKS, CHUNK_BYTES), min_free_bytes=0)

STORM = textwrap.dedent(
    """
    import asyncio, os, sys
    sys.path.insert(0, sys.argv[1])
    from test_fs_kill import BATCH, LIMITS, Path, key_number, opened, payload_of
    from tiering.testing.examples import views
    from tiering.tiers.base import Write
    from tiering_kernels.engines import open_engine

    root, first, durability, engine = Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]

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
)


def killed_storm(root: Path, first: int, how: tuple[str, str], chance: random.Random) -> int:
    """Store keys from number `first` on and be killed at some point; the number below which all
    were acknowledged."""
    arguments = [str(Path(__file__).parent), str(root), str(first), *how]
    with subprocess.Popen(
        [sys.executable, "-c", STORM, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        for _ in range(chance.randrange(25)):
            first = int(child.stdout.readline())
        for _ in range(chance.randrange(20_000)):
            pass  # somewhere between this acknowledgement and the next one
        child.kill()
        rest = child.stdout.read().split()
        child.communicate()
    return int(rest[-1]) if rest else first


@pytest.mark.parametrize("durability", ["none", "batch"])
async def test_nothing_acknowledged_is_lost_but_to_eviction(
    tmp_path: Path, durability: str
) -> None:
    chance, first, acknowledged = random.Random(len(durability)), 0, set[int]()
    for kill in range(KILLS // 2):
        engine = ("uring", "threads", "portable")[kill % 3]
        reached = killed_storm(tmp_path, first, (durability, engine), chance)
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
