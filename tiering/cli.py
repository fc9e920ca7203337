"""The command `tiering`: look at a configuration, look at what a directory holds.

Prints results to stdout and one sentence for a failure to stderr. Owns words and exit codes only;
all it says comes from `config` and, through `wiring`, from the tiers. What takes time to import
is imported by the subcommand that needs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from tiering.errors import ConfigError, TieringError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiering.config import EngineConfig
    from tiering.wiring import NamespaceSurvey

EXIT_OK, EXIT_FAILED, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 2, 130
_CONFIG_BYTES_MAX = 1 << 20

_EXIT_CODES = """\
exit codes:
  0    done; for config: the configuration is valid
  1    failed: a file or directory that is not there or cannot be read
  2    the configuration is invalid, or the command line is
  130  interrupted
"""


_STAT_TITLES = (
    *("model", "digest", "ranks", "chunks", "size"),
    *("oldest", "newest", "temporary", "quarantined"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; the exit code. --help and misuse exit as argparse does."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "config" and not arguments.schema and arguments.source is None:
        parser.error("config needs a file, - for stdin, or a JSON text")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _config(arguments) if arguments.command == "config" else _stat(arguments)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"tiering: {error}", file=sys.stderr)
        return EXIT_INVALID if arguments.command == "config" else EXIT_FAILED
    except TieringError as error:
        print(f"tiering: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # Whoever read us has left; keep the interpreter from failing at its own last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        print(f"tiering: {error.filename or 'error'}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


class _Version(argparse.Action):
    """--version, with the version looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from tiering import __version__

        print(f"tiering {__version__}")
        parser.exit(EXIT_OK)


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="tiering",
        description="Look into a tiered KV cache.",
        epilog=_EXIT_CODES,
        formatter_class=layout,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    config = commands.add_parser(
        "config",
        help="validate a configuration and show what is in effect",
        description="Validate a configuration; show every value in effect and where it comes "
        "from.\nTakes vLLM's kv_connector_extra_config, or the whole of --kv-transfer-config.",
        epilog=_EXIT_CODES,
        formatter_class=layout,
    )
    config.add_argument(
        "source", nargs="?", metavar="FILE|-|JSON", help="a file, - for stdin, or a JSON text"
    )
    config.add_argument(
        "--kind",
        choices=("connector", "store"),
        default="connector",
        help="for the vLLM connector (the default) or for a TieredStore",
    )
    config.add_argument("--schema", action="store_true", help="print the JSON schema instead")
    stat = commands.add_parser(
        "stat",
        help="show what the root_dir of an fs tier holds",
        description="Show the namespaces under ROOT with their chunks, bytes and age, and how "
        "files\nunder it are read and written. Changes nothing that is stored.",
        epilog=_EXIT_CODES,
        formatter_class=layout,
    )
    stat.add_argument("root", metavar="ROOT", help="the root_dir of an fs tier")
    for command in (config, stat):
        command.add_argument("--json", action="store_true", help="print JSON, for scripts")
    return parser


def _config(arguments: argparse.Namespace) -> int:
    from tiering.config import ConnectorConfig, StoreConfig, effective

    kinds: dict[str, type[EngineConfig]] = {"connector": ConnectorConfig, "store": StoreConfig}
    model_class = kinds[arguments.kind]
    if arguments.schema:
        _print_json(model_class.model_json_schema())
        return EXIT_OK
    text, origin = _configuration(arguments.source)
    try:
        model = _parsed(model_class, text)
    except ConfigError as error:
        if arguments.json:
            wrong = {"path": error.path, "message": str(error)}
            _print_json({"valid": False, "kind": arguments.kind, "error": wrong})
        raise
    came_from = {"set": origin, "default": "default"}
    settings = [(path, value, came_from[how]) for path, value, how in effective(model)]
    if arguments.json:
        listed = [dict(zip(("path", "value", "from"), each, strict=True)) for each in settings]
        told = {"valid": True, "kind": arguments.kind, "config": model.model_dump()}
        _print_json({**told, "settings": listed})
        return EXIT_OK
    print(f"valid {arguments.kind} configuration")
    rows = [(path, _value(path, value), source) for path, value, source in settings]
    _print_table([("key", "value", "from"), *rows])
    return EXIT_OK


def _parsed(model_class: type[EngineConfig], text: bytes | str) -> EngineConfig:
    """The settings in `text`, which may also be the whole of vLLM's --kv-transfer-config."""
    from tiering.config import EXTRA_CONFIG, load_json, parse

    data = load_json(text)
    if isinstance(data, dict) and "kv_connector" in data:
        return parse(model_class, data.get(EXTRA_CONFIG, {}), EXTRA_CONFIG)
    return parse(model_class, data)


def _configuration(source: str) -> tuple[bytes | str, str]:
    """The text that `source` stands for, and a word for where that is."""
    if source.lstrip().startswith(("{", "[")):
        return source, "argument"
    if source == "-":
        text, origin = sys.stdin.buffer.read(_CONFIG_BYTES_MAX + 1), "stdin"
    else:
        with Path(source).open("rb") as file:
            text, origin = file.read(_CONFIG_BYTES_MAX + 1), "file"
    if len(text) > _CONFIG_BYTES_MAX:
        raise TieringError(f"{source} is no configuration: over {_CONFIG_BYTES_MAX} bytes long")
    return text, origin


def _stat(arguments: argparse.Namespace) -> int:
    from tiering.wiring import survey_root

    root = Path(arguments.root)
    if not root.is_dir():
        what = "is not a directory" if root.exists() else "does not exist"
        raise TieringError(f"{root} {what}; give the root_dir of an fs tier")
    namespaces = survey_root(root)
    io_path, trouble = _io_path(root)
    chunks, size = sum(each.chunks for each in namespaces), sum(each.bytes for each in namespaces)
    if arguments.json:
        told = {"root": _printable(str(root)), "io_path": io_path, "chunks": chunks, "bytes": size}
        _print_json({**told, "namespaces": [_told(each) for each in namespaces]})
        return EXIT_OK
    means = trouble if io_path is None else f"{io_path} I/O"
    held = f"{_count(len(namespaces), 'namespace')}, {_count(chunks, 'chunk')}, {_size(size)}"
    print(f"{root}: {held}; {means}")
    if namespaces:
        now = time.time()
        _print_table([_STAT_TITLES, *(_row(each, now) for each in namespaces)])
    return EXIT_OK


def _told(found: NamespaceSurvey) -> dict[str, object]:
    """A namespace for JSON, which cannot hold every name that a directory can have."""
    names = {"directory": _printable(found.directory), "model": _printable(found.model)}
    return {**dataclasses.asdict(found), **names}


def _row(found: NamespaceSurvey, now: float) -> tuple[str, ...]:
    return (
        _printable(found.model),
        found.digest,
        str(len(found.ranks)),
        str(found.chunks),
        _size(found.bytes),
        _age(now, found.oldest_mtime_seconds),
        _age(now, found.newest_mtime_seconds),
        str(found.temp_files),
        str(found.quarantined),
    )


def _io_path(root: Path) -> tuple[str | None, str]:
    """How files under `root` are read and written; None, and why, where nothing can be written."""
    from tiering.wiring import probe_io_path

    try:
        return probe_io_path(root), ""
    except OSError as error:
        return None, f"cannot be written to ({error.strerror})"


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


def _value(path: str, value: object) -> str:
    """A setting as JSON has it; bytes in a unit that can be read, too."""
    text = orjson.dumps(value).decode()
    return f"{text} ({_size(value)})" if "bytes" in path and isinstance(value, int) else text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(size: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def _age(now: float, then: float | None) -> str:
    if then is None:
        return "-"
    seconds = max(now - then, 0)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def _print_json(value: object) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def _print_table(rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their widest cell."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())
