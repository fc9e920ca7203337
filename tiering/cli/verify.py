"""`tiering verify`: check every chunk under a root, and say what is damaged."""

from __future__ import annotations

import argparse
from pathlib import Path

from tiering import maintenance
from tiering.cli import exits, roots, words
from tiering.cli.progress import Progress
from tiering.clock import MonotonicClock
from tiering.maintenance import Finding, ScrubReport

_SEGMENTS_STAY = (
    "damage in segments is only reported: the slots are their engine's, which takes a damaged one "
    "out of use when it reads it"
)


_INSTEAD = (
    "nothing has to be done: engines check each chunk that they load, delete a damaged one and "
    "count it as damaged_<cause>"
)


def run(arguments: argparse.Namespace) -> int:
    roots.refuse_bucket("verify", arguments.root, _INSTEAD)
    root = Path(arguments.root)
    maintenance.require_root(root)
    scrub = maintenance.open_scrub(
        root, arguments.namespace, arguments.max_mb_per_second, arguments.quarantine
    )
    interrupted = False
    clock = MonotonicClock()
    began = clock.now()
    try:
        with Progress("verifying", "chunks", scrub.count(), clock) as progress:
            scrub.run(lambda report: progress.show(report.checked, _note(report)))
    except KeyboardInterrupt:
        interrupted = True
    report, seconds = scrub.report, clock.now() - began
    if arguments.json:
        words.print_json(_as_json(root, report, seconds, arguments.quarantine, interrupted))
    else:
        _print(root, report, seconds, arguments.quarantine, interrupted)
    if interrupted:
        return exits.INTERRUPTED
    if report.damaged:
        return exits.DAMAGED
    return exits.FAILED if report.unreadable or report.skipped else exits.OK


def _note(report: ScrubReport) -> str:
    damaged = report.damaged.total()
    return f"{words.size(report.checked_bytes)}, {damaged} damaged"


def _print(
    root: Path, report: ScrubReport, seconds: float, quarantine: bool, interrupted: bool
) -> None:
    ended = "interrupted" if interrupted else f"{seconds:.1f} s"
    checked = f"{words.count(report.checked, 'chunk')} checked"
    print(f"{root}: {checked}, {words.size(report.checked_bytes)}; {ended}")
    rows = [
        ("good", report.good, ""),
        *((f"damaged: {cause}", n, "") for cause, n in sorted(report.damaged.items())),
        ("vanished", report.vanished, "evicted or replaced meanwhile"),
        ("stale", report.stale, "booked and never written; a miss"),
        ("unreadable", report.unreadable, "an I/O error; left as it is"),
        ("directories left out", report.skipped, ""),
    ]
    shown = [(name, str(n), why) for name, n, why in rows if n or name == "good"]
    words.print_table(shown)
    damaged = report.damaged.total()
    _print_findings("damaged", damaged, report.findings)
    _print_findings("not checked", report.unreadable + report.skipped, report.troubles)
    if quarantine and damaged:
        print(f"{words.count(report.quarantined, 'file')} moved to quarantine")
        if report.quarantined < damaged:
            print(_SEGMENTS_STAY)


def _print_findings(what: str, total: int, findings: list[Finding]) -> None:
    if not findings:
        return
    first = f", the first {len(findings)} of {total}" if len(findings) < total else ""
    print(f"{what}{first}:")
    for where, _, reason in findings:
        print(f"  {words.printable(where)}: {words.printable(reason)}")


def _as_json(
    root: Path, report: ScrubReport, seconds: float, quarantine: bool, interrupted: bool
) -> dict[str, object]:
    return {
        "root": words.printable(str(root)),
        "interrupted": interrupted,
        "seconds": round(seconds, 3),
        "total": report.total,
        "checked": report.checked,
        "checked_bytes": report.checked_bytes,
        "good": report.good,
        "vanished": report.vanished,
        "stale": report.stale,
        "unreadable": report.unreadable,
        "skipped": report.skipped,
        "damaged": dict(report.damaged),
        "quarantine": quarantine,
        "quarantined": report.quarantined,
        "findings": list(map(_finding, report.findings)),
        "not_checked": list(map(_finding, report.troubles)),
    }


def _finding(finding: Finding) -> dict[str, str]:
    return {name: words.printable(text) for name, text in finding._asdict().items()}
