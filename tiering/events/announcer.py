"""From chunks to blocks: what the core says becomes the events that routers understand.

Owns what of each tier counts as there, what is said of what is in host memory, and the events not
yet taken. Each block is announced once in each medium and removed once, whatever the core says
twice or late. A chunk that nobody can describe is not announced, and counted. Sans-IO, on the
core's thread; nothing here waits. Used as the core's EventSink.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Protocol

from tiering.clock import Clock
from tiering.events.blocks import HASH_BYTES, BlockEvent
from tiering.events.channels import COUNTERS as CHANNEL_COUNTERS
from tiering.events.channels import Channel, Medium, Outbox
from tiering.events.chunks import (
    HOST,
    ChunksCleared,
    ChunksRemoved,
    ChunksStored,
    Event,
    SurveyBegan,
    SurveyEnded,
)
from tiering.events.coming import Coming
from tiering.events.descriptions import (
    CATALOGUE_COUNTERS,
    Answer,
    Described,
    Run,
    Shape,
    Suspects,
    integers,
)
from tiering.events.holdings import HeldSomewhere
from tiering.keys import GROUP_BYTES
from tiering.metrics import Counters

BLOCKS_AT_ONCE = 1024
"""What `take` gives at a time, unless told otherwise: it is called on a scheduler's thread."""

CHUNKS_AT_ONCE = 256
"""What is looked at in one call of what has been put off."""

COMING_TOKENS_MAX = 1 << 18
"""Tokens that are kept as numbers for chunks that are about to be announced."""

SILENCE_SECONDS = 5.0
"""A catalogue that has not answered for so long is not waited for."""

COUNTERS = (*CHANNEL_COUNTERS, "events_undescribed", *CATALOGUE_COUNTERS)


class Catalogue(Protocol):
    """What `tiers.disk.catalogue.Catalogue` does, which see. Nothing of it waits but `close`."""

    @property
    def counters(self) -> Counters: ...

    @property
    def is_asked(self) -> bool: ...

    def keep(self, described: Run | list[Described]) -> None: ...

    def forget(self, keys: Sequence[bytes]) -> None: ...

    def ask(self, keys: Sequence[bytes]) -> bool: ...

    def suspect(self, before_seconds: float, after: bytes = b"") -> None: ...

    def take(self) -> list[Answer]: ...

    def close(self) -> None: ...


class Announcer:
    """`media`: how each tier, by its number or HOST, is announced; those left out are not.
    `catalogues`: where those that outlive this engine have their chunks described. Without
    `self_describing` events are placeholders, which say a chunk's last hash and nothing else."""

    def __init__(
        self,
        shape: Shape,
        media: Mapping[int, Medium],
        catalogues: Mapping[int, Catalogue],
        clock: Clock,
        *,
        self_describing: bool = True,
        descriptions_max: int = 1 << 16,
    ) -> None:
        """`clock` counts from 1970. `descriptions_max`: of chunks that are expected; more than the
        host tier has slots."""
        self._suffix = shape.suffix
        self._counters = Counters(COUNTERS)
        self._outbox = Outbox(shape, self._counters)
        self._held = HeldSomewhere(media)
        self._holdings = self._held.holdings
        self._host = self._held.host
        channels = {medium: Channel(medium, shape, self._outbox) for medium in media.values()}
        self._channels = {tier: channels[medium] for tier, medium in media.items()}
        self._all_channels = tuple(channels.values())
        self._all_catalogues = tuple(catalogues.values())
        self._catalogues = dict(catalogues)
        self._clock = clock
        # Whether `expect` is of use.
        self.describes = self_describing
        self._coming = Coming(descriptions_max, COMING_TOKENS_MAX)
        # There, and to be announced once they are described, by tier.
        self._wanted: dict[int, dict[bytes, None]] = {tier: {} for tier in catalogues}
        # There, and nobody could describe them.
        self._undescribed: dict[bytes, None] = {}
        # To be announced again.
        self._again: deque[bytes] = deque()
        self._surveyed_since: dict[int, float] = {}
        self._asked_at: dict[int, float] = {}
        self._is_cleared = False
        self._mask = 0

    # What others tell

    def expect(self, run: Run, tokens: list[int]) -> None:
        """Chunks that may come to host memory soon. `run` is what `describe` made of `tokens`; both
        are the announcer's from now on."""
        self._coming.expect(run, tokens)

    def publish(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ChunksStored):
                if event.tier in self._channels:
                    self._stored(event.tier, event.keys)
            elif isinstance(event, ChunksRemoved):
                if event.tier in self._channels:
                    self._removed(event.tier, event.keys)
            elif isinstance(event, ChunksCleared):
                self._cleared()
            elif event.tier in self._channels:
                self._surveyed(event)

    def device_was_reset(self) -> None:
        """Routers were told that nothing is anywhere. What is still there is announced again."""
        self._outbox.clear()
        self._again.clear()
        for channel in self._all_channels:
            channel.forget()
        for holdings in self._holdings.values():
            self._again.extend(holdings.keys())

    def masked(self, mask: int) -> None:
        """From now on keys are hashes that were XORed with `mask`, an integer of any size."""
        self._mask = mask & ((1 << 8 * HASH_BYTES) - 1)

    # What is to be published

    @property
    def is_busy(self) -> bool:
        """Whether `take` has something now, or will have without anyone's doing."""
        return (
            bool(self._outbox or self._again)
            or any(holdings.has_lost for holdings in self._holdings.values())
            or any(map(self._will_hear, self._catalogues))
        )

    def _will_hear(self, tier: int) -> bool:
        if not self._catalogues[tier].is_asked:
            return bool(self._wanted[tier])
        return self._clock.now() - self._asked_at.get(tier, 0.0) < SILENCE_SECONDS

    def take(self, blocks_max: int = BLOCKS_AT_ONCE) -> list[BlockEvent]:
        """The next events, up to about so many blocks."""
        self._hear()
        for tier, holdings in self._holdings.items():
            self._gone(tier, holdings.take_lost(CHUNKS_AT_ONCE))
        if self._outbox.blocks < blocks_max:
            count = min(CHUNKS_AT_ONCE, len(self._again))
            # Once each, though several tiers may have them.
            self._announce_again(list(dict.fromkeys(self._again.popleft() for _ in range(count))))
            self._ask()
        return self._outbox.take(blocks_max)

    def counters(self) -> dict[str, int]:
        """Blocks that were told of, chunks that nobody could describe, and the catalogues'."""
        told = self._counters.snapshot()
        for each in self._all_catalogues:
            for name, count in each.counters.snapshot().items():
                told[name] += count
        return told

    def close(self) -> None:
        """Let go of the catalogues; may wait for them for some seconds."""
        for catalogue in self._all_catalogues:
            catalogue.close()

    # Chunks

    def _stored(self, tier: int, keys: Sequence[bytes]) -> None:
        if not all(map(bytes.endswith, keys, repeat(self._suffix))):
            keys = [key for key in keys if key.endswith(self._suffix)]
        if tier == HOST:
            run, tokens = self._coming.take_run(keys) or (None, None)
        else:
            run, tokens = self._host.runs.run_of(keys), None
        if tier == HOST:
            news = self._arrived(keys) if run is None else self._arrived_as(run)
        else:
            holdings = self._holdings[tier]
            if self._is_cleared and run is None:
                # What is left over from before is not looked for any more.
                keys = [key for key in keys if key in self._host.runs or key in holdings]
            news = holdings.add(keys)
        if run is None or len(news) < len(run):
            run, tokens = self._host.runs.run_of(news), None
        if tier in self._catalogues:
            keepable = self._host.runs.described(news) if run is None else run
            if keepable:
                self._catalogues[tier].keep(keepable)
        if not self._held.is_alone(tier):
            unknown = self._channels[tier].unknown(news)
            if len(unknown) < len(news):
                news, run = unknown, None
        if run is None:
            self._announce(tier, news)
        else:
            self._channels[tier].announce(run, tokens)

    def _arrived_as(self, run: Run) -> Sequence[bytes]:
        """It has come to host memory; those of its chunks of which that is news."""
        self._describe_late([run])
        return self._host.add_run(run)

    def _arrived(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The same where they were not expected as they came, or not at all."""
        runs = self._coming.take(keys)
        if self._is_cleared:
            # What is left over from before is not looked for any more.
            expected = {key for run in runs for key in run.keys}
            keys = [key for key in keys if key in expected or key in self._host]
        self._describe_late(runs)
        return self._host.add_some(keys, runs)

    def _announce(self, tier: int, keys: Sequence[bytes]) -> None:
        """What `tier` holds and its medium is not known to have, as far as it is described."""
        channel, runs = self._channels[tier], self._host.runs
        if not self.describes:
            hashes = [key[-GROUP_BYTES - HASH_BYTES : -GROUP_BYTES] for key in keys]
            channel.announce_bare(keys, _unmasked(b"".join(hashes), self._mask))
            return
        if (run := runs.run_of(keys)) is not None:
            channel.announce(run)
            return
        described = runs.described(keys)
        if len(described) < len(keys):
            bare = [key for key in keys if key not in runs]
            if tier in self._catalogues:
                self._wanted[tier].update(dict.fromkeys(bare))
            else:
                self._count_undescribed(bare)
        channel.announce_each(described)

    def _count_undescribed(self, keys: Sequence[bytes]) -> None:
        self._counters.add("events_undescribed", len(keys))
        self._undescribed.update(dict.fromkeys(keys))

    def _describe_late(self, runs: Sequence[Run]) -> None:
        """As they come to host memory: some of them nobody could describe before, perhaps."""
        bare = self._undescribed
        if bare:
            late = chain.from_iterable(r for r in runs if not bare.keys().isdisjoint(r.keys))
            self._describe_now([each for each in late if each[0] in bare])

    def _describe_now(self, described: list[Described]) -> None:
        """Nobody could describe them before."""
        for key, _ in described:
            self._undescribed.pop(key, None)
        self._tell_everywhere(described)
        for tier, catalogue in self._catalogues.items():
            holdings = self._holdings[tier]
            if keepable := [each for each in described if each[0] in holdings]:
                catalogue.keep(keepable)

    def _removed(self, tier: int, keys: Sequence[bytes]) -> None:
        self._gone(tier, self._holdings[tier].discard(keys))

    def _gone(self, tier: int, keys: Sequence[bytes]) -> None:
        """They were held by `tier` until now."""
        if not keys:
            return
        self._channels[tier].withdraw(self._held.nowhere_else(tier, keys))
        if self._undescribed:
            for key in keys:
                self._undescribed.pop(key, None)
        if tier in self._catalogues:
            for key in keys:
                self._wanted[tier].pop(key, None)
            self._catalogues[tier].forget(keys)

    def _cleared(self) -> None:
        """Chunks from before have other keys than those that are looked for now: what is still
        said of them is of no use to anyone, and what is on the disk is not looked for."""
        for channel in self._all_channels:
            channel.withdraw_all()
        for holdings in self._holdings.values():
            holdings.clear()
        self._undescribed.clear()
        self._wanted.clear()
        self._coming.clear()
        self._again.clear()
        self._catalogues.clear()
        self._is_cleared = True

    def _surveyed(self, event: SurveyBegan | SurveyEnded) -> None:
        tier, holdings = event.tier, self._holdings[event.tier]
        if isinstance(event, SurveyBegan):
            holdings.begin_survey()
            self._surveyed_since[tier] = self._clock.now()
            return
        holdings.end_survey(is_whole=event.is_whole)
        if event.is_whole and tier in self._catalogues:
            self._catalogues[tier].suspect(self._surveyed_since[tier])

    # Descriptions

    def _hear(self) -> None:
        """What the catalogues have answered."""
        for tier, catalogue in self._catalogues.items():
            holdings = self._holdings[tier]
            for answer in catalogue.take():
                if isinstance(answer, Suspects):
                    if gone := [key for key in answer.keys if key not in holdings]:
                        catalogue.forget(gone)
                    catalogue.suspect(self._surveyed_since[tier], answer.keys[-1])
                    continue
                missing = [key for key in answer.missing if key in holdings]
                # Some may have come to host memory since the question.
                self._describe_now(self._host.runs.described(missing))
                self._count_undescribed([key for key in missing if key not in self._host.runs])
                self._tell_everywhere(answer.described)

    def _tell_everywhere(self, described: Sequence[Described]) -> None:
        """Wherever they are held and not known to be."""
        for tier, channel in self._channels.items():
            holdings = self._holdings[tier]
            some = [each for each in described if each[0] in holdings and each[0] not in channel]
            channel.announce_each(some)

    def _announce_again(self, keys: Sequence[bytes]) -> None:
        for tier, holdings in self._holdings.items():
            held = [key for key in keys if key in holdings]
            self._announce(tier, self._channels[tier].unknown(held))

    def _ask(self) -> None:
        """The catalogues, for as many as can be published soon."""
        for tier, wanted in self._wanted.items():
            catalogue = self._catalogues[tier]
            if wanted and not catalogue.is_asked:
                keys = list(islice(wanted, CHUNKS_AT_ONCE))
                if catalogue.ask(keys):
                    self._asked_at[tier] = self._clock.now()
                    for key in keys:
                        del wanted[key]

    def __repr__(self) -> str:
        told = ", ".join(f"{len(each)} in {each.medium.name}" for each in self._all_channels)
        return f"<Announcer {told}, {len(self._outbox)} events to take>"


def _unmasked(hashes: bytes, mask: int) -> bytes:
    """Hashes of HASH_BYTES each, each XORed with `mask`."""
    if not mask:
        return hashes
    return b"".join((each ^ mask).to_bytes(HASH_BYTES, "big") for each in integers(hashes))
