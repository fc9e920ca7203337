"""What a tier is believed to hold: bounded, and what was confirmed longest ago goes first."""

from __future__ import annotations

import pytest

from portable import KERNELS, use_kernel
from tiering.residency.known import KnownKeys


@pytest.fixture(params=KERNELS, autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel(request.param, monkeypatch)


def batch(name: str, count: int = 4) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(count)]


def test_what_was_confirmed_longest_ago_is_forgotten() -> None:
    known = KnownKeys(keys_max=10)
    for name in "abc":
        known.add(batch(name))
    assert len(known) == 8
    assert not known.holds(batch("a")).any()
    assert known.holds(batch("b")).all()


def test_what_is_confirmed_again_stays() -> None:
    known = KnownKeys(keys_max=10)
    known.add(batch("a"))
    known.add(batch("b"))
    known.add(batch("a")[:2])
    known.add(batch("c"))
    assert known.holds(batch("a")).tolist() == [True, True, False, False]


def test_confirming_the_same_for_ever_costs_no_memory() -> None:
    known = KnownKeys(keys_max=10)
    for _ in range(100):
        known.add(batch("a"))
    assert known.holds(batch("a")).all()
    assert len(known._batches) <= 5


def test_what_is_told_apart_and_what_is_forgotten() -> None:
    known = KnownKeys()
    known.add(batch("a"))
    known.discard(batch("a")[:1])
    assert list(known.unknown([*batch("a"), b"x"])) == [b"a0", b"x"]
    assert list(known.among([b"x", *batch("a")])) == batch("a")[1:]
    known.clear()
    assert not known.holds(batch("a")).any()
