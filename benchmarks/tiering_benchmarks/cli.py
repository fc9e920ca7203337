"""The command `tiering-bench`: finds the subcommand and turns failure into one line and a code.

A subcommand lives in a module of its own, which adds itself through `add_command`. Exit codes:
0 all well, 1 it ran and something is not as it should be, 2 it could not run as asked.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tiering.errors import ConfigError, TieringError
from tiering_benchmarks import (
    announce,
    control,
    demo,
    device,
    index,
    loop,
    models,
    serve,
    tiers,
)

COMMANDS = (announce, control, demo, device, index, loop, models, serve, tiers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; `argv` is without the program's name."""
    parser = argparse.ArgumentParser(
        prog="tiering-bench", description="Measure kv-tiering, alone and under a real vLLM."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_command(commands)
    args = parser.parse_args(argv)
    # As an exception, so that servers that were started are stopped on the way out.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        if isinstance(figures := getattr(args, "json", None), str | Path):
            _require_place_for(Path(figures))
        code: int = args.run(args)
    except TieringError as error:
        print(f"tiering-bench: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        # What is measured against, or served, is in no extra that a user has to have.
        missing = f"needs a package that is not installed: {error.name}"
        remedy = "run it in the .venv of a checkout, which make sets up with all of them"
        print(f"tiering-bench: {missing}; {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


def _require_place_for(file: Path) -> None:
    """Before minutes are spent on what could not be kept. ConfigError."""
    if file.is_dir() or not os.access(file.absolute().parent, os.W_OK | os.X_OK):
        remedy = "name a file in a directory that is there and can be written to"
        raise ConfigError("--json", str(file), "cannot be written", remedy)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
