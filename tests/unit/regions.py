"""A small region, opened here or in a child process that does as it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiering.layout import RowLayout
from tiering.tiers.host import Region, region_name

PAGE = 4096
LAYOUT = RowLayout(share_bytes=1000, ranks=4)  # rows of one page
CAPACITY = 4 * PAGE  # the header and three rows
NAME = region_name("test")
SECONDS = 60.0  # far above what any wait here takes

# Opens the region as one rank, says so, and obeys what it is told on standard input. With `at`,
# the `call`-th call of a function first (or afterwards) kills the process, or holds it.
CHILD = """
import importlib, json, logging, os, signal, sys, threading
from pathlib import Path
from tiering.layout import RowLayout
from tiering.tiers import host, hostfile

args = json.loads(sys.argv[1])
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
hostfile._BUILD_STEP_BYTES = 4096

def say(word):
    print(word, flush=True)

def stop():
    if args["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    say("held")
    sys.stdin.readline()

if args["at"]:
    owner = Path if args["at"][0] == "Path" else importlib.import_module(args["at"][0])
    _, function, call, when = args["at"]
    real, calls, counting = getattr(owner, function), 0, threading.Lock()
    def patched(*given, **named):
        global calls
        with counting:
            calls += 1
            number = calls
        if number == call and when == "before":
            stop()
        result = real(*given, **named)
        if number == call and when == "after":
            stop()
        return result
    setattr(owner, function, patched)

layout = RowLayout(args["share_bytes"], args["ranks"])
region = host.Region.open(args["name"], layout, args["capacity"], Path(args["directory"]))
if args["rank"] is not None:
    region.share(args["rank"])[:] = args["rank"] + 1
    region.announce(args["rank"], bytes([args["rank"]]) * 32)
say("open")
for line in sys.stdin:
    getattr(region, line.strip())()
    say("done")
"""


class Child:
    def __init__(self, directory: Path, **changed: Any) -> None:
        args = {
            "name": NAME,
            "directory": str(directory),
            "capacity": CAPACITY,
            "share_bytes": LAYOUT.share_bytes,
            "ranks": LAYOUT.ranks,
            "rank": None,
            "at": None,
            "kill": False,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(args | changed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        said = self.process.stdout.readline().strip()
        assert said == word, self.finish()

    def tell(self, method: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(method + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.finish()

    def finish(self) -> str:
        """Ends it by the end of its input; gives what it logged."""
        return self.process.communicate(timeout=SECONDS)[1]


def open_here(directory: Path, name: str = NAME, **changed: Any) -> Region:
    arguments: dict[str, Any] = {"layout": LAYOUT, "capacity_bytes": CAPACITY} | changed
    return Region.open(name, directory=directory, **arguments)


def free_bytes(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize
