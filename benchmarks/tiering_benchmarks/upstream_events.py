"""vLLM's own tracker of offloading events, driven as its scheduler drives it, to compare with.

Importing this imports vLLM; only `announce` does, and only when asked to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.v1.kv_offload.base import (
    Medium,
    OffloadingEvent,
    OffloadingKVEventsConfig,
    OffloadKey,
)

from tiering_benchmarks.announce_sides import BLOCK_TOKENS, Prompt


class UpstreamEvents:
    """A `tiering_benchmarks.announce_sides.Side`."""

    def __init__(self, blocks_per_chunk: int) -> None:
        self._tracker = OffloadingEventsTracker(
            OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=True)
        )
        # As much of vLLM's GroupOffloadConfig as the tracker reads.
        self._group = cast(
            "Any",
            SimpleNamespace(
                group_idx=0,
                tokens_per_block=BLOCK_TOKENS,
                tokens_per_chunk=BLOCK_TOKENS * blocks_per_chunk,
                hashes_per_chunk=blocks_per_chunk,
                kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
                sliding_window_size_in_chunks=None,
            ),
        )

    def stored(self, prompt: Prompt) -> Sequence[Any]:
        request = cast("Any", prompt)
        for at, key in enumerate(prompt.keys):
            self._tracker.record_store(request, self._group, at, OffloadKey(key))
        return self._told(prompt, Medium.CPU, is_removed=False)

    def written(self, prompt: Prompt) -> Sequence[Any]:
        return self._told(prompt, Medium.STORAGE, is_removed=False)

    def evicted(self, prompt: Prompt) -> Sequence[Any]:
        return self._told(prompt, Medium.CPU, is_removed=True)

    def gone(self, prompt: Prompt) -> Sequence[Any]:
        return self._told(prompt, Medium.STORAGE, is_removed=True)

    def _told(self, prompt: Prompt, medium: Medium, is_removed: bool) -> list[Any]:
        event = OffloadingEvent(list(map(OffloadKey, prompt.keys)), medium, is_removed)
        event.removal_expected = True
        return list(self._tracker.take_events([event]))
