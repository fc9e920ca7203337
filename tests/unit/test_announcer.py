"""The announcer: each block once in each medium, from whatever the core says."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from routers import CPU, DISK, FAR, Router
from tiering.events import (
    HOST,
    ChunksCleared,
    ChunksRemoved,
    ChunksStored,
    SurveyBegan,
    SurveyEnded,
)
from tiering.events.announcer import Announcer
from tiering.events.blocks import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from tiering.events.channels import BLOCKS_IN_EVENT_MAX
from tiering.events.descriptions import Shape, Told, describe, integers, token_ids
from tiering.keys import chunk_key
from tiering.testing.clocks import ManualClock
from tiering.tiers.disk.catalogue import Catalogue

BLOCK = 4
MEDIA = {HOST: CPU, 0: DISK, 1: DISK, 2: FAR}


@dataclass
class Prompt:
    """Tokens with the hashes that vLLM's would have, 32 bytes each."""

    tokens: list[int]
    per_chunk: int
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None
    hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.hashes, parent = [], b"root"
        for start in range(0, len(self.tokens) - BLOCK + 1, BLOCK):
            own = repr((self.tokens[start : start + BLOCK], self.lora_name)).encode()
            parent = hashlib.sha256(parent + own).digest()
            self.hashes.append(parent)

    @property
    def keys(self) -> list[bytes]:
        ends = self.hashes[self.per_chunk - 1 :: self.per_chunk]
        return [chunk_key(end, 1) for end in ends]

    def expected_by(self, announcer: Announcer, shape: Shape, chunks: range) -> list[bytes]:
        first, stop = chunks.start * self.per_chunk, chunks.stop * self.per_chunk
        extra = None if self.extra_keys is None else self.extra_keys[first:stop]
        tokens = self.tokens[first * BLOCK : stop * BLOCK]
        announcer.expect(
            describe(
                shape,
                self.keys[chunks.start : chunks.stop],
                tokens,
                self.hashes[first:stop],
                self.hashes[first - 1] if first else None,
                self.lora_name,
                extra,
            ),
            tokens,
        )
        return self.keys[chunks.start : chunks.stop]

    def integers(self) -> list[int]:
        return [int.from_bytes(each[-8:], "big") for each in self.hashes]


def clock_at(seconds: float) -> ManualClock:
    clock = ManualClock()
    clock.advance(seconds)
    return clock


@pytest.fixture
def make_catalogue(tmp_path: Path) -> Iterator[Callable[[], Catalogue]]:
    made: list[Catalogue] = []

    def make() -> Catalogue:
        made.append(Catalogue(lambda: tmp_path / "catalogue.sqlite3", clock_at(1000.0)))
        return made[-1]

    yield make
    for catalogue in made:
        catalogue.close()


def announcer_of(
    shape: Shape, catalogue: Catalogue | None = None, self_describing: bool = True
) -> Announcer:
    catalogues = {} if catalogue is None else {0: catalogue}
    clock = clock_at(2000.0)
    return Announcer(shape, MEDIA, catalogues, clock, self_describing=self_describing)


def shape_of(per_chunk: int) -> Shape:
    return Shape(1, BLOCK, per_chunk, "full_attention")


def everything(announcer: Announcer) -> list[BlockEvent]:
    events = []
    while announcer.is_busy:
        if not (some := announcer.take()):
            time.sleep(0.0005)  # lets the catalogue's thread have its turn
        events += some
    return events


def test_a_run_of_chunks_is_one_event_that_says_all() -> None:
    shape = shape_of(2)
    announcer, prompt = announcer_of(shape), Prompt(list(range(100, 124)), 2, "adapter")
    keys = prompt.expected_by(announcer, shape, range(1, 3))
    announcer.publish([ChunksStored(HOST, tuple(keys))])
    (event,) = announcer.take()
    assert isinstance(event, BlockStored)
    assert event == BlockStored(
        block_hashes=list(prompt.integers()[2:6]),
        parent_block_hash=prompt.integers()[1],
        token_ids=list(range(108, 124)),
        block_size=BLOCK,
        lora_id=None,
        medium="CPU",
        lora_name="adapter",
        group_idx=1,
        kv_cache_spec_kind="full_attention",
    )
    announcer.publish([ChunksRemoved(HOST, tuple(keys[:1]))])
    assert announcer.take() == [BlockRemoved(list(prompt.integers()[2:4]), "CPU", 1)]
    assert announcer.take() == []


def test_what_hashes_are_made_of_is_told_block_by_block() -> None:
    shape = shape_of(2)
    extra: list[list[str] | None] = [["salt"], None, None, ["image"]]
    prompt = Prompt(list(range(16)), 2, extra_keys=extra)
    announcer = announcer_of(shape)
    announcer.publish([ChunksStored(HOST, tuple(prompt.expected_by(announcer, shape, range(2))))])
    events = announcer.take()
    assert [event.extra_keys for event in events if isinstance(event, BlockStored)] == [
        extra[:2],
        extra[2:],
    ]


def test_two_tiers_of_a_medium_are_one_to_a_router() -> None:
    shape, router = shape_of(1), Router()
    announcer, prompt = announcer_of(shape), Prompt(list(range(4)), 1)
    keys = tuple(prompt.expected_by(announcer, shape, range(1)))
    announcer.publish([ChunksStored(HOST, keys), ChunksStored(0, keys), ChunksStored(1, keys)])
    announcer.publish([ChunksStored(2, keys), ChunksRemoved(HOST, keys), ChunksRemoved(0, keys)])
    router.take(announcer.take())
    assert [len(router.held(medium)) for medium in (CPU, DISK, FAR)] == [0, 1, 1]
    announcer.publish([ChunksRemoved(1, keys), ChunksRemoved(1, keys), ChunksRemoved(2, keys)])
    router.take(announcer.take())
    assert [len(router.held(medium)) for medium in (CPU, DISK, FAR)] == [0, 0, 0]


def test_other_groups_and_tiers_are_not_announced() -> None:
    shape = shape_of(1)
    announcer, prompt = announcer_of(shape), Prompt(list(range(8)), 1)
    keys = prompt.expected_by(announcer, shape, range(2))
    other = chunk_key(prompt.hashes[0], 2)
    announcer.publish([ChunksStored(HOST, (other,)), ChunksStored(9, tuple(keys))])
    announcer.publish([ChunksRemoved(HOST, (other,)), ChunksRemoved(9, tuple(keys))])
    assert announcer.take() == []


def test_a_chunk_that_nobody_can_describe_is_counted_and_told_of_when_somebody_can() -> None:
    shape = shape_of(1)
    announcer, prompt = announcer_of(shape), Prompt(list(range(4)), 1)
    announcer.publish([ChunksStored(1, tuple(prompt.keys))])
    assert announcer.take() == []
    assert announcer.counters()["events_undescribed"] == 1
    keys = prompt.expected_by(announcer, shape, range(1))
    announcer.publish([ChunksStored(1, tuple(keys)), ChunksStored(HOST, tuple(keys))])
    media = [event.medium for event in announcer.take() if isinstance(event, BlockStored)]
    assert sorted(map(str, media)) == ["CPU", "STORAGE"]


def test_placeholders_say_the_hash_alone() -> None:
    announcer, prompt = announcer_of(shape_of(2), self_describing=False), Prompt([0] * 8, 2)
    announcer.publish([ChunksStored(HOST, tuple(prompt.keys)), ChunksRemoved(HOST, ())])
    (event,) = announcer.take()
    assert isinstance(event, BlockStored)
    assert (event.block_size, event.token_ids, event.parent_block_hash) == (0, [], None)
    assert event.block_hashes == [prompt.integers()[1]]
    announcer.publish([ChunksRemoved(HOST, tuple(prompt.keys))])
    assert announcer.take() == [BlockRemoved([prompt.integers()[1]], "CPU", 1)]


def test_what_is_on_a_disk_is_told_of_after_a_restart(
    make_catalogue: Callable[[], Catalogue],
) -> None:
    shape, prompt = shape_of(2), Prompt(list(range(40)), 2)
    first = make_catalogue()
    announcer = announcer_of(shape, first)
    keys = tuple(prompt.expected_by(announcer, shape, range(5)))
    announcer.publish([ChunksStored(HOST, keys), ChunksStored(0, keys), ChunksRemoved(0, keys[3:])])
    before = Router()
    before.take(everything(announcer))
    announcer.close()
    assert len(before.held(DISK)) == 6

    router, again = Router(), announcer_of(shape, make_catalogue())
    again.publish([SurveyBegan(0), ChunksStored(0, keys[:2]), ChunksStored(0, keys[2:4])])
    again.publish([SurveyEnded(0)])
    router.take(everything(again))
    assert router.blocks == {DISK: before.blocks[DISK]}
    # The fourth was removed, and with it what was said of it.
    assert again.counters()["events_undescribed"] == 1


def test_a_survey_finds_what_has_gone_without_a_word(
    make_catalogue: Callable[[], Catalogue],
) -> None:
    shape, prompt, router = shape_of(1), Prompt(list(range(16)), 1), Router()
    catalogue = make_catalogue()
    announcer = announcer_of(shape, catalogue)
    keys = tuple(prompt.expected_by(announcer, shape, range(4)))
    announcer.publish([ChunksStored(HOST, keys), ChunksStored(0, keys[:3])])
    announcer.publish([SurveyBegan(0), ChunksStored(0, keys[3:]), ChunksStored(0, keys[:1])])
    announcer.publish([SurveyEnded(0, is_whole=False)])
    router.take(everything(announcer))
    assert len(router.held(DISK)) == 4  # broken off: nothing follows from it
    announcer.publish([SurveyBegan(0), ChunksStored(0, keys[:1]), ChunksRemoved(0, keys[3:])])
    announcer.publish([SurveyEnded(0)])
    router.take(everything(announcer))
    assert router.held(DISK) == set(prompt.integers()[:1])
    assert len(router.held(CPU)) == 4
    # And what was written down of it is gone, too.
    assert catalogue.ask(list(keys))
    while catalogue.is_asked:
        told = [answer for answer in catalogue.take() if isinstance(answer, Told)]
        assert [[key for key, _ in answer.described] for answer in told] in ([], [[keys[0]]])


def test_a_reset_of_the_device_alone_is_followed_by_all_that_is_still_there(
    make_catalogue: Callable[[], Catalogue],
) -> None:
    shape, prompt, router = shape_of(2), Prompt(list(range(48)), 2), Router()
    announcer = announcer_of(shape, make_catalogue())
    keys = tuple(prompt.expected_by(announcer, shape, range(6)))
    announcer.publish(
        [ChunksStored(HOST, keys), ChunksStored(0, keys), ChunksRemoved(HOST, keys[:3])]
    )
    router.take(everything(announcer))
    # What was still to be said when the reset came is of no use after it.
    announcer.publish([ChunksStored(1, keys[:1]), ChunksRemoved(HOST, keys[3:4])])
    before = {medium: dict(blocks) for medium, blocks in router.blocks.items()}
    for block in prompt.integers()[6:8]:
        del before[CPU][block]
    announcer.device_was_reset()
    router.take([AllBlocksCleared()])
    router.take(everything(announcer))
    assert router.blocks == before


def test_after_a_reset_of_all_only_what_is_new_is_told_of(
    make_catalogue: Callable[[], Catalogue],
) -> None:
    shape, prompt, router = shape_of(1), Prompt(list(range(16)), 1), Router()
    announcer = announcer_of(shape, make_catalogue())
    keys = tuple(prompt.expected_by(announcer, shape, range(4)))
    announcer.publish([ChunksStored(HOST, keys), ChunksStored(0, keys)])
    router.take(announcer.take())
    announcer.publish([ChunksRemoved(HOST, keys), ChunksCleared()])
    router.take(everything(announcer))
    assert not router.held(CPU) | router.held(DISK)
    # A write of before that ends late, and the survey of a disk that still has it all.
    announcer.publish([ChunksStored(0, keys[:2]), SurveyBegan(0), ChunksStored(0, keys)])
    announcer.publish([SurveyEnded(0)])
    assert everything(announcer) == []
    announcer.masked(5)
    new = Prompt(list(range(16)), 1)
    masked = tuple(chunk_key(bytes([key[0] ^ 1]) + key[1:-4], 1) for key in new.keys)
    announcer.expect(describe(shape, masked, new.tokens, new.hashes), new.tokens)
    announcer.publish([ChunksStored(HOST, masked), ChunksStored(0, masked)])
    router.take(announcer.take())
    assert router.held(CPU) == router.held(DISK) == set(new.integers())


def test_descriptions_of_what_never_came_are_bounded() -> None:
    shape = shape_of(1)
    announcer = Announcer(shape, MEDIA, {}, ManualClock(), descriptions_max=100)
    kept = Prompt([7] * 4, 1)
    announcer.publish([ChunksStored(HOST, tuple(kept.expected_by(announcer, shape, range(1))))])
    for seed in range(1000):
        last = Prompt([seed] * 4, 1).expected_by(announcer, shape, range(1))
    announcer.publish([ChunksStored(HOST, (kept.keys[0], *last))])
    assert len(announcer._coming) <= 100
    assert announcer.counters()["events_blocks_stored"] == 2
    announcer.device_was_reset()
    assert len(everything(announcer)) == 2, "what is there has lost its description"


@pytest.mark.parametrize("per_chunk", [1, 4])
def test_a_long_run_is_several_events(per_chunk: int) -> None:
    shape, blocks = shape_of(per_chunk), 2 * BLOCKS_IN_EVENT_MAX + 8
    announcer, prompt = announcer_of(shape), Prompt(list(range(blocks * BLOCK)), per_chunk)
    keys = prompt.expected_by(announcer, shape, range(blocks // per_chunk))
    announcer.publish([ChunksStored(HOST, tuple(keys))])
    events = [event for event in announcer.take(blocks) if isinstance(event, BlockStored)]
    assert [len(event.block_hashes) for event in events] == [512, 512, 8]
    assert [token for event in events for token in event.token_ids] == prompt.tokens
    parents = [event.parent_block_hash for event in events]
    assert parents == [None, prompt.integers()[511], prompt.integers()[1023]]


@pytest.mark.parametrize("tokens_max", [1 << 18, 5 * BLOCK, 0])
def test_a_run_may_arrive_whole_in_parts_or_twice(
    tokens_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.events.announcer.COMING_TOKENS_MAX", tokens_max)
    shape, router = shape_of(1), Router()
    announcer, prompt = announcer_of(shape), Prompt(list(range(40)), 1)
    whole = tuple(prompt.expected_by(announcer, shape, range(4)))
    prompt.expected_by(announcer, shape, range(4, 10))
    # Another request's, which begins where the last one does and is shorter.
    prompt.expected_by(announcer, shape, range(4, 6))
    for keys in (whole, prompt.keys[7:9], prompt.keys[4:7], prompt.keys[9:], prompt.keys):
        announcer.publish([ChunksStored(HOST, tuple(keys))])
    events = announcer.take()
    router.take(events)
    stored = [event for event in events if isinstance(event, BlockStored)]
    told = {
        block: event.token_ids[at * BLOCK : (at + 1) * BLOCK]
        for event in stored
        for at, block in enumerate(event.block_hashes)
    }
    assert told == {
        block: prompt.tokens[at * BLOCK : (at + 1) * BLOCK]
        for at, block in enumerate(prompt.integers())
    }
    assert len(announcer._coming) == 0


def test_what_comes_to_host_memory_while_a_catalogue_is_asked_is_told_of_on_the_disk_too(
    make_catalogue: Callable[[], Catalogue],
) -> None:
    shape, prompt, router = shape_of(1), Prompt(list(range(8)), 1), Router()
    announcer = announcer_of(shape, make_catalogue())
    announcer.publish([ChunksStored(0, tuple(prompt.keys))])
    announcer.take()
    keys = prompt.expected_by(announcer, shape, range(2))
    announcer.publish([ChunksStored(HOST, tuple(keys))])
    router.take(everything(announcer))
    assert router.held(CPU) == router.held(DISK) == set(prompt.integers())
    assert announcer.counters()["events_undescribed"] == 0


def test_not_more_is_taken_at_once_than_asked_for() -> None:
    shape = shape_of(1)
    announcer = announcer_of(shape)
    for seed in range(40):
        prompt = Prompt([seed] * 4, 1)
        keys = tuple(prompt.expected_by(announcer, shape, range(1)))
        announcer.publish([ChunksStored(HOST, keys)])
    assert [len(announcer.take(16)) for _ in range(4)] == [16, 16, 8, 0]


@pytest.mark.parametrize("per_chunk", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_router_knows_what_is_there_whatever_happens(
    per_chunk: int, seed: int, make_catalogue: Callable[[], Catalogue]
) -> None:
    """Prompts that part ways within chunks, in tiers that come and go in any order."""
    chance, shape, router = random.Random(seed), shape_of(per_chunk), Router()
    announcer = announcer_of(shape, make_catalogue())
    prompts: list[Prompt] = []
    for _ in range(12):
        shared = chance.choice(prompts).tokens[: chance.randrange(60)] if prompts else []
        tokens = shared + [chance.randrange(2**32) for _ in range(64 - len(shared))]
        prompts.append(Prompt(tokens, per_chunk))
    truth: dict[int, set[bytes]] = {tier: set() for tier in MEDIA}
    blocks_of: dict[bytes, list[int]] = {}
    for prompt in prompts:
        for at, key in enumerate(prompt.keys):
            blocks_of[key] = prompt.integers()[at * per_chunk : (at + 1) * per_chunk]

    def check() -> None:
        router.take(everything(announcer))
        for medium in (CPU, DISK, FAR):
            tiers = [tier for tier in MEDIA if MEDIA[tier] == medium]
            there = set().union(*(truth[tier] for tier in tiers))
            assert router.held(medium) == {b for key in there for b in blocks_of[key]}

    for _ in range(1500):
        prompt, tier = chance.choice(prompts), chance.choice(list(MEDIA))
        count = len(prompt.keys)
        first = chance.randrange(count)
        some = range(first, chance.randrange(first, count) + 1)
        keys = prompt.keys[some.start : some.stop]
        what = chance.random()
        if what < 0.5:
            # What comes to a tier comes through host memory, or was described before.
            missing = [key for key in keys if key not in truth[HOST]]
            if missing:
                prompt.expected_by(announcer, shape, some)
                announcer.publish([ChunksStored(HOST, tuple(missing))])
                truth[HOST].update(missing)
            announcer.publish([ChunksStored(tier, tuple(keys))])
            truth[tier].update(keys)
        elif what < 0.9:
            announcer.publish([ChunksRemoved(tier, tuple(keys))])
            truth[tier].difference_update(keys)
        elif what < 0.93:
            check()
        elif what < 0.96 and not truth[1] and not truth[2]:
            router.take(announcer.take(3))
            announcer.device_was_reset()
            router.take([AllBlocksCleared()])
        elif tier != HOST:
            announcer.publish([SurveyBegan(tier)])
            lost = set(chance.sample(sorted(truth[tier]), len(truth[tier]) // 3))
            left = truth[tier] - lost
            announcer.publish([ChunksStored(tier, tuple(left)), SurveyEnded(tier)])
            truth[tier] = left
    check()


def test_hashes_and_tokens_survive_their_packing() -> None:
    prompt = Prompt([0, 2**32 - 1, 5, 6, 7, 8, 9, 10], 2)
    (told,) = describe(shape_of(2), prompt.keys, prompt.tokens, prompt.hashes).descriptions()
    assert integers(told.hashes) == prompt.integers()
    assert token_ids(told.tokens) == prompt.tokens
    for token in (-1, 2**32):
        with pytest.raises(OverflowError):
            describe(shape_of(1), prompt.keys, [token] * 4, prompt.hashes[:1])
