"""What the samples of `tiering-bench tiers` say: tables, ratios, and which aims are met.

Pure, but for `machine`. Ratios are taken repeat by repeat, where both sides met the same disk,
and only then the median. A speed above 1 is better; a share of CPU time below 1 is.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from tiering.layout import ALIGNMENT
from tiering_benchmarks.control import Spread, shown
from tiering_benchmarks.tiers_run import COLD, EXISTS, OPERATIONS, WARM, WRITE, Cost, Samples
from tiering_benchmarks.tiers_sides import FILES, FIO, SEGMENTS, VLLM
from tiering_kernels.engines import open_engine

GB = 10**9
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
SMALL_BYTES = 64 << 10

Figure = Literal["speed", "CPU"]


@dataclass(frozen=True, slots=True)
class Sized:
    """The samples of one chunk size, and how much each pass of them did."""

    chunk_bytes: int
    payload_bytes: int
    exists_keys: int
    samples: Samples

    def ratio(self, operation: str, side: str, against: str, figure: Figure) -> Spread | None:
        """`side`'s figure over that of `against`; None where one of them was not measured."""
        ours, theirs = (self.samples[operation].get(name) for name in (side, against))
        if not ours or not theirs:
            return None
        pairs = list(zip(ours, theirs, strict=True))
        if figure == "speed":
            return Spread.of([their.seconds / our.seconds for our, their in pairs])
        # So little that the kernel's clock did not see it.
        if not all(their.cpu_seconds for _, their in pairs):
            return None
        return Spread.of([our.cpu_seconds / their.cpu_seconds for our, their in pairs])

    def speed(self, operation: str, costs: Sequence[Cost]) -> Spread:
        """GB/s; of `exists`, microseconds a key."""
        if operation == EXISTS:
            return Spread.of([cost.seconds * 1e6 / self.exists_keys for cost in costs])
        return Spread.of([self.payload_bytes / GB / cost.seconds for cost in costs])

    def cpu(self, operation: str, costs: Sequence[Cost]) -> Spread:
        """CPU seconds a GB; of `exists`, CPU microseconds a key."""
        if operation == EXISTS:
            return Spread.of([cost.cpu_seconds * 1e6 / self.exists_keys for cost in costs])
        return Spread.of([cost.cpu_seconds * GB / self.payload_bytes for cost in costs])


@dataclass(frozen=True, slots=True)
class Aim:
    """Of one side's median ratio at every size: at least `limit` for speed, at most for CPU."""

    side: str
    against: str
    figure: Figure
    operations: tuple[str, ...]
    limit: float
    small_limit: float | None = None

    def __str__(self) -> str:
        many = "at least" if self.figure == "speed" else "at most"
        small = f", {self.small_limit:g} at 64 KiB" if self.small_limit else ""
        what = f"{many} {self.limit:.2g} x {self.against}'s {self.figure}{small}"
        return f"{self.side}, {' and '.join(self.operations)}: {what}"

    def judged(self, sizes: Sequence[Sized]) -> Iterator[tuple[str, float, bool]]:
        """Where, which ratio, and whether that is enough; nothing for what was not measured."""
        for sized in sizes:
            is_small = sized.chunk_bytes <= SMALL_BYTES
            limit = self.small_limit if self.small_limit and is_small else self.limit
            for operation in self.operations:
                ratio = sized.ratio(operation, self.side, self.against, self.figure)
                if ratio is not None:
                    above = ratio.median >= limit
                    below = ratio.median <= limit
                    met = above if self.figure == "speed" else below
                    yield f"{size_name(sized.chunk_bytes)} {operation}", ratio.median, met


AIMS = (
    Aim(SEGMENTS, FIO, "speed", (WRITE, COLD), 0.9),
    Aim(SEGMENTS, VLLM, "speed", (WRITE,), 2),
    Aim(SEGMENTS, VLLM, "speed", (COLD,), 1, small_limit=1.5),
    Aim(SEGMENTS, VLLM, "CPU", (WRITE, COLD), 1 / 3),
    Aim(FILES, VLLM, "speed", (WRITE, COLD, WARM), 1),
)


def table(sized: Sized) -> str:
    """Lines of text; a median, and its lowest and highest in brackets."""
    titles = ("GB/s", "CPU s/GB", "of fio", "of vLLM", "CPU of vLLM's")
    ratios: tuple[tuple[str, Figure], ...] = ((FIO, "speed"), (VLLM, "speed"), (VLLM, "CPU"))
    lines = [_line(size_name(sized.chunk_bytes), "", titles)]
    for operation in OPERATIONS:
        name = f"{operation}, us a key" if operation == EXISTS else operation
        for side, costs in sized.samples[operation].items():
            figures = (
                sized.speed(operation, costs),
                sized.cpu(operation, costs),
                *(
                    None if side == against else sized.ratio(operation, side, against, figure)
                    for against, figure in ratios
                ),
            )
            lines.append(_line(name, side, [shown(figure) for figure in figures]))
            name = ""
    return "\n".join(lines)


def _line(operation: str, side: str, cells: Sequence[str]) -> str:
    return f"{operation:<18} {side:<9}" + "".join(f" {cell:<20}" for cell in cells).rstrip()


def verdicts(sizes: Sequence[Sized]) -> list[str]:
    """A line for each aim: met, not met and where, or not measured."""
    return [_verdict(aim, sizes) for aim in AIMS]


def _verdict(aim: Aim, sizes: Sequence[Sized]) -> str:
    judged = list(aim.judged(sizes))
    if not judged:
        return f"not measured  {aim}"
    missed = [f"{ratio:.2f} at {where}" for where, ratio, met in judged if not met]
    return f"{'not met' if missed else 'met':<13} {aim}" + "".join(
        f"{': ' if at == 0 else ', '}{miss}" for at, miss in enumerate(missed)
    )


def size_name(size_bytes: int) -> str:
    """Such as 64 KiB."""
    for unit, factor in _UNITS.items():
        if size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} bytes"


def size_bytes(text: str) -> int | None:
    """The bytes that `text` such as 64KiB says; None where it says none."""
    for unit, factor in {**_UNITS, "": 1}.items():
        if text.endswith(unit):
            number = text.removesuffix(unit).strip()
            return int(number) * factor if number.isascii() and number.isdigit() else None
    return None


def is_chunk_size(size: int | None) -> bool:
    """Direct I/O, fio's above all, moves whole pages."""
    return size is not None and size > 0 and size % ALIGNMENT == 0


def machine(directory: Path) -> dict[str, str]:
    """What the figures depend on."""
    return {
        "cores": f"{len(os.sched_getaffinity(0))}, {_processor()}",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "kernel": platform.release(),
        "file system": _file_system(directory),
        "I/O engine": open_engine().engine,
        "versions": f"Python {platform.python_version()}, kv-tiering {_version('kv-tiering')}, "
        f"vLLM {_version('vllm')}",
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(directory: Path) -> str:
    """Kind, device and options of what `directory` is on."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        if before.split()[2] == wanted:
            kind, source, *_ = after.split()
            return f"{kind} on {source} ({before.split()[5]})"
    return "unknown"


def raw(sizes: Sequence[Sized]) -> Mapping[str, object]:
    """The samples as they are, for programs: by size, operation and side, a cost a repeat."""
    return {
        size_name(sized.chunk_bytes): {
            "chunk_bytes": sized.chunk_bytes,
            "payload_bytes": sized.payload_bytes,
            "exists_keys": sized.exists_keys,
            "costs": {
                operation: {
                    side: [cost._asdict() for cost in costs] for side, costs in by_side.items()
                }
                for operation, by_side in sized.samples.items()
            },
        }
        for sized in sizes
    }
