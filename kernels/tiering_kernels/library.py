"""The compiled library: where it is, and whether it is of the version that this package needs."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TypeVar

from tiering_kernels.chunkio import EngineUnavailable

LIBRARY = f"{__file__.rpartition('/')[0]}/_native.so"
ABI = 4

Library = TypeVar("Library", bound=ctypes.CDLL)


def load(path: str, kind: type[Library]) -> Library:
    """The library at `path`, to be called with or without the interpreter lock, as `kind` says.

    EngineUnavailable, with the reason, where it cannot be had.
    """
    try:
        library = kind(path)
        found: int = library.kvt_abi()
    except (OSError, AttributeError) as error:
        raise EngineUnavailable(f"native code cannot be loaded: {error}") from error
    if found != ABI:
        raise EngineUnavailable(
            f"{path} is of version {found}, not {ABI}: build it anew with `python hatch_build.py`, "
            "or install kv-tiering anew"
        )
    return library


@cache
def kept() -> ctypes.PyDLL | None:
    """The library, to be called with the interpreter lock kept; None where it cannot be had."""
    try:
        return load(LIBRARY, ctypes.PyDLL)
    except EngineUnavailable:
        return None
