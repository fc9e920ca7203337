"""Which engine moves chunks here: the one that was asked for, or the first that works."""

from __future__ import annotations

from typing import Literal

from tiering_kernels.chunkio import ENGINES, ChunkIo, Engine, EngineUnavailable
from tiering_kernels.native import NativeIo
from tiering_kernels.portable import PortableIo


def open_engine(wanted: Engine | Literal["auto"] = "auto") -> ChunkIo:
    """The engine `wanted`, or with `auto` the first of ENGINES that works here.

    EngineUnavailable, with the reason, where a named one does not.
    """
    reasons: list[str] = []
    for engine in ENGINES if wanted == "auto" else (wanted,):
        if engine == "portable":
            return PortableIo()
        try:
            return NativeIo(engine)
        except EngineUnavailable as error:
            reasons.append(str(error))
    raise EngineUnavailable("; ".join(reasons))
