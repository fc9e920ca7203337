"""A program in a storm of writes that is killed in the middle of it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap


def killed_storm(
    program: str, first: int, batches_max: int, chance: random.Random, *arguments: object
) -> int:
    """Run `program`, which says that it is ready and then, batch by batch, below which number all
    keys from `first` on are stored; kill it before its batch number `batches_max`, at no particular
    point. The last number that it said."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        for _ in range(chance.randrange(batches_max)):
            first = int(child.stdout.readline())
        for _ in range(chance.randrange(20_000)):
            pass  # somewhere between this acknowledgement and the next one
        child.kill()
        rest = child.stdout.read().split()
        child.communicate()
    return int(rest[-1]) if rest else first
