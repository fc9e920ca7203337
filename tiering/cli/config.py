"""`tiering config`: validate a configuration, show every value in effect and where it is from."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import orjson

from tiering.cli import exits, roots, words
from tiering.config import (
    EXTRA_CONFIG,
    ConnectorConfig,
    EngineConfig,
    StoreConfig,
    effective,
    engines,
    load_json,
    parse,
)
from tiering.errors import ConfigError, TieringError

_CONFIG_BYTES_MAX = 1 << 20
_KINDS: dict[str, type[EngineConfig]] = {"connector": ConnectorConfig, "store": StoreConfig}


def run(arguments: argparse.Namespace) -> int:
    model_class = _KINDS[arguments.kind]
    if arguments.schema:
        words.print_json(model_class.model_json_schema())
        return exits.OK
    text, origin = read_source(arguments.source)
    try:
        models = [(where, parse(model_class, given, where)) for where, given in settings_in(text)]
    except ConfigError as error:
        if arguments.json:
            wrong = {"path": error.path, "message": str(error)}
            words.print_json({"valid": False, "kind": arguments.kind, "error": wrong})
        raise
    for where, model in models:
        at = where if len(models) > 1 else ""
        _show(model, arguments.kind, origin, at, arguments.json)
    return exits.OK


def _show(model: EngineConfig, kind: str, origin: str, at: str, as_json: bool) -> None:
    """Every value in effect; `at` is where the settings are, if there are others."""
    came_from = {"set": origin, "default": "default"}
    settings = [(path, value, came_from[how]) for path, value, how in effective(model)]
    if as_json:
        listed = [dict(zip(("path", "value", "from"), each, strict=True)) for each in settings]
        told = {"valid": True, "kind": kind, **({"at": at} if at else {})}
        words.print_json({**told, "config": model.model_dump(), "settings": listed})
        return
    print(f"valid {kind} configuration" + (f" at {at}" if at else ""))
    rows = [(path, _value(path, value), source) for path, value, source in settings]
    words.print_table([("key", "value", "from"), *rows])


def settings_in(text: bytes | str) -> list[tuple[str, object]]:
    """The settings in `text`, with the path to them: it is these, or the whole of vLLM's
    --kv-transfer-config, with any number of them."""
    data = load_json(text)
    if not isinstance(data, dict) or not ({"kv_connector", EXTRA_CONFIG} & data.keys()):
        return [("", data)]
    name = data.get("kv_connector")
    found = list(engines(name, data.get(EXTRA_CONFIG, {})))
    if not found:
        raise ConfigError(
            "kv_connector",
            name,
            "is not this engine, and has none in it",
            'write "TieredConnector", or "OffloadingConnector" with "spec_name": '
            '"TieredOffloadingSpec" in its kv_connector_extra_config',
        )
    return found


def read_source(source: str) -> tuple[bytes | str, str]:
    """The text that `source` stands for, and a word for where that is."""
    if roots.is_json(source):
        return source, "argument"
    if source == "-":
        text, origin = sys.stdin.buffer.read(_CONFIG_BYTES_MAX + 1), "stdin"
    else:
        with Path(source).open("rb") as file:
            text, origin = file.read(_CONFIG_BYTES_MAX + 1), "file"
    if len(text) > _CONFIG_BYTES_MAX:
        raise TieringError(f"{source} is no configuration: over {_CONFIG_BYTES_MAX} bytes long")
    return text, origin


def _value(path: str, value: object) -> str:
    """A setting as JSON has it; bytes in a unit that can be read, too."""
    text = orjson.dumps(value).decode()
    return f"{text} ({words.size(value)})" if "bytes" in path and isinstance(value, int) else text
