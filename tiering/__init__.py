"""The public API of kv-tiering: everything in `__all__`, and nothing else.

Names are imported when they are first used, so `import tiering` itself loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiering.broadcast import Broadcast
    from tiering.config import (
        BucketConfig,
        ConnectorConfig,
        EngineConfig,
        FsTierConfig,
        ObjTierConfig,
        P2pTierConfig,
        StoreConfig,
        UserTierConfig,
    )
    from tiering.errors import (
        ClosedError,
        ConfigError,
        CopyError,
        DamagedChunk,
        RegionError,
        TierError,
        TieringError,
    )
    from tiering.layout import KVLayout
    from tiering.policy.registry import register_policy
    from tiering.store import TieredStore
    from tiering.tiers.peers.source import PeerSource

    __version__: str

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

__all__ = [
    "Broadcast",
    "BucketConfig",
    "ClosedError",
    "ConfigError",
    "ConnectorConfig",
    "CopyError",
    "DamagedChunk",
    "EngineConfig",
    "FsTierConfig",
    "GiB",
    "KVLayout",
    "KiB",
    "MiB",
    "ObjTierConfig",
    "P2pTierConfig",
    "PeerSource",
    "RegionError",
    "StoreConfig",
    "TiB",
    "TierError",
    "TieredStore",
    "TieringError",
    "UserTierConfig",
    "__version__",
    "register_policy",
]

_HOMES = {
    "tiering.broadcast": ("Broadcast",),
    "tiering.config": (
        "BucketConfig",
        "ConnectorConfig",
        "EngineConfig",
        "FsTierConfig",
        "ObjTierConfig",
        "P2pTierConfig",
        "StoreConfig",
        "UserTierConfig",
    ),
    "tiering.errors": (
        "ClosedError",
        "ConfigError",
        "CopyError",
        "DamagedChunk",
        "RegionError",
        "TierError",
        "TieringError",
    ),
    "tiering.layout": ("KVLayout",),
    "tiering.policy.registry": ("register_policy",),
    "tiering.store": ("TieredStore",),
    "tiering.tiers.peers.source": ("PeerSource",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        value: object = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("kv-tiering")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
