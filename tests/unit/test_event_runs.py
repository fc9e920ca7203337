"""Runs of described chunks: kept in one piece, told apart only where somebody asks."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from tiering.events import HOST
from tiering.events.channels import Medium
from tiering.events.descriptions import Description, Run, Shape, describe
from tiering.events.holdings import HeldSomewhere, HostHoldings
from tiering.events.runs import Runs

BLOCK = 4


def run_of(
    name: str, count: int, per_chunk: int = 1, extra_keys: list[list[str] | None] | None = None
) -> Run:
    blocks = count * per_chunk
    hashes = [f"{name} {at:031}".encode() for at in range(blocks)]
    keys = [each + b"\0\0\0\1" for each in hashes[per_chunk - 1 :: per_chunk]]
    shape, tokens = Shape(1, BLOCK, per_chunk), list(range(blocks * BLOCK))
    return describe(shape, keys, tokens, hashes, b"before it", "a lora", extra_keys)


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_a_part_says_the_same_of_its_chunks_as_the_whole(per_chunk: int) -> None:
    extra = [[f"salt {at}"] for at in range(6 * per_chunk)]
    run = run_of("a", 6, per_chunk, [*extra])
    whole = list(run)
    assert [key for key, _ in whole] == list(run.keys)
    first = whole[0][1]
    assert first.parent == b"efore it"
    assert len(first.tokens) == 4 * BLOCK * per_chunk
    assert first.extra_keys == extra[:per_chunk]
    assert [told.parent for _, told in whole[1:]] == [told.hashes[-8:] for _, told in whole[:-1]]
    for start in range(6):
        assert run.place(run.keys[start]) == start
        for stop in range(start + 1, 7):
            assert list(run.part(start, stop)) == whole[start:stop]


@pytest.mark.parametrize(("tokens", "hashes", "keys"), [(7, 2, 2), (8, 1, 2), (8, 2, 1), (0, 0, 0)])
def test_what_does_not_fit_together_is_refused(tokens: int, hashes: int, keys: int) -> None:
    with pytest.raises(ValueError, match="tokens and"):
        describe(Shape(0, BLOCK, 1), [b"key"] * keys, [1] * tokens, [b"hash"] * hashes)


def test_only_what_follows_one_another_and_is_all_there_is_a_run() -> None:
    runs, one, other = Runs(), run_of("a", 8), run_of("b", 8)
    assert runs.put(one) == one.keys
    assert runs.put(other) == other.keys
    assert runs.run_of(one.keys) is one
    middle = runs.run_of(one.keys[2:5])
    assert middle is not None
    assert list(middle) == list(one)[2:5]
    for keys in (
        (),
        one.keys[1::-1],
        one.keys[:3:2],
        (*one.keys[6:], other.keys[0]),
        (one.keys[0], b"?"),
        (b"?",),
    ):
        assert runs.run_of(keys) is None
    scattered = (*one.keys[6:], b"?", *other.keys[:2], one.keys[0], other.keys[7])
    own = dict([*one, *other])
    assert runs.described(scattered) == [(key, own[key]) for key in scattered if key != b"?"]
    assert runs.take(one.keys[3:4]) == [one]
    assert runs.run_of(one.keys) is None
    assert runs.run_of(one.keys[:3]) is not None


def test_chunks_come_and_go_in_any_order() -> None:
    chance, runs = random.Random(3), Runs()
    there: dict[bytes, Description] = {}
    made = [run_of(f"{number}", chance.randrange(1, 20)) for number in range(12)]
    for _ in range(1500):
        if chance.random() < 0.4:
            # The same chunks described anew, as another request does.
            of = chance.choice(made)
            run = of.part(start := chance.randrange(len(of)), chance.randrange(start, len(of)) + 1)
            run = Run(run.keys, run.hashes, run.parent, run.tokens, run.lora_name)
            assert list(runs.put(run)) == [key for key in run.keys if key not in there]
            there.update(list(run))
        else:
            gone = chance.sample(sorted(there), min(len(there), chance.randrange(25)))
            assert all(
                run is not None and run.place(key) >= 0
                for key, run in zip(gone, runs.take(gone), strict=True)
            )
            for key in gone:
                del there[key]
            assert runs.take([b"?", *gone[:1]]) == [None] * (1 + len(gone[:1]))
        assert sorted(runs) == sorted(there)
        assert len(runs) == len(there)
        asked = chance.sample(sorted(there), len(there) // 2)
        assert runs.described(asked) == [(key, there[key]) for key in asked]
        assert sum(runs._left.values()) == len(there)
        assert all(len(run) < 2 * left for run, left in runs._left.items() if left < len(run))


def test_one_chunk_left_does_not_keep_its_run() -> None:
    runs = Runs()
    tracemalloc.start()
    try:
        for number in range(50):
            run = run_of(f"{number}", 1000)
            runs.put(run)
            runs.take(run.keys[:500])
            runs.take(run.keys[501:])
        del run
        assert len(runs) == 50
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


def test_host_memory_tells_what_is_news_whoever_can_describe_it() -> None:
    held = HeldSomewhere({HOST: Medium("CPU"), 0: Medium("STORAGE")})
    host = held.host
    assert held.holdings[HOST] is host
    run = run_of("a", 6)
    first, second, third, *others = run.keys
    assert host.add_some([first, second, first], []) == [first, second]
    # Those that nobody could describe are described later, which is no news.
    assert host.add_some([first, b"?", third], [run.part(0, 1), run.part(2, 3)]) == [b"?", third]
    assert host.add_some([third, b"?"], []) == []
    again = run_of("a", 6)
    assert list(host.add_run(again)) == others
    assert len(host) == 7
    assert set(host.keys()) == {*run.keys, b"?"}
    assert len(host.runs) == 6
    assert first in host
    assert b"?" in host
    assert host.discard([second, b"?", b"never", second]) == [second, b"?"]
    assert host.discard(run.keys) == [key for key in run.keys if key != second]
    assert len(host) == 0
    assert first not in host


def test_nothing_is_there_after_a_clear() -> None:
    host, run = HostHoldings(), run_of("a", 3)
    host.add_run(run)
    host.add_some([b"?"], [])
    host.clear()
    assert not host.keys()
    assert run.keys[0] not in host
    assert host.runs.run_of(run.keys) is None
    assert list(host.add_run(run)) == list(run.keys)
