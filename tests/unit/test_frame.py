"""A frame vouches for one key, one namespace and every bit it covers, and for nothing else."""

from __future__ import annotations

import random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiering.tiers import frame

KEY = bytes(range(32)) + b"\0\0\0\1"
DIGEST = bytes(range(100, 132))
PAYLOAD = memoryview(random.Random(1).randbytes(8192))


def packed(key: bytes = KEY, digest: bytes = DIGEST, payload: memoryview = PAYLOAD) -> bytearray:
    header = bytearray(b"\xff" * frame.HEADER_BYTES)
    frame.pack_header(memoryview(header), key, digest, payload)
    return header


def check(header: bytearray, payload: memoryview = PAYLOAD) -> str | None:
    return frame.check(memoryview(header), KEY, DIGEST, payload)


def test_the_bytes_are_those_of_the_table() -> None:
    header = packed()
    assert header[:8] == b"KVTCHUNK"
    assert header[8:12] == b"\0\0\0\1"
    assert header[12:16] == b"\0\0\0\x24"
    assert header[16:24] == (8192).to_bytes(8, "big")
    assert header[24:56] == DIGEST
    assert header[56:184] == KEY.ljust(128, b"\0")
    assert header[184:4080] == bytes(4080 - 184)
    assert header[4080:] == xxhash.xxh3_128_digest(bytes(header[:4080]) + bytes(PAYLOAD))


@given(key=st.binary(min_size=5, max_size=128), size=st.integers(0, 5000))
def test_what_was_packed_checks(key: bytes, size: int) -> None:
    payload = PAYLOAD[:size]
    header = memoryview(packed(key=key, payload=payload))
    assert frame.check(header, key, DIGEST, payload) is None


@pytest.mark.parametrize("byte", range(0, frame.HEADER_BYTES, 5))
def test_any_bit_of_the_header_counts(byte: int) -> None:
    for bit in (0, 7):
        header = packed()
        header[byte] ^= 1 << bit
        assert check(header) is not None


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 8191])
def test_any_bit_of_the_payload_counts(at: int) -> None:
    payload = bytearray(PAYLOAD)
    payload[at] ^= 0x10
    assert check(packed(), memoryview(payload)) == "bad checksum"


def test_reasons_name_the_fault() -> None:
    assert check(bytearray(4096)) == "bad magic: not a chunk frame"
    newer = packed()
    newer[11] = 2
    assert check(newer) == "format version 2, not 1"
    assert check(packed(payload=PAYLOAD[:4096])) == "payload of 4096 bytes, not 8192"
    assert check(packed(digest=bytes(32))) == "written in another namespace (000000000000)"
    assert check(packed(key=b"other" + bytes(4))) == f"holds another key ({b'other'.hex()}00000000)"


def test_a_key_and_the_same_key_with_zeros_after_it_differ() -> None:
    assert check(packed(key=KEY + b"\0")) is not None
    header = memoryview(packed(key=KEY))
    assert frame.check(header, KEY + b"\0", DIGEST, PAYLOAD) is not None
