"""The engine of `inproc`, publishing KV events, and asked for what it has of a prompt.

`EventEngine` is the test's half; run as a program, this file is the other one. What is held is
looked up where it is: vLLM's block pool, the index of the host tier, the files or the segments of
the fs tier.
No event is involved in that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inproc import Calls, EngineProcess, main


@dataclass(frozen=True, slots=True)
class Held:
    """Of each whole block of a prompt, whether the device, the host tier and the fs tier have it,
    for the layers that need all history."""

    device: list[bool]
    host: list[bool]
    disk: list[bool]


class EventEngine(EngineProcess):
    """`events` among the options has the fields of vLLM's KVEventsConfig."""

    PROGRAM = __file__

    def held(self, prompts: Iterable[Sequence[int]], **how: Any) -> list[Held]:
        """At rest. `salt` as in `ask_all`."""
        asked = [list(prompt) for prompt in prompts]
        return [Held(**told) for told in self.call("held", prompts=asked, **how)]


class EventCalls(Calls):
    """The child's half; see `Calls`."""

    def start(self, **options: Any) -> None:
        from vllm.config import KVEventsConfig

        events = options.pop("events")
        options["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", **events
        )
        super().start(**options)

    def held(
        self, prompts: list[list[int]], salt: str | None = None
    ) -> list[dict[str, list[bool]]]:
        """What `Held` has, as JSON."""
        return [self._held(self._block_hashes(prompt, salt)) for prompt in prompts]

    def _block_hashes(self, prompt: list[int], salt: str | None) -> list[bytes]:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        core = self._llm.llm_engine.engine_core.engine_core
        request = Request(
            "asked about",
            prompt,
            SamplingParams(max_tokens=1),
            None,
            cache_salt=salt,
            block_hasher=core.request_block_hasher,
        )
        return list(request.block_hashes)

    def _held(self, hashes: list[bytes]) -> dict[str, list[bool]]:
        group, per_chunk, keys = self._keys_of(hashes)
        pool = self._scheduler().kv_cache_manager.block_pool
        ready = self._half()._core.index.ready(keys)
        stored = self._on_disk()

        def by_block(chunks: list[bool]) -> list[bool]:
            blocks = [chunk for chunk in chunks for _ in range(per_chunk)]
            return blocks + [False] * (len(hashes) - len(blocks))

        return {
            "device": [pool.get_cached_block(h, [group]) is not None for h in hashes],
            "host": by_block([key in ready for key in keys]),
            "disk": by_block([key in stored for key in keys]),
        }

    def _keys_of(self, hashes: list[bytes]) -> tuple[int, int, list[bytes]]:
        """Of the chunks with these blocks, in the layers that need all history: the KV cache group,
        the blocks in a chunk, and under which keys the tiers have them."""
        from tiering_connectors.vllm.groups import Kind

        geometry = self._half()._geometry
        at, group = next((i, g) for i, g in enumerate(geometry.groups) if g.kind is Kind.FULL)
        keys: list[list[bytes]] = [[] for _ in geometry.groups]
        self._half()._keys.extend(keys, hashes)
        return group.index, group.blocks_per_chunk, keys[at]

    def _on_disk(self) -> set[bytes]:
        from tiering.keys import chunk_key
        from tiering.tiers.upkeep.stored import stored_chunks

        extra = self._llm.llm_engine.vllm_config.kv_transfer_config.kv_connector_extra_config
        return {
            chunk_key(block_hash, group.group)
            for tier in extra["secondary_tiers"]
            for found in stored_chunks(Path(tier["root_dir"]), [])
            for group in found.groups.values()
            for block_hash in group.hashes
        }


if __name__ == "__main__":
    main(EventCalls())
