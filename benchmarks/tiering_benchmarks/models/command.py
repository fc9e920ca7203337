"""The command `tiering-bench model`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tiering_benchmarks.models.making import MODELS, make_model


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tiering-bench model` to the command line."""
    parser = commands.add_parser("model", help="make a tiny model that vLLM can serve")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where its folder shall be")
    parser.add_argument("--size", choices=sorted(MODELS), default="tiny")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    print(make_model(args.directory, args.size))
    return 0
