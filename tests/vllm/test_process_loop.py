"""The tiers' loop in a process of its own, behind both doors: the same bytes come back, and the
death of that process costs hits for a moment and nothing else.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inproc import BLOCK_BYTES, EngineProcess, assert_at_rest, connector_config
from offloading_inproc import OffloadingEngine, offloading_config
from prompts import BLOCK, random_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOMY_BYTES = 64 << 20
DEVICE_BLOCKS = 128
HIT = 48 * BLOCK
RESTART_SECONDS = 60.0
LOOP = "tiering-loop"
"""How the process calls itself."""

DOORS: list[Any] = [
    pytest.param(EngineProcess, connector_config, id="connector"),
    pytest.param(OffloadingEngine, offloading_config, id="offloading"),
]


def loops_of(engine: EngineProcess) -> list[int]:
    """The pids of the engine's children that drive tiers."""
    process = engine._process
    assert process is not None
    found = []
    for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for pid in task.read_text().split():
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except FileNotFoundError:
                continue
            if name == LOOP:
                found.append(int(pid))
    return found


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def until(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + RESTART_SECONDS
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.05)


@pytest.mark.parametrize(("kind", "config"), DOORS)
def test_chunks_come_back_and_the_death_of_the_loop_is_survived(
    kind: type[EngineProcess],
    config: Callable[..., dict[str, Any]],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    log = tmp_path / "vllm.log"
    connector = config(tmp_path / "kv", ROOMY_BYTES, blocks_per_chunk=2, loop="process")

    def opened() -> EngineProcess:
        return kind(
            log,
            model=str(tiny_model),
            connector=connector,
            max_model_len=DEVICE_BLOCKS * BLOCK // 2,
            kv_cache_memory_bytes=DEVICE_BLOCKS * BLOCK_BYTES,
        )

    def from_disk(engine: EngineProcess) -> int:
        """Tokens of the prompt that came from there; the answer is right wherever it is from."""
        engine.call("reset")
        engine.call("empty_host")
        with engine.counting() as grown:
            assert engine.ask(prompt).tokens == cold.tokens
        engine.call("settle")
        return grown.get("disk", 0)

    prompt = random_prompt("in a process", HIT + 8)
    with opened() as engine:
        cold, warm = (engine.ask(prompt) for _ in range(2))
        engine.call("settle")
    with opened() as engine:
        (loop,) = loops_of(engine)
        assert engine.ask(prompt) == warm, "from the disk, by another engine's process"
        os.kill(loop, signal.SIGKILL)
        until(lambda: is_gone(loop), "it was not reaped")
        # All of it where a busy machine takes so long to ask that the next one runs by then.
        assert from_disk(engine) in (0, HIT)
        until(lambda: from_disk(engine) == HIT, "the disk never came back")
        assert loops_of(engine) != [loop]
        assert_at_rest(engine)
        (second,) = loops_of(engine)
    until(lambda: is_gone(second), "it outlived its engine, which was killed")
    told = log.read_text(errors="replace")
    assert told.count("the process of the tiers ended (killed by SIGKILL)") == 1
    assert told.count("the process of the tiers runs again") == 1
