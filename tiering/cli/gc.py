"""`tiering gc`: say what no engine uses any more under a root, and with --delete remove it."""

from __future__ import annotations

import argparse
from pathlib import Path

from tiering import maintenance
from tiering.cli import exits, roots, words
from tiering.cli.progress import Progress
from tiering.clock import MonotonicClock, UnixClock
from tiering.maintenance import Candidate, Plan

_TITLES = ("namespace", "layout", "chunks", "size", "last used", "verdict")


_INSTEAD = (
    "give it a lifecycle rule, or remove a namespace that `tiering stat` shows, all folders of it, "
    "with the store's own tools"
)


def run(arguments: argparse.Namespace) -> int:
    roots.refuse_bucket("gc", arguments.root, _INSTEAD)
    root = Path(arguments.root)
    maintenance.require_root(root)
    collector = maintenance.open_collector(root, arguments.orphaned_days, arguments.namespace)
    plan = collector.plan()
    if arguments.delete:
        with Progress("removing", "directories", 0, MonotonicClock()) as progress:
            collector.carry_out(plan, progress.show_of)
    if arguments.json:
        words.print_json(_as_json(root, plan, arguments.delete))
    else:
        _print(root, plan, arguments.delete)
    failed = plan.problems or any(each.outcome == "failed" for each in plan.namespaces)
    return exits.FAILED if failed else exits.OK


def _print(root: Path, plan: Plan, deleted: bool) -> None:
    done, end = ("removed", "") if deleted else ("would remove", "; --delete does it")
    there = words.count(len(plan.namespaces), "namespace")
    going = _going(plan)
    size = words.size(sum(each.contents.bytes for each in going))
    print(f"{root}: {there}; {done} {len(going)} of them, {size}{end}")
    if plan.namespaces:
        now = UnixClock().now()
        words.print_table([_TITLES, *(_row(each, now) for each in plan.namespaces)])
    for noun, found in (
        ("dead temporary file", plan.temp_files),
        ("interrupted removal", plan.left_overs),
        ("empty directory", plan.empty_directories),
    ):
        if found:
            print(f"{done}: {words.count(len(found), noun)}")
    for problem in plan.problems:
        print(f"not removed: {words.printable(problem)}")


def _going(plan: Plan) -> list[Candidate]:
    return [each for each in plan.namespaces if each.outcome in ("would be removed", "removed")]


def _row(candidate: Candidate, now: float) -> tuple[str, ...]:
    verdict = candidate.outcome
    reasons = [why for why in (candidate.why, candidate.refusal) if why]
    return (
        words.printable(candidate.dirs.directory),
        "+".join(candidate.dirs.layouts) or "-",
        str(candidate.chunks),
        words.size(candidate.contents.bytes),
        words.age(now, candidate.last_used_seconds),
        words.printable(f"{verdict} ({', '.join(reasons)})" if reasons else verdict),
    )


def _as_json(root: Path, plan: Plan, deleted: bool) -> dict[str, object]:
    return {
        "root": words.printable(str(root)),
        "deleted": deleted,
        "namespaces": [
            {
                "directory": words.printable(each.dirs.directory),
                "model": words.printable(each.model),
                "layouts": list(each.dirs.layouts),
                "chunks": each.chunks,
                "bytes": each.contents.bytes,
                "last_used_seconds": each.last_used_seconds,
                "outcome": each.outcome,
                "why": each.why,
                "refusal": words.printable(each.refusal),
            }
            for each in plan.namespaces
        ],
        "temp_files": len(plan.temp_files),
        "empty_directories": len(plan.empty_directories),
        "left_overs": len(plan.left_overs),
        "problems": list(map(words.printable, plan.problems)),
    }
