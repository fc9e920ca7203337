"""What `tiering-bench device` says: a table, which aims are met, and the same as JSON.

Pure. Speeds are medians; shares are of one large copy of pinned memory in the same run, those of
both directions at once of two large ones at once. A runtime that is emulated has no speeds, and
nothing here gives it any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tiering_benchmarks.device_run import (
    BATCH,
    BOTH,
    KERNEL,
    KIB,
    LARGE,
    LOAD,
    LOOP,
    STORE,
    Samples,
    fragment_sizes,
    percentile,
)
from tiering_benchmarks.device_wakeups import IN_LOOP, WakeUps

GB = 1e9
THRESHOLD_BYTES = 28 * KIB

_BATCH_FROM_BYTES = 512 * KIB
_SHARE_MIN, _SHARE_OF_BOTH_MIN = 0.95, 0.9
_LATENCY_SECONDS_MAX = 100e-6
_SLOWED_MAX = 0.03


@dataclass(frozen=True, slots=True)
class Aim:
    """What was to be reached, what was, and whether that is enough; None: it was not measured."""

    what: str
    found: str
    is_met: bool | None


def seconds(samples: Samples, size: int, direction: str, way: str) -> float | None:
    """The median of a pass; None where there was none."""
    found = samples.of_size.get(size, {}).get((direction, way))
    return median(found) if found else None


def speed(samples: Samples, size: int, direction: str, way: str) -> float | None:
    """GB/s, of both directions together where both were copied."""
    taken = seconds(samples, size, direction, way)
    moved = samples.plan.total_bytes * (2 if direction == BOTH else 1)
    return moved / GB / taken if taken else None


def share(samples: Samples, size: int, direction: str, way: str) -> float | None:
    """Of the speed of the large copy."""
    own, large = speed(samples, size, direction, way), speed(samples, 0, direction, LARGE)
    return own / large if own and large else None


def crossover(samples: Samples) -> int | None:
    """The smallest fragments that a batch loads as fast as the kernel does, or the largest that
    both were measured at; the value for `kernel_below_bytes`. None where there are none."""
    largest = None
    for size in fragment_sizes(samples):
        batch, kernel = (seconds(samples, size, LOAD, way) for way in (BATCH, KERNEL))
        if batch is None or kernel is None:
            continue
        largest = size
        if batch <= kernel:
            return size
    return largest


def aims(samples: Samples) -> list[Aim]:
    large = [size for size in fragment_sizes(samples) if size >= _BATCH_FROM_BYTES]
    shares = [share(samples, size, way, BATCH) for size in large for way in (STORE, LOAD)]
    both = [share(samples, size, BOTH, BATCH) for size in large]
    return [
        _least("a batch from 512 KiB up, of one large copy", shares, _SHARE_MIN),
        _least("the same, both directions at once", both, _SHARE_OF_BOTH_MIN),
        _kernel_aim(samples),
        _latency_aim(samples),
        _product_aim(samples),
    ]


def _least(what: str, shares: Sequence[float | None], limit: float) -> Aim:
    known = [each for each in shares if each is not None]
    if not known:
        return Aim(f"{what}: {limit:g} or more", "not measured", None)
    return Aim(f"{what}: {limit:g} or more", f"{min(known):.3f}", min(known) >= limit)


def _kernel_aim(samples: Samples) -> Aim:
    what = f"loads below {THRESHOLD_BYTES // KIB} KiB: the kernel ahead of a batch"
    ratios = []
    for size in fragment_sizes(samples):
        batch, kernel = (seconds(samples, size, LOAD, way) for way in (BATCH, KERNEL))
        if size < THRESHOLD_BYTES and batch is not None and kernel is not None:
            ratios.append(batch / kernel)
    if not ratios:
        return Aim(what, "not measured", None)
    return Aim(what, f"{min(ratios):.2f} times as fast", min(ratios) > 1)


def _latency_aim(samples: Samples) -> Aim:
    what = f"a future after its event: {_LATENCY_SECONDS_MAX * 1e6:g} us or less at the median"
    found = samples.latencies.get(IN_LOOP)
    if not found:
        return Aim(what, "not measured", None)
    middle, late = percentile(found, 0.5), percentile(found, 0.99)
    told = f"{middle * 1e6:.0f} us, p99 {late * 1e6:.0f} us"
    return Aim(what, told, middle <= _LATENCY_SECONDS_MAX)


def _product_aim(samples: Samples) -> Aim:
    what = f"a matrix product beside copies: slowed by {_SLOWED_MAX:.0%} or less"
    slowed = slowdown(samples)
    if slowed is None:
        return Aim(what, "not measured", None)
    return Aim(what, f"{slowed:+.1%}", slowed <= _SLOWED_MAX)


def slowdown(samples: Samples) -> float | None:
    alone, beside = (samples.products.get(name) for name in ("alone", "beside copies"))
    return median(beside) / median(alone) - 1 if alone and beside else None


def table(samples: Samples) -> Iterator[str]:
    """GB/s, and in brackets the share of the large copy; sizes down, directions and ways across."""
    columns = [(d, w) for d in (STORE, LOAD, BOTH) for w in (BATCH, LOOP, KERNEL)]
    columns.remove((BOTH, KERNEL))
    yield "GB/s (share of one large copy)"
    yield "fragments".ljust(10) + "".join(f"{d} {w}".rjust(14) for d, w in columns)
    for size in fragment_sizes(samples):
        cells = []
        for direction, way in columns:
            own, part = (f(samples, size, direction, way) for f in (speed, share))
            cells.append(f"{own:.1f} ({part:.2f})" if own and part else "-")
        yield f"{size // KIB} KiB".ljust(10) + "".join(cell.rjust(14) for cell in cells)
    large = (f"{d} {speed(samples, 0, d, LARGE) or 0:.1f}" for d in (STORE, LOAD, BOTH))
    yield f"one large copy, GB/s: {', '.join(large)}"
    found = crossover(samples)
    if found is not None:
        yield f"the kernel is ahead of a batch below {found} bytes: kernel_below_bytes"


def checked(samples: Samples) -> Iterator[str]:
    """Of an emulated runtime: what was copied and compared."""
    yield "emulated runtime, no speeds: the bytes of every way and size were compared"
    for size in fragment_sizes(samples):
        ways = sorted({way for _, way in samples.of_size[size]})
        fragments = samples.plan.total_bytes // size
        yield f"{size // KIB} KiB: {fragments} fragments, stored and loaded by {', '.join(ways)}"
    for way, found in samples.latencies.items():
        yield f"{len(found)} futures of copies were awaited, by {way}"


def latency_lines(samples: Samples) -> Iterator[str]:
    """Of copies, from the end of each until its coroutine went on."""
    for way, found in samples.latencies.items():
        yield f"copy to coroutine, by {way}: {_percentiles(found)}"


def wakeup_lines(wakeups: Mapping[str, WakeUps]) -> Iterator[str]:
    """Of the host's part, with a process in the driver's place."""
    for way, found in wakeups.items():
        cpu = found.cpu_seconds / len(found.latencies) * 1e6
        told = f"{_percentiles(found.latencies)}, {cpu:.0f} us of CPU each"
        yield f"wake-up without a device, by {way}: {told}"


def _percentiles(found: Sequence[float]) -> str:
    told = (f"p{round(part * 100)} {percentile(found, part) * 1e6:.0f} us" for part in (0.5, 0.99))
    return f"{', '.join(told)} of {len(found)}"


def as_json(
    samples: Samples,
    wakeups: Mapping[str, WakeUps],
    machine: Mapping[str, str],
    is_real: bool,
) -> dict[str, Any]:
    """Everything, raw; speeds of a real device only."""
    told: dict[str, Any] = {
        "machine": dict(machine),
        "is_emulated": not is_real,
        "total_bytes": samples.plan.total_bytes,
        "wakeups_without_a_device": {way: asdict(found) for way, found in wakeups.items()},
        "left_out": samples.left_out,
        "fragments": [
            {
                "bytes": size,
                "direction": direction,
                "way": way,
                "passes": len(found),
                **({"seconds": found} if is_real else {}),
            }
            for size, ways in sorted(samples.of_size.items())
            for (direction, way), found in ways.items()
        ],
    }
    if is_real:
        told["latency_seconds"] = samples.latencies
        told["product_seconds"] = samples.products
        told["kernel_below_bytes"] = crossover(samples)
        told["aims"] = [
            {"what": aim.what, "found": aim.found, "is_met": aim.is_met} for aim in aims(samples)
        ]
    return told
