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

from tiering.keys import KEY_BYTES_MAX
from tiering.layout import ALIGNMENT
from tiering.namespace import FORMAT_VERSION

HEADER_BYTES = ALIGNMENT
MAGIC = b"KVTCHUNK"

_FIELDS = struct.Struct(f">8sIIQ32s{KEY_BYTES_MAX}s")
_CHECKSUM_AT = HEADER_BYTES - 16


def pack_header(
    header: memoryview, key: bytes, namespace_digest: bytes, payload: memoryview
) -> None:
    """Fill `header` (HEADER_BYTES, writable) so that it vouches for `payload` under `key`."""
    length = payload.nbytes
    fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, len(key), length, namespace_digest, key)
    header[:_CHECKSUM_AT] = fields.ljust(_CHECKSUM_AT, b"\0")
    header[_CHECKSUM_AT:] = _checksum(header, payload)


def check(
    header: memoryview, key: bytes, namespace_digest: bytes, payload: memoryview
) -> str | None:
    """None where `header` and `payload` are what was written under `key`, else what is wrong.

    The fields are compared before the checksum only to name the fault: the checksum alone covers
    every byte of the frame.
    """
    magic, version, key_length, length, digest, padded = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        return "bad magic: not a chunk frame"
    if version != FORMAT_VERSION:
        return f"format version {version}, not {FORMAT_VERSION}"
    if length != payload.nbytes:
        return f"payload of {length} bytes, not {payload.nbytes}"
    if digest != namespace_digest:
        return f"written in another namespace ({digest.hex()[:12]})"
    if padded[:key_length] != key or key_length != len(key):
        return f"holds another key ({padded[: min(key_length, KEY_BYTES_MAX)].hex()})"
    if header[_CHECKSUM_AT:] != _checksum(header, payload):
        return "bad checksum"
    return None


def _checksum(header: memoryview, payload: memoryview) -> bytes:
    digest = xxhash.xxh3_128(header[:_CHECKSUM_AT])
    digest.update(payload)
    return digest.digest()
