"""The command `tiering-bench model`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tiering.errors import ConfigError
from tiering_benchmarks.models.making import MODELS, make_model


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tiering-bench model` to the command line."""
    parser = commands.add_parser("model", help="make a tiny model that vLLM can serve")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where its folder shall be")
    parser.add_argument("--size", choices=sorted(MODELS), default="tiny")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        made = make_model(args.directory, args.size)
    except OSError as error:
        told, remedy = error.strerror or str(error), "name a directory that can be written to"
        raise ConfigError("DIR", str(args.directory), told, remedy) from error
    print(made)
    return 0
