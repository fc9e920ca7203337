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
        model = _parsed(model_class, text)
    except ConfigError as error:
        if arguments.json:
            wrong = {"path": error.path, "message": str(error)}
            words.print_json({"valid": False, "kind": arguments.kind, "error": wrong})
        raise
    came_from = {"set": origin, "default": "default"}
    settings = [(path, value, came_from[how]) for path, value, how in effective(model)]
    if arguments.json:
        listed = [dict(zip(("path", "value", "from"), each, strict=True)) for each in settings]
        told = {"valid": True, "kind": arguments.kind, "config": model.model_dump()}
        words.print_json({**told, "settings": listed})
        return exits.OK
    print(f"valid {arguments.kind} configuration")
    rows = [(path, _value(path, value), source) for path, value, source in settings]
    words.print_table([("key", "value", "from"), *rows])
    return exits.OK


def _parsed(model_class: type[EngineConfig], text: bytes | str) -> EngineConfig:
    """The settings in `text`, which may also be the whole of vLLM's --kv-transfer-config."""
    data = load_json(text)
    if isinstance(data, dict) and "kv_connector" in data:
        return parse(model_class, data.get(EXTRA_CONFIG, {}), EXTRA_CONFIG)
    return parse(model_class, data)


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
