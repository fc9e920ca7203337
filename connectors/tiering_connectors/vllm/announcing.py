"""KV events of the tiers for vLLM's publisher: what is announced, described from its requests.

Owns the announcer of one engine, and when it is listened to: a new engine first says that nothing
is anywhere, and what its disks hold it says from its first request on, since whoever relays
events is there by then. On the scheduler's thread; nothing here waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tiering.clock import UnixClock
from tiering.config import ConnectorConfig
from tiering.events import Event
from tiering.events.announcer import Announcer
from tiering.events.blocks import (
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
)
from tiering.events.descriptions import Shape, describe
from tiering.namespace import Namespace
from tiering.wiring import build_catalogues, media_of
from tiering_connectors.vllm.geometry import Geometry
from tiering_connectors.vllm.groups import Kind
from tiering_connectors.vllm.tracked import Tracked

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger("tiering")

ROUTABLE = ("full_attention", "mla_attention", "sink_full_attention")
"""Kinds of KV cache group of which a router makes use."""

INT_HASHES = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"


class Silence:
    """Where nobody is told anything. What each method is for is said in `Announcing`."""

    is_heard = False

    def publish(self, events: list[Event]) -> None:
        pass

    def request_came(self) -> None:
        pass

    def expect(self, tracked: Tracked, chunks: Sequence[tuple[int, int]]) -> None:
        pass

    def bind(self, block_pool: Any) -> None:
        pass

    def look_for_device_reset(self) -> None:
        pass

    def masked(self, mask: int) -> None:
        pass

    @property
    def needs_steps(self) -> bool:
        return False

    def take(self) -> list[Any]:
        return []

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


SILENCE = Silence()


class Announcing(Silence):
    """`position` is the place of the group that is announced among the geometry's; `convert` makes
    an event one of vLLM's."""

    is_heard = True

    def __init__(
        self,
        announcer: Announcer,
        geometry: Geometry,
        shape: Shape,
        position: int,
        convert: Callable[[BlockEvent], Any],
    ) -> None:
        self._announcer = announcer
        self._shape = shape
        self._position = position
        self._hashes_per_block = shape.block_tokens // geometry.tokens_per_hash
        self._has_requests = False
        self._is_new = True
        self._block_pool: Any = None
        self._last_clear: Any = None
        self._undescribable = 0
        self._convert = convert

    def publish(self, events: list[Event]) -> None:
        """As the core's EventSink."""
        self._announcer.publish(events)

    def request_came(self) -> None:
        self._has_requests = True

    def expect(self, tracked: Tracked, chunks: Sequence[tuple[int, int]]) -> None:
        """Of the request these chunks, each the group's position and its number, may come to host
        memory."""
        if not self._announcer.describes:
            return
        mine = sorted(chunk for at, chunk in chunks if at == self._position)
        for run in _runs(mine):
            self._expect(tracked, run)

    def _expect(self, tracked: Tracked, chunks: range) -> None:
        request, shape = tracked.request, self._shape
        per_chunk, stride = shape.blocks_per_chunk, self._hashes_per_block
        first, stop = chunks.start * per_chunk, chunks.stop * per_chunk
        tokens = request.all_token_ids[first * shape.block_tokens : stop * shape.block_tokens]
        hashes = request.block_hashes
        own = hashes[(first + 1) * stride - 1 : stop * stride : stride]
        try:
            run = describe(
                shape,
                tracked.keys[self._position][chunks.start : chunks.stop],
                tokens,
                own,
                hashes[first * stride - 1] if first else None,
                request.lora_request.name if request.lora_request else None,
                self._extra_keys(request, range(first, stop)),
            )
        except (OverflowError, TypeError) as error:
            self._undescribable += len(chunks)
            if self._undescribable == len(chunks):
                log.warning(
                    "routers are not told of chunks with tokens that they cannot take: %s "
                    "(further ones are not mentioned)",
                    error,
                )
            return
        self._announcer.expect(run, tokens)

    def _extra_keys(self, request: Request, blocks: range) -> list[Any] | None:
        """What else than tokens the hashes of `blocks` are made of, one item a block."""
        plain = not (
            request.lora_request
            or request.cache_salt
            or request.mm_features
            or getattr(request, "prompt_embeds", None) is not None
        )
        if plain:
            return None
        from vllm.v1.core import kv_cache_utils

        size, found, mm_index = self._shape.block_tokens, [], 0
        for block in blocks:
            keys, mm_index = kv_cache_utils.generate_block_hash_extra_keys(
                request, block * size, (block + 1) * size, mm_index
            )
            found.append(keys)
        # Versions without this do not tag the keys.
        untagged = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)
        return None if all(keys is None for keys in found) else list(untagged(found))

    # Resets

    def bind(self, block_pool: Any) -> None:
        """vLLM's pool of device blocks, whose events go out before ours in each step."""
        self._block_pool = block_pool

    def look_for_device_reset(self) -> None:
        """vLLM clears its device cache alone by telling routers that nothing is anywhere."""
        for event in getattr(self._block_pool, "kv_event_queue", ()):
            is_clear = type(event).__name__ == AllBlocksCleared.__name__
            if is_clear and event is not self._last_clear:
                self._last_clear = event
                self._announcer.device_was_reset()

    def masked(self, mask: int) -> None:
        """See `KeyMaker`."""
        self._announcer.masked(mask)

    # Events

    @property
    def needs_steps(self) -> bool:
        """Whether there is something to tell, so that vLLM should make a step to ask for it."""
        return self._is_new or (self._has_requests and self._announcer.is_busy)

    def take(self) -> list[Any]:
        """vLLM's events, in order, for this step."""
        if self._is_new:
            self._is_new = False
            if not self._has_requests:
                return [self._convert(AllBlocksCleared())]
        if not self._has_requests:
            return []
        return [self._convert(event) for event in self._announcer.take()]

    def counters(self) -> dict[str, int]:
        return self._announcer.counters()

    def close(self) -> None:
        self._announcer.close()

    def __repr__(self) -> str:
        return f"<Announcing {self._announcer!r}>"


class Converter:
    """Our events as those of the vLLM that is installed, which may know fewer fields."""

    def __init__(self) -> None:
        from vllm.distributed import kv_events

        self._classes = {
            kind: getattr(kv_events, kind.__name__)
            for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
        }
        self._fields = {
            kind: [f for f in kind.__struct_fields__ if f in theirs.__struct_fields__]
            for kind, theirs in self._classes.items()
        }

    def __call__(self, event: BlockEvent) -> Any:
        kind = type(event)
        fields = {name: getattr(event, name) for name in self._fields[kind]}
        return self._classes[kind](**fields)


def announcing_for(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: ConnectorConfig,
    geometry: Geometry,
    namespace: Namespace,
    slots: int,
) -> Silence:
    """An Announcing, unless vLLM publishes no events, or no router could use ours: then it says
    why."""
    events = getattr(vllm_config, "kv_events_config", None)
    if events is None or not events.enable_kv_cache_events:
        return SILENCE
    from vllm import envs

    if not getattr(envs, INT_HASHES, True):
        log.warning(
            "the tiers publish no KV events: theirs carry integer hashes, and %s=0 asks for "
            "others; leave it out",
            INT_HASHES,
        )
        return SILENCE
    found = _shape_of(kv_cache_config, geometry)
    if found is None:
        log.warning("the tiers publish no KV events: no layers with full attention")
        return SILENCE
    position, shape = found
    describes = config.self_describing_kv_events
    announcer = Announcer(
        shape,
        media_of(config),
        build_catalogues(config, namespace) if describes else {},
        UnixClock(),
        self_describing=describes,
        descriptions_max=2 * slots + 4096,
    )
    return Announcing(announcer, geometry, shape, position, Converter())


def _shape_of(kv_cache_config: KVCacheConfig, geometry: Geometry) -> tuple[int, Shape] | None:
    """Of the first group that keeps all history: where it is among the groups, and its chunks."""
    from vllm.v1 import kv_cache_interface as interface

    kind_of = getattr(interface, "get_kv_cache_spec_kind", None)
    window_of = getattr(interface, "get_kv_cache_spec_sliding_window", lambda spec: None)
    for position, group in enumerate(geometry.groups):
        spec = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
        kind = "full_attention" if kind_of is None else str(kind_of(spec).value)
        if kind in ROUTABLE and group.kind is Kind.FULL:
            return position, Shape(
                group.index,
                group.tokens_per_block,
                group.blocks_per_chunk,
                None if kind_of is None else kind,
                window_of(spec),
            )
    return None


def _runs(chunks: Sequence[int]) -> Iterator[range]:
    """Numbers in order as runs of neighbours."""
    first = 0
    for at in range(1, len(chunks) + 1):
        if at == len(chunks) or chunks[at] != chunks[at - 1] + 1:
            yield range(chunks[first], chunks[at - 1] + 1)
            first = at
