"""Models with several KV cache groups: what comes back, of every group, is what the device had.

The reference of a restore is a device hit with as many cached tokens, to the bit. Before a restore
the device's memory is zeroed, so nothing is right by chance. Where prompts part, no device hit is
made of the same computation: the bytes of windows are then those of another step than the bytes of
the whole history. There one restore is compared with another, and with a cold run up to rounding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from families import (
    FACTORS,
    FAMILIES,
    SMALL_ROWS,
    World,
    ask_with_sources,
    empty,
)
from inproc import assert_at_rest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WORLDS = [(family, factor) for factor in FACTORS for family in FAMILIES]
NAMES = [f"{family.name}-{factor}" for family, factor in WORLDS]
# The first of all, so that pytest runs their tests with the others of the same world.
SMALL = len(FAMILIES)
in_small_worlds = pytest.mark.parametrize(
    "world", WORLDS[:SMALL], ids=NAMES[:SMALL], indirect=True, scope="module"
)

CROWD = 16
ANSWER = 24
"""Tokens, behind a prompt that leaves its last block room for 10."""
LONG_ANSWER = 64


@pytest.fixture(scope="module", params=WORLDS, ids=NAMES)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    family, factor = request.param
    model: Path = request.getfixturevalue(f"{family.name}_model")
    with World(family, factor, model, tmp_path_factory.mktemp(family.name)) as world:
        yield world


def test_chunks_of_each_group_have_their_size(world: World) -> None:
    family = world.family
    assert world.engine.call("groups") == [
        [kind, family.block, blocks * family.block]
        for kind, blocks in zip(family.kinds, world.sizes.chunks, strict=True)
    ]


def test_a_restore_equals_a_device_hit(world: World) -> None:
    engine, whole = world.engine, world.tokens(world.sizes.whole)
    prompt = world.prompt("whole", world.sizes.whole)
    cold = engine.ask(prompt)
    warm, sources = ask_with_sources(engine, prompt)
    assert (cold.cached_tokens, sources) == (0, {"device": whole})
    assert world.family.alike(warm, cold)
    for source in ("host", "disk"):
        empty(engine, host=source == "disk")
        before = engine.counters()["chunks_loaded"]
        restored, sources = ask_with_sources(engine, prompt)
        assert sources == {source: whole}
        assert restored == warm
        engine.call("settle")
        assert engine.counters()["chunks_loaded"] - before == sum(world.sizes.loads)
    assert_at_rest(engine)


def test_what_the_device_still_has_is_not_loaded(world: World) -> None:
    engine, whole = world.engine, world.sizes.whole
    prompt = world.prompt("held", whole)
    half = prompt[: world.tokens(whole // 2) + 1]
    engine.ask(half, 1)
    cold, warm = (engine.ask(prompt) for _ in range(2))
    assert cold.cached_tokens == world.tokens(whole // 2)
    assert world.family.alike(warm, cold)
    empty(engine)
    engine.ask(half, 1)
    restored, sources = ask_with_sources(engine, prompt)
    assert sources == {
        "device": world.tokens(whole // 2),
        "host": world.tokens(whole - whole // 2),
    }
    assert restored == warm


def test_a_prompt_shorter_by_a_chunk_is_found_at_once(world: World) -> None:
    """Windows are kept from one chunk before a prompt's end. A request that has loaded the prompt
    has not got that first part of them on the device, and must not store what lies there."""
    engine, shortened = world.engine, world.sizes.whole - world.factor
    prompt = world.prompt("shortened", world.sizes.whole)
    shorter = prompt[: world.tokens(shortened) + 8]
    engine.ask(prompt)
    warm = engine.ask(shorter)
    empty(engine, host=True)
    engine.ask(prompt)
    empty(engine)
    answer, sources = ask_with_sources(engine, shorter)
    assert "device" not in sources
    assert answer.cached_tokens == world.tokens(shortened)
    # A state is found only because the shorter prompt was computed itself.
    if "STATE" in world.family.kinds:
        assert world.family.alike(answer, warm)
    else:
        assert warm.cached_tokens == answer.cached_tokens
        assert answer == warm


def test_a_conversation_goes_on_where_it_ended(world: World) -> None:
    """The prompt, its answer and more. Once continued it is stored so far, so that each source
    gets a conversation of its own: the same one with another salt."""
    engine, whole = world.engine, world.sizes.whole
    prompt = world.prompt("said", whole)
    continued = {}
    for source in ("device", "host", "disk"):
        answer = engine.ask(prompt, salt=source)
        if source != "device":
            empty(engine, host=source == "disk")
        more = [*prompt, *answer.tokens, *world.prompt("more", 3)]
        continued[source], sources = ask_with_sources(engine, more, salt=source)
        assert sources == {source: world.tokens(whole)}
    assert continued["host"] == continued["device"]
    assert continued["disk"] == continued["device"]


def test_a_shorter_prompt_is_found_the_second_time(world: World) -> None:
    """At its end nobody has kept a window, or the state, before it came itself."""
    engine, sizes, at_once = world.engine, world.sizes, world.family.at_once
    prompt = world.prompt("long", sizes.long)
    shorter = prompt[: world.tokens(sizes.head) + 8]
    cold = engine.ask(shorter, salt="a stranger")
    engine.ask(prompt)
    empty(engine)
    restored = []
    for had, source in ((at_once, "host"), (sizes.head, "host"), (sizes.head, "disk")):
        answer, sources = ask_with_sources(engine, shorter)
        assert sources == ({source: world.tokens(had)} if had else {})
        assert world.family.alike(answer, cold)
        restored.append(answer)
        empty(engine, host=len(restored) == 2)
    assert restored[2] == restored[1]


def test_where_prompts_part_the_second_to_part_goes_on(world: World) -> None:
    engine, sizes, family = world.engine, world.sizes, world.family
    first = world.prompt("stem", sizes.long)
    engine.ask(first)
    parted = sizes.head if family.parts else 0
    for number, had in enumerate((family.at_once, parted, parted)):
        branch = first[: world.tokens(sizes.head)] + world.prompt(
            ("branch", number), sizes.long - sizes.head
        )
        cold = engine.ask(branch, salt="a stranger")
        empty(engine)
        answer, sources = ask_with_sources(engine, branch)
        assert sources == ({"host": world.tokens(had)} if had else {})
        assert world.family.alike(answer, cold)


def loaded_groups(world: World) -> list[int]:
    """Those of which a prompt of `whole` blocks loads anything."""
    return [at for at, chunks in enumerate(world.sizes.loads) if chunks]


def test_a_block_left_unwritten_is_seen_in_every_group(world: World) -> None:
    """The negative control: without it, no equality above would prove anything."""
    engine = world.engine
    prompt = world.prompt("control", world.sizes.whole)
    engine.ask(prompt)
    warm = engine.ask(prompt)
    for group in loaded_groups(world):
        for block in (0, -1):
            empty(engine)
            broken = {"direction": "scatter", "fault": "drop", "copies": 1}
            engine.call("break_copies", **broken, group=group, block=block)
            answer, sources = ask_with_sources(engine, prompt)
            assert engine.call("copies_broken") == 1
            assert sources == {"host": world.tokens(world.sizes.whole)}
            change = max(
                abs(one - other) for one, other in zip(answer.logprobs, warm.logprobs, strict=True)
            )
            assert change > 0.02, (group, block)
    empty(engine)


def test_a_failed_copy_of_any_group_is_computed(world: World) -> None:
    engine = world.engine
    prompt = world.prompt("failed", world.sizes.whole)
    cold, warm = (engine.ask(prompt) for _ in range(2))
    for group in loaded_groups(world):
        empty(engine)
        engine.call("break_copies", direction="scatter", fault="fail", copies=1, group=group)
        with engine.counting() as grown:
            answer = engine.ask(prompt)
        assert engine.call("copies_broken") == 1
        assert world.family.alike(answer, cold)
        # One try, and no other for this request.
        assert grown["chunks_loaded"] == sum(world.sizes.loads)
        assert_at_rest(engine)
    empty(engine)
    assert engine.ask(prompt) == warm


def test_damaged_files_of_any_group_are_computed_and_stored_again(world: World) -> None:
    engine, whole = world.engine, world.tokens(world.sizes.whole)
    for group in loaded_groups(world):
        prompt = world.prompt(("damaged", group), world.sizes.whole)
        pattern = f"???/*_g{group}/*.bin"
        others = set(world.root.rglob(pattern))
        cold = engine.ask(prompt)
        empty(engine, host=True)
        files = set(world.root.rglob(pattern)) - others
        for file in files:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 0x10
            file.write_bytes(content)
        with engine.counting() as grown:
            answer = engine.ask(prompt)
            engine.call("settle")
        assert world.family.alike(answer, cold)
        # Those that it takes to go on at the end of the prompt, then others, each once.
        assert world.sizes.loads[group] <= grown["promotions_damaged"] <= len(files)
        # What starts anew there needs nothing of the group that was damaged.
        is_local = world.family.kinds[group] == "LOCAL"
        assert answer.cached_tokens == (world.tokens(32) if is_local else 0)

        empty(engine, host=True)
        healed, sources = ask_with_sources(engine, prompt)
        assert sources == {"disk": whole}
        assert world.family.alike(healed, cold)
    assert_at_rest(engine)


@in_small_worlds
def test_a_restarted_engine_hits_the_disk_with_its_first_request(world: World) -> None:
    engine, blocks = world.engine, world.family.fits
    prompt = world.prompt("restart", blocks)
    warm = [engine.ask(prompt) for _ in range(2)][1]
    engine.call("settle")
    first, sources = ask_with_sources(world.restarted, prompt)
    assert sources == {"disk": world.tokens(blocks)}
    assert first == warm


@in_small_worlds
def test_a_prompt_larger_than_the_host_tier_is_answered(world: World) -> None:
    small, cut_to = world.restarted, world.family.cut_to
    assert small.call("state")["rows"] == SMALL_ROWS
    prompt = world.prompt("larger", 20)
    # While it is answered its chunks pass through, a few at a time, if the disk is quick enough:
    # windows at its end come last, and without them nothing can be loaded.
    cold = small.ask(prompt, LONG_ANSWER)
    for _ in range(2 if cut_to is None else 8):
        empty(small)
        with small.counting() as grown:
            answer = small.ask(prompt, LONG_ANSWER)
        assert world.family.alike(answer, cold)
        assert_at_rest(small)
        if "loads_cut" in grown:
            break
    if cut_to is not None:
        assert grown["loads_cut"] == 1
        assert answer.cached_tokens == world.tokens(cut_to)


def crowd(world: World, seed: str) -> list[list[int]]:
    """Prompts of 5 blocks but 10 tokens; every other one has the same head."""
    shared = world.prompt((seed, "shared"), 2, 0)
    strangers = [world.prompt((seed, i), 5, -10) for i in range(CROWD)]
    return [[*shared, *own[len(shared) :]] if i % 2 else own for i, own in enumerate(strangers)]


@in_small_worlds
def test_preempted_requests_say_what_they_say_alone(world: World) -> None:
    small, prompts = world.restarted, crowd(world, "crowd")
    references = [small.ask(p, ANSWER, salt=f"alone {i}") for i, p in enumerate(prompts)]
    with small.counting() as grown:
        for _ in range(2):
            empty(small)
            answers = small.ask_all(prompts, ANSWER)
            for i, (answer, reference) in enumerate(zip(answers, references, strict=True)):
                assert world.family.alike(answer, reference), (i, answer, reference)
    assert grown["preemptions"] > 0
    assert grown["chunks_stored"] > 0
    assert grown["chunks_loaded"] > 0
    assert_at_rest(small)


@in_small_worlds
def test_aborts_at_any_moment_leave_nothing_behind(world: World) -> None:
    small, chance = world.restarted, random.Random(7)
    prompts = crowd(world, "aborted")
    ended = 0
    for _ in range(4):
        # While a load is waited for, here for long, steps are many and short.
        small.call("break_copies", direction="scatter", fault="late", copies=8)
        abort_at = [int(2 ** chance.uniform(0, 9)) for _ in prompts]
        small.call("reset")
        ended += len(small.call("ask_and_abort", prompts=prompts, tokens=8, abort_at=abort_at))
        assert_at_rest(small)
    assert 0 < ended < 4 * CROWD
    cold = small.ask(prompts[1], salt="a stranger")
    empty(small)
    assert world.family.alike(small.ask(prompts[1]), cold)
