"""Settings as plain data: what each key means, and what is refused before anything starts.

`settings` has the models and their rules, `problems` turns whatever is wrong into one ConfigError
that a user can act on. Reads no file, no clock and no environment.
"""

from tiering.config.problems import load_json
from tiering.config.settings import (
    EXTRA_CONFIG,
    ConnectorConfig,
    EngineConfig,
    FsTierConfig,
    Setting,
    StoreConfig,
    TierConfig,
    effective,
    parse,
)

__all__ = [
    "EXTRA_CONFIG",
    "ConnectorConfig",
    "EngineConfig",
    "FsTierConfig",
    "Setting",
    "StoreConfig",
    "TierConfig",
    "effective",
    "load_json",
    "parse",
]
