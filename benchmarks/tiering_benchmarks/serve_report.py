"""What the samples of `tiering-bench serve` say: tables for people, raw figures for programs.

Pure. Ratios are taken repeat by repeat, between runs that were minutes apart on the same machine,
and only then the median.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from tiering_benchmarks.control import Spread
from tiering_benchmarks.serve_run import Sample, Samples
from tiering_benchmarks.serve_sides import NONE, rivals

Figure = Callable[[Sample], float]

FIGURES: Mapping[str, Figure] = {
    "TTFT mean": lambda sample: sample.ttft_mean_seconds,
    "TTFT median": lambda sample: sample.ttft_median_seconds,
    "tokens/s": lambda sample: sample.tokens_per_second,
    "server CPU": lambda sample: sample.cpu_seconds,
}
SHARES: Mapping[str, Figure] = {
    "device hits": lambda sample: sample.share(is_device=True),
    "external hits": lambda sample: sample.share(is_device=False),
}
SAME = "same answers"


def ratio(figure: Figure, ours: Sequence[Sample], theirs: Sequence[Sample]) -> Spread:
    """`ours` over `theirs`, which have one sample a repeat each."""
    return Spread.of([figure(our) / figure(their) for our, their in zip(ours, theirs, strict=True)])


def same_answers(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float:
    """The share of answers that are the same text. Where prefixes were found, sums were taken in
    another order, so a few may differ without any connector, too."""
    pairs = [
        one == other
        for our, their in zip(ours, theirs, strict=True)
        for one, other in zip(our.answers, their.answers, strict=True)
    ]
    return sum(pairs) / len(pairs)


def figures(samples: Samples) -> str:
    """Medians of each side: seconds, tokens a second, CPU seconds, shares of the prompt tokens."""
    lines = [_line("", [*FIGURES, *SHARES, SAME])]
    for name, runs in samples.items():
        cells = [
            f"{Spread.of([figure(run) for run in runs]).median:.2f}" for figure in FIGURES.values()
        ]
        cells += [
            f"{Spread.of([share(run) for run in runs]).median:.1%}" for share in SHARES.values()
        ]
        reference = samples.get(NONE)
        cells.append("-" if not reference else f"{same_answers(runs, reference):.0%}")
        lines.append(_line(name, cells))
    return "\n".join(lines)


def ratios(samples: Samples) -> str:
    """Of each pair of rivals, each figure's ratio: median, and lowest and highest in brackets."""
    lines = [_line("", list(FIGURES))]
    for ours, theirs in rivals(list(samples)):
        spreads = [ratio(figure, samples[ours], samples[theirs]) for figure in FIGURES.values()]
        cells = [each.shown() for each in spreads]
        lines.append(_line(f"{ours} / {theirs}", cells))
    return "\n".join(lines)


def raw(samples: Samples) -> Mapping[str, object]:
    """The samples as they are, a list a side; texts of answers excepted."""
    return {
        name: [
            {key: value for key, value in asdict(run).items() if key != "answers"} for run in runs
        ]
        for name, runs in samples.items()
    }


def _line(name: str, cells: Sequence[str]) -> str:
    return (f"{name:<32}" + "".join(f" {cell:<18}" for cell in cells)).rstrip()
