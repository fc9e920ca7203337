"""Where in vLLM's --kv-transfer-config the settings of this engine stand.

There may be several: each child of a MultiConnector has its own. Reads whatever it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiering.config.fields import EXTRA_CONFIG

CONNECTOR = "TieredConnector"
SPEC = "TieredOffloadingSpec"
"""What vLLM's OffloadingConnector is told to load as `spec_name`."""


def engines(name: object, extra: object, where: str = EXTRA_CONFIG) -> Iterator[tuple[str, object]]:
    """Of a connector called `name` and its `extra` configuration, and of those in it: the path and
    the settings of each that is this engine."""
    if name == CONNECTOR or (isinstance(extra, Mapping) and extra.get("spec_name") == SPEC):
        yield where, extra
    nested = extra.get("connectors") if isinstance(extra, Mapping) else None
    for place, each in enumerate(nested if isinstance(nested, list) else ()):
        if isinstance(each, Mapping):
            inner = f"{where}.connectors[{place}].{EXTRA_CONFIG}"
            yield from engines(each.get("kv_connector"), each.get(EXTRA_CONFIG, {}), inner)
