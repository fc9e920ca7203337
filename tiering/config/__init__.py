"""Settings as plain data: what each key means, and what is refused before anything starts.

`settings` has the models of an engine, `tiers`, `obj` and `p2p` those of its tiers, `anytier`,
`pressure` and `fields` what they share; `transfer` finds them in vLLM's configuration;
`problems` turns whatever is wrong into one ConfigError that a user can act on. Reads no file, no
clock and no environment.
"""

from tiering.config.fields import EXTRA_CONFIG
from tiering.config.obj import BucketConfig, ObjTierConfig
from tiering.config.p2p import P2pTierConfig
from tiering.config.pressure import PressureConfig
from tiering.config.problems import load_json
from tiering.config.settings import (
    ConnectorConfig,
    EngineConfig,
    Setting,
    StoreConfig,
    effective,
    parse,
)
from tiering.config.tiers import FsTierConfig, TierConfig, UserTierConfig
from tiering.config.transfer import engines

__all__ = [
    "EXTRA_CONFIG",
    "BucketConfig",
    "ConnectorConfig",
    "EngineConfig",
    "FsTierConfig",
    "ObjTierConfig",
    "P2pTierConfig",
    "PressureConfig",
    "Setting",
    "StoreConfig",
    "TierConfig",
    "UserTierConfig",
    "effective",
    "engines",
    "load_json",
    "parse",
]
