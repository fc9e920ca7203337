"""Bytes from anywhere: the decoder of peers' messages refuses them or makes a message that is one.

Random frames, and frames of real messages with bytes changed, cut, repeated and spliced: 200,000 in
the slow run, or as many as KV_TIERING_FUZZ_FRAMES says.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Iterator

import pytest

from peer_frames import one_of_each
from tiering.peers.messages import LIMITS_BYTES, Malformed, decode, encode

FRAMES = [encode(message) for message in one_of_each()]
MANY = int(os.environ.get("KV_TIERING_FUZZ_FRAMES", "200000"))
BYTES_MAX = 300
# What starts a value, and what claims a length: mutations hit these more often than chance would.
TELLING = bytes([0x80, 0x8F, 0x90, 0xC0, 0xC1, 0xC4, 0xC6, 0xCF, 0xD9, 0xDB, 0xDD, 0xDF, 0xFF])


def frames(count: int, seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    below, pick, noise = chance.randrange, chance.choice, chance.randbytes
    for number in range(count):
        kind = number % 4
        if kind == 0:
            yield noise(below(BYTES_MAX))
            continue
        frame = bytearray(pick(FRAMES)[: BYTES_MAX * 4])
        for _ in range(1 + below(3)):
            at = below(len(frame)) if frame else 0
            if kind == 1:
                frame[at : at + 1] = bytes([pick(TELLING)])
            elif kind == 2:
                frame[at : at + below(8)] = noise(below(8))
            else:
                other = pick(FRAMES)
                frame[at:] = other[below(len(other)) :][:BYTES_MAX]
        yield bytes(frame)


def require_sound(frame: bytes) -> bool:
    """Whether `frame` is a message; then it is one that another engine would take, too."""
    message = decode(frame)
    if isinstance(message, Malformed):
        assert message.reason
        return False
    again = encode(message)
    assert decode(again) == message
    assert len(again) <= LIMITS_BYTES[type(message).__struct_config__.tag]
    return True


@pytest.mark.slow
def test_a_frame_is_refused_or_a_message() -> None:
    taken = sum(map(require_sound, frames(30_000, seed=1)))
    assert 0 < taken < 30_000 // 2


def test_random_bytes_are_no_message() -> None:
    chance = random.Random(2)
    for _ in range(20_000):
        assert isinstance(decode(chance.randbytes(chance.randrange(BYTES_MAX))), Malformed)


@pytest.mark.slow
def test_decoding_takes_no_more_memory_than_its_frame_and_a_little() -> None:
    made = list(frames(4_000, seed=3))
    for frame in made[:100]:
        decode(frame)
    tracemalloc.start()
    try:
        for frame in made:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            decode(frame)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 64_000 + 4 * len(frame)
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_great_many_frames() -> None:
    taken = sum(map(require_sound, frames(MANY, seed=4)))
    assert 0 < taken < MANY // 2
