"""SIGKILL of a whole server while it stores, again and again: nothing half-written is ever read,
and nothing is left behind for ever."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from prompts import BLOCK, random_prompt
from tiering.keys import chunk_key
from tiering.tiers import frame
from tiering_benchmarks.client import Client, RequestFailed
from tiering_benchmarks.demo import connector_config, wait_at_rest

if TYPE_CHECKING:
    from .conftest import ServerFactory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

KILLS = 5
PROMPT_BLOCKS = 60
FILES_DEADLINE_SECONDS = 60.0


def regions_of(pids: Sequence[int]) -> set[Path]:
    """The host tiers' regions that these processes have mapped, by the names they had."""
    lines = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {Path(name) for name in re.findall(r"/dev/shm/kvtier-\S+", lines)}


def chunk_files(root: Path) -> list[Path]:
    return list(root.rglob("???/*/*.bin"))


class Storing:
    """Asks one new prompt after another, each of which is stored, until the server is gone."""

    def __init__(self, client: Client, kill: int) -> None:
        self.asked: list[list[int]] = []
        self._client = client
        self._kill = kill
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while True:
            prompt = random_prompt((self._kill, len(self.asked)), PROMPT_BLOCKS * BLOCK + 8)
            self.asked.append(prompt)
            try:
                self._client.complete(prompt, 1)
            except RequestFailed:
                return


def wait_for_files(root: Path, more_than: int) -> None:
    deadline = time.monotonic() + FILES_DEADLINE_SECONDS
    while len(chunk_files(root)) <= more_than:
        assert time.monotonic() < deadline, "nothing is being stored"
        time.sleep(0.002)


def assert_whole(path: Path) -> None:
    content = memoryview(path.read_bytes())
    header, payload = content[: frame.HEADER_BYTES], content[frame.HEADER_BYTES :]
    digest = bytes(header[24:56])
    assert frame.check(header, chunk_key(bytes.fromhex(path.stem)), digest, payload) is None, path


def test_kills_during_stores_leave_no_wrong_byte_and_no_litter(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    chance = random.Random(3)
    regions: set[Path] = set()
    server = make_server(
        connector=connector_config(tmp_path, 64 << 20, blocks_per_chunk=1), block_size=BLOCK
    )
    asked: list[list[int]] = []
    for kill in range(KILLS):
        server.start()
        storing = Storing(server.client, kill)
        there_are = len(chunk_files(tmp_path))
        wait_for_files(tmp_path, there_are + chance.randrange(3 * PROMPT_BLOCKS))
        regions |= regions_of(server.processes())
        server.kill()
        storing.join()
        asked += storing.asked

    with server:
        assert not list(tmp_path.rglob("*.tmp"))
        regions |= regions_of(server.processes())
        assert len(regions) == KILLS + 1
        files = chunk_files(tmp_path)
        assert len(files) > KILLS
        for path in files:
            assert_whole(path)
        # The last prompt of each round was cut off somewhere; the ones before it are whole.
        hits = 0
        for i, prompt in enumerate(asked):
            cold = server.client.complete(prompt, 8, cache_salt=f"stranger {i}")
            answer = server.client.complete(prompt, 8)
            assert (cold.cached_tokens, answer.token_ids) == (0, cold.token_ids)
            hits += answer.cached_tokens
        assert server.client.cached_by_source()["disk"] == hits > 0
        metrics = server.client.metrics()
        assert metrics["vllm:tiering_promotions_damaged_total"] == 0
        assert metrics["vllm:tiering_promotions_missing_total"] == 0
        wait_at_rest(tmp_path, len(files))
    assert not [path for path in regions if path.exists()]
