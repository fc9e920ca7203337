"""fio as a side of `tiering-bench tiers`: what the disk gives to who only moves blocks.

One preallocated file of as many blocks as a pass has chunks, every block written before; each
pass overwrites or reads all of them once, in random order, with O_DIRECT through io_uring, and as
many under way as the other sides have. Its buffers are registered, so that it pays for no first
touch of memory. Times and CPU time are fio's own, without its start; it has no names to look up.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tiering_benchmarks.tiers_run import Batch, Cost, Plan, SideMissing, WrongAnswer

_TIMEOUT_SECONDS = 300


class Fio:
    """A `tiering_benchmarks.tiers_run.Side`; SideMissing where fio or io_uring is not there."""

    name = "fio"
    passes_to_fill = 0
    keeps_bytes = False

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.directory = directory
        found = shutil.which("fio")
        if found is None:
            raise SideMissing("fio is not installed; apt-get install fio, or dnf install fio")
        self._program = found
        self._plan = plan
        self._seeds = itertools.count(1)
        self._fixed = ["--fixedbufs=1"]
        # Overwriting is measured, so the first writing is not.
        try:
            self._run("write")
        except WrongAnswer:
            # Registered buffers count as locked memory, which a user may not have enough of.
            self._fixed = []
            try:
                self._run("write")
            except WrongAnswer as error:
                raise SideMissing(str(error)) from None

    def about(self) -> str:
        depth = self._plan.batch * self._plan.jobs
        buffers = "registered buffers" if self._fixed else "plain buffers"
        return f"{version(self._program)}: direct, io_uring, depth {depth}, {buffers}"

    def write(self, batches: Sequence[Batch]) -> Cost:
        return self._run("randwrite")

    def read(self, batches: Sequence[Batch]) -> Cost:
        return self._run("randread")

    def exists(self, batches: Sequence[Sequence[bytes]], expected: Sequence[bool]) -> None:
        return None

    def make_room(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _run(self, pattern: str) -> Cost:
        plan = self._plan
        command = [
            *(self._program, "--name=bench", f"--filename={self.directory / 'blocks'}"),
            *("--direct=1", "--ioengine=io_uring", f"--iodepth={plan.batch * plan.jobs}"),
            *(f"--rw={pattern}", f"--bs={plan.chunk_bytes}", f"--size={plan.payload_bytes}"),
            *("--allrandrepeat=0", f"--randseed={next(self._seeds)}"),
            # A thread and not a child: who stops fio then stops all of it.
            *("--thread", "--output-format=json", *self._fixed),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise WrongAnswer(f"fio took more than {_TIMEOUT_SECONDS} s") from None
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise WrongAnswer(f"fio failed: {lines[0] if lines else done.returncode}")
        return self._cost(done.stdout, "read" if pattern == "randread" else "write")

    def _cost(self, output: str, direction: str) -> Cost:
        # Before the JSON there may be a line of notes.
        job = json.loads(output[output.index("{") :])["jobs"][0]
        moved = job[direction]
        if moved["io_bytes"] != self._plan.payload_bytes:
            told = f"{moved['io_bytes']} of {self._plan.payload_bytes} bytes"
            raise WrongAnswer(f"fio moved {told}")
        cpu_share = (job["usr_cpu"] + job["sys_cpu"]) / 100
        seconds = max(1, moved["runtime"]) / 1000
        return Cost(seconds, cpu_share * job["job_runtime"] / 1000)


def version(program: str) -> str:
    """Such as `fio-3.33`."""
    command = [program, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() or "fio"
