"""The command `tiering`: look at a configuration, a stream of KV events, what a directory or a
bucket holds; route requests between engines.

Prints results to stdout, progress and one sentence for a failure to stderr. Owns words and exit
codes only; all it says comes from `config` and, through `maintenance`, from the tiers. What takes
time to import is imported by the subcommand that needs it.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Sequence

from tiering.cli import exits
from tiering.errors import ConfigError, TieringError

_FORMAT = argparse.RawDescriptionHelpFormatter


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; the exit code. --help and misuse exit as argparse does."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "config" and not arguments.schema and arguments.source is None:
        parser.error("config needs a file, - for stdin, or a JSON text")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"tiering: {error}", file=sys.stderr)
        return exits.INVALID if arguments.command in ("config", "proxy") else exits.FAILED
    except TieringError as error:
        print(f"tiering: {error}", file=sys.stderr)
        return exits.FAILED
    except BrokenPipeError:
        # Whoever read us has left; keep the interpreter from failing at its own last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.FAILED
    except OSError as error:
        print(f"tiering: {error.filename or 'error'}: {error.strerror}", file=sys.stderr)
        return exits.FAILED
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    return code


class _Version(argparse.Action):
    """--version, with the version looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from tiering import __version__

        print(f"tiering {__version__}")
        parser.exit(exits.OK)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tiering",
        description="Look into a tiered KV cache, and after it.",
        epilog=exits.TOLD,
        formatter_class=_FORMAT,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, summary: str, description: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=exits.TOLD,
            formatter_class=_FORMAT,
        )
        command.add_argument("--json", action="store_true", help="print JSON, for scripts")
        return command

    _add_config(add)
    _add_stat(add)
    for command in (_add_verify(add), _add_gc(add)):
        command.add_argument("root", metavar="ROOT", help="the root_dir of an fs tier")
    _add_events(add)
    _add_proxy(add)
    return parser


def _config(arguments: argparse.Namespace) -> int:
    from tiering.cli import config

    return config.run(arguments)


def _stat(arguments: argparse.Namespace) -> int:
    from tiering.cli import roots

    if roots.names_bucket(arguments.root):
        from tiering.cli import bucket

        return bucket.run(arguments)
    from tiering.cli import stat

    return stat.run(arguments)


def _verify(arguments: argparse.Namespace) -> int:
    from tiering.cli import verify

    return verify.run(arguments)


def _gc(arguments: argparse.Namespace) -> int:
    from tiering.cli import gc

    return gc.run(arguments)


def _events(arguments: argparse.Namespace) -> int:
    try:
        from tiering.cli import events
    except ImportError as error:
        raise TieringError(str(error)) from error
    return events.run(arguments)


def _proxy(arguments: argparse.Namespace) -> int:
    try:
        from tiering.cli import proxy
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise TieringError(
            "the proxy speaks HTTP, and the package aiohttp is not installed: "
            "run pip install 'kv-tiering[proxy]'"
        ) from error
    return proxy.run(arguments)


_COMMANDS = {
    "config": _config,
    "stat": _stat,
    "verify": _verify,
    "gc": _gc,
    "events": _events,
    "proxy": _proxy,
}
_Add = Callable[[str, str, str], argparse.ArgumentParser]


def _add_config(add: _Add) -> None:
    config = add(
        "config",
        "validate a configuration and show what is in effect",
        "Validate a configuration; show every value in effect and where it comes "
        "from.\nTakes vLLM's kv_connector_extra_config, or the whole of --kv-transfer-config.",
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


def _add_stat(add: _Add) -> None:
    stat = add(
        "stat",
        "show what the root_dir of an fs tier holds, or a bucket",
        "Show the namespaces under ROOT with their chunks, bytes and age; of a directory also how\n"
        "files under it are read and written, and what moves them here. Changes nothing that is\n"
        "stored. A bucket is listed once, 1,000 objects a request.",
    )
    stat.add_argument(
        "root",
        metavar="ROOT",
        help="the root_dir of an fs tier; for a bucket the configuration with it, the engine's "
        "or its tier's alone: a file, - for stdin, or a JSON text",
    )


def _add_verify(add: _Add) -> argparse.ArgumentParser:
    verify = add(
        "verify",
        "read every chunk and check it",
        "Read every chunk under ROOT and check its whole frame, beside running engines if\n"
        "you like. Changes nothing without --quarantine.",
    )
    _add_namespace(verify, "check only the namespace in this directory of ROOT; may be repeated")
    verify.add_argument(
        "--max-mb-per-second",
        type=_not_negative,
        default=200.0,
        metavar="N",
        help="read at most N million bytes a second, 0 for no limit (default: 200)",
    )
    what = verify.add_mutually_exclusive_group()
    what.add_argument(
        "--quarantine",
        action="store_true",
        help="move damaged files to the namespace's quarantine; in segments it only reports",
    )
    what.add_argument(
        "--report-only", action="store_true", help="only report what is damaged (the default)"
    )
    return verify


def _add_gc(add: _Add) -> argparse.ArgumentParser:
    gc = add(
        "gc",
        "list and remove what no engine uses any more",
        "List the namespaces under ROOT, and what would be removed: those that nothing was\n"
        "stored in or read from for long, temporary files of dead processes, empty\n"
        "directories. Removes nothing without --delete.",
    )
    gc.add_argument(
        "--orphaned-days",
        type=_not_negative,
        default=30.0,
        metavar="N",
        help="a namespace not used for N days is orphaned (default: 30)",
    )
    _add_namespace(
        gc, "take just the namespace in this directory of ROOT, however old; may be repeated"
    )
    gc.add_argument("--delete", action="store_true", help="remove it")
    return gc


def _add_events(add: _Add) -> None:
    events = add(
        "events",
        "watch the KV events that an engine publishes",
        "Watch the KV events published at ENDPOINT, by vLLM or a program: for each medium the\n"
        "blocks stored and removed per second and those there now, and what went wrong. Ends\n"
        "with Ctrl-C, after --seconds, or with --check once nothing has come for an interval.",
    )
    events.add_argument(
        "endpoint", metavar="ENDPOINT", help="as the publisher has it; * stands for this host"
    )
    events.add_argument(
        "--replay", metavar="ENDPOINT", help="where to ask for what was missed, from the start on"
    )
    events.add_argument(
        "--topic", default="", metavar="T", help="only topics that begin with it (default: all)"
    )
    events.add_argument(
        "--interval",
        type=_positive,
        default=1.0,
        metavar="S",
        help="seconds between two lines (default: 1)",
    )
    events.add_argument("--seconds", type=_positive, metavar="N", help="end after N seconds")
    events.add_argument(
        "--check",
        nargs="+",
        metavar="ROOT",
        default=[],
        help="compare what was announced for STORAGE with the chunks under these root_dirs",
    )
    _add_namespace(events, "with --check: only the namespace in this directory; may be repeated")


def _add_proxy(add: _Add) -> None:
    proxy = add(
        "proxy",
        "route requests between engines that give one another chunks",
        "Serve OpenAI's API before engines with a tier of peers, and tell each request from where\n"
        "its chunks come: with --prefill and --decode a prompt is computed by the one and\n"
        "answered by the other, with --engine each has what another one has computed. For trying\n"
        "and for tests. An engine is URL=HOST:PORT, its HTTP API and its socket for peers.",
    )
    proxy.add_argument("--host", default="127.0.0.1", help="to listen at (default: 127.0.0.1)")
    proxy.add_argument(
        "--port", type=_port, default=8000, metavar="N", help="0 for a free one (default: 8000)"
    )
    for option, what in (
        ("--prefill", "engines that compute prompts"),
        ("--decode", "engines that answer what was prefilled"),
        ("--engine", "engines that do both"),
    ):
        proxy.add_argument(
            option, action="extend", nargs="+", default=[], metavar="URL=HOST:PORT", help=what
        )
    proxy.add_argument(
        "--prefill-seconds",
        type=_positive,
        default=60.0,
        metavar="S",
        help="after them the one who answers computes the prompt itself (default: 60)",
    )
    proxy.add_argument(
        "--verbose", action="store_true", help="tell on stderr who is asked with which role"
    )


def _add_namespace(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--namespace", action="append", default=[], metavar="DIR", help=what)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return int(text)


def _positive(text: str) -> float:
    if not 0 < (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _not_negative(text: str) -> float:
    if not 0 <= (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def _number(text: str) -> float:
    """NaN, which is in no range, for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
