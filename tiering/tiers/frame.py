"""The self-verifying chunk frame: one header page in front of a chunk's payload.

Owns the frame's bytes and their check; pure functions, called from any thread. Integers are
big-endian, unused bytes zero (docs/format.md has the reasons):

    0     8   magic b"KVTCHUNK"
    8     4   format version
    12    4   key length, 5 to 128
    16    8   payload length in bytes
    24   32   namespace digest
    56  128   key, zero-padded
    184       zeros
    4080 16   xxh3_128 over bytes 0..4079, then the payload
"""

from __future__ import annotations

import struct

import xxhash

from tiering.keys import GROUP_BYTES, KEY_BYTES_MAX
from tiering.namespace import FORMAT_VERSION
from tiering_kernels.chunkio import CHECKSUM_AT, HEADER_BYTES

MAGIC = b"KVTCHUNK"

_FIELDS = struct.Struct(f">8sIIQ32s{KEY_BYTES_MAX}s")
FIELDS_BYTES = _FIELDS.size
_ZEROS = bytes(HEADER_BYTES - FIELDS_BYTES)


def pack_fields(header: memoryview, key: bytes, digest: bytes, payload_bytes: int) -> None:
    """Fill `header` (HEADER_BYTES, writable) with all but the checksum, which is left zero."""
    fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, len(key), payload_bytes, digest, key)
    header[:FIELDS_BYTES] = fields
    header[FIELDS_BYTES:] = _ZEROS


def check_fields(header: memoryview, key: bytes, digest: bytes, payload_bytes: int) -> str | None:
    """None where `header` was made for that chunk, else what is wrong. The checksum, which covers
    the fields as well, is for whoever read the payload to check."""
    expected = _FIELDS.pack(MAGIC, FORMAT_VERSION, len(key), payload_bytes, digest, key)
    if header[:FIELDS_BYTES] == expected:
        return None
    magic, version, key_length, length, found, padded = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        return "bad magic: not a chunk frame"
    if version != FORMAT_VERSION:
        return f"format version {version}, not {FORMAT_VERSION}"
    if length != payload_bytes:
        return f"payload of {length} bytes, not {payload_bytes}"
    if found != digest:
        return f"written in another namespace ({found.hex()[:12]})"
    if padded[:key_length] != key or key_length != len(key):
        return f"holds another key ({padded[: min(key_length, KEY_BYTES_MAX)].hex()})"
    return None


def pack_header(
    header: memoryview, key: bytes, namespace_digest: bytes, payload: memoryview
) -> None:
    """Fill `header` (HEADER_BYTES, writable) so that it vouches for `payload` under `key`."""
    pack_fields(header, key, namespace_digest, payload.nbytes)
    header[CHECKSUM_AT:] = _checksum(header, payload)


def check(
    header: memoryview, key: bytes, namespace_digest: bytes, payload: memoryview
) -> str | None:
    """None where `header` and `payload` are what was written under `key`, else what is wrong.

    The fields are compared before the checksum only to name the fault: the checksum alone covers
    every byte of the frame.
    """
    wrong = check_fields(header, key, namespace_digest, payload.nbytes)
    if wrong is None and header[CHECKSUM_AT:] != _checksum(header, payload):
        return "bad checksum"
    return wrong


def key_in(header: memoryview, namespace_digest: bytes, payload_bytes: int) -> bytes | None:
    """The key that `header` names, None where it heads no frame of the namespace. Not verified:
    the payload is not looked at."""
    key_length, padded = int.from_bytes(header[12:16], "big"), bytes(header[56:184])
    if not GROUP_BYTES < key_length <= KEY_BYTES_MAX:
        return None
    key = padded[:key_length]
    wrong = check_fields(header, key, namespace_digest, payload_bytes)
    return key if wrong is None else None


def _checksum(header: memoryview, payload: memoryview) -> bytes:
    digest = xxhash.xxh3_128(header[:CHECKSUM_AT])
    digest.update(payload)
    return digest.digest()


def cause_of(wrong: str) -> str:
    """What is wrong with a frame, in one word: how counters are named, `damaged_<cause>`."""
    for word in ("checksum", "namespace", "key", "magic", "version"):
        if word in wrong:
            return word
    return "size"
