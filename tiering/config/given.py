"""Settings as they were given, secrets included, for another process of the same engine.

The one way out of the models that does not hide what they keep hidden; nothing here is for eyes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from tiering.config.fields import Settings


def as_given(settings: Settings) -> dict[str, Any]:
    """What the same class makes equal settings of: keys that were set, and values as JSON has
    them."""
    # What was not set has to stay so: some keys take what another model says then.
    given = {name: getattr(settings, name) for name in sorted(settings.model_fields_set)}
    return {name: _plain(value) for name, value in given.items()}


def _plain(value: object) -> object:
    match value:
        case Settings():
            return as_given(value)
        case SecretStr():
            return value.get_secret_value()
        case Mapping():
            return {str(name): _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case _:
            return value
