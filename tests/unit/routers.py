"""What a router makes of KV events, and its wants: each residency once, nothing that was not there.

`Router` is any router; `Listener` is one at a mini vLLM, which knows what its engine really holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from gated import GatedPortal
from tiering.clock import Clock
from tiering.events import HOST
from tiering.events.announcer import Announcer
from tiering.events.blocks import AllBlocksCleared, BlockEvent, BlockRemoved
from tiering.events.channels import Medium
from tiering.events.descriptions import Run, Shape, integers
from tiering.residency.core import Residency
from tiering_connectors.vllm.announcing import Announcing
from tiering_connectors.vllm.geometry import Geometry
from tiering_connectors.vllm.groups import Kind

CPU, DISK, FAR = Medium("CPU"), Medium("STORAGE"), Medium("STORAGE", "REMOTE")


class Router:
    """By medium and hash, the block before and the tokens."""

    def __init__(self) -> None:
        self.blocks: dict[Medium, dict[int, tuple[int | None, tuple[int, ...]]]] = {}

    def take(self, events: Sequence[BlockEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                continue
            there = self.blocks.setdefault(Medium(event.medium or "", event.locality), {})
            if isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    assert isinstance(block, int)
                    assert block in there, "removed what was not there"
                    del there[block]
                continue
            parent = event.parent_block_hash
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            for at, block in enumerate(event.block_hashes):
                assert isinstance(block, int)
                assert block not in there, "stored twice"
                own = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
                assert parent is None or isinstance(parent, int)
                there[block] = parent, tuple(own)
                parent = block

    def held(self, medium: Medium) -> set[int]:
        return set(self.blocks.get(medium, ()))


class _Noting(Announcer):
    """Remembers what chunks are made of."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.blocks_of: dict[bytes, list[int]] = {}

    def expect(self, run: Run, tokens: list[int]) -> None:
        self.blocks_of.update((key, integers(told.hashes)) for key, told in run)
        super().expect(run, tokens)


class Listener:
    """At an engine whose first tier is a disk of its own, the others somewhere else."""

    def __init__(self, geometry: Geometry, tiers: int, slots: int, clock: Clock) -> None:
        whole = [i for i, group in enumerate(geometry.groups) if group.kind is Kind.FULL]
        at = whole[0] if whole else 0
        group = geometry.groups[at]
        shape = Shape(group.index, group.tokens_per_block, group.blocks_per_chunk)
        self._suffix = shape.suffix
        self._media = {HOST: CPU} | {tier: FAR if tier else DISK for tier in range(tiers)}
        self._announcer = _Noting(shape, self._media, {}, clock, descriptions_max=2 * slots + 64)
        self.announcing = Announcing(self._announcer, geometry, shape, at, lambda event: event)
        self.device = SimpleNamespace(kv_event_queue=[])
        self.announcing.bind(self.device)
        self.router = Router()

    def device_was_reset(self) -> None:
        self.device.kv_event_queue.append(AllBlocksCleared())

    def all_was_reset(self) -> None:
        """What was stored before is not found again."""
        self._announcer.blocks_of.clear()

    def listen(self) -> None:
        """A step's events, the device's first."""
        self.router.take(self.device.kv_event_queue)
        self.device.kv_event_queue.clear()
        self.router.take(self.announcing.take())

    def check_at_rest(self, core: Residency, portal: GatedPortal) -> None:
        """The router knows what is there, but for what nobody could describe."""
        blocks_of, announcer = self._announcer.blocks_of, self._announcer
        ready = core.index.ready(core.index.keys())
        there: dict[Medium, set[bytes]] = {medium: set() for medium in self._media.values()}
        there[CPU].update(key for key in ready if key.endswith(self._suffix))
        assert there[CPU] <= blocks_of.keys()
        for tier, stored in enumerate(portal.stored):
            known = {key for key in stored if key in blocks_of}
            there[self._media[tier]] |= known - announcer._undescribed.keys()
        for medium, keys in there.items():
            assert self.router.held(medium) == {b for key in keys for b in blocks_of[key]}, medium
        assert not announcer.is_busy
