"""The engine of `events_inproc` with vLLM's own OffloadingConnector and our spec in it.

`OffloadingEventEngine` is the test's half; run as a program, this file is the other one.
"""

from __future__ import annotations

from typing import Any

from events_inproc import EventCalls, EventEngine
from inproc import main


class OffloadingEventEngine(EventEngine):
    PROGRAM = __file__


class OffloadingEventCalls(EventCalls):
    def _half(self) -> Any:
        return self._scheduler().connector.connector_scheduler.manager._half

    def _keys_of(self, hashes: list[bytes]) -> tuple[int, int, list[bytes]]:
        from tiering.keys import chunk_key

        extra = self._llm.llm_engine.vllm_config.kv_transfer_config.kv_connector_extra_config
        per_chunk = extra["blocks_per_chunk"]
        ends = hashes[per_chunk - 1 :: per_chunk]
        return 0, per_chunk, [self._half()._epoch + chunk_key(end) for end in ends]


if __name__ == "__main__":
    main(OffloadingEventCalls())
