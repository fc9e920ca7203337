"""`tiering stat`: what lies under a root, and how files under it are read and written here."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from tiering import maintenance
from tiering.cli import exits, words
from tiering.clock import UnixClock
from tiering.maintenance import Mount, NamespaceSurvey
from tiering.tiers.disk.diskio import Direct

_TITLES = ("model", "digest", "layout", "ranks", "chunks", "size", "oldest", "newest")
_DISK_TITLES = ("temporary", "quarantined")


def run(arguments: argparse.Namespace) -> int:
    root = Path(arguments.root)
    maintenance.require_root(root)
    namespaces = maintenance.survey_root(root)
    direct, trouble = _direct(root)
    mount, engines = maintenance.mount_of(root), maintenance.io_engines()
    if arguments.json:
        words.print_json(_as_json(root, namespaces, direct, mount, engines))
        return exits.OK
    means = trouble if direct is None else f"I/O {direct}"
    print(f"{root}: {held(namespaces)}; {means}")
    for line in _where(mount, sum(each.disk_bytes for each in namespaces), engines):
        print(line)
    print_namespaces(namespaces, on_disk=True)
    return exits.OK


def held(namespaces: list[NamespaceSurvey]) -> str:
    """How many namespaces and chunks there are, and what they take."""
    chunks, size = sum(each.chunks for each in namespaces), sum(each.bytes for each in namespaces)
    there = f"{words.count(len(namespaces), 'namespace')}, {words.count(chunks, 'chunk')}"
    return f"{there}, {words.size(size)}"


def print_namespaces(namespaces: list[NamespaceSurvey], *, on_disk: bool) -> None:
    """One line for each, and what could not be looked into."""
    if namespaces:
        now = UnixClock().now()
        titles = _TITLES + _DISK_TITLES if on_disk else _TITLES
        words.print_table([titles, *(_row(each, now)[: len(titles)] for each in namespaces)])
    elif on_disk:
        print("no engine has opened a tier here yet, or it is not the root_dir of an fs tier")
    for problem in (problem for each in namespaces for problem in each.problems):
        print(f"not looked into: {words.printable(problem)}")


def told(found: NamespaceSurvey) -> dict[str, object]:
    """A namespace for JSON, which cannot hold every name that a directory can have."""
    names = {"directory": words.printable(found.directory), "model": words.printable(found.model)}
    problems = [words.printable(problem) for problem in found.problems]
    return {**dataclasses.asdict(found), **names, "problems": problems}


def _where(mount: Mount, disk_bytes: int, engines: dict[str, str]) -> list[str]:
    kind = mount.kind or "unknown"
    free = f"{words.size(mount.free_bytes)} free of {words.size(mount.total_bytes)}"
    keeps = "one manifest for all engines" if mount.shares_manifest else "each engine keeps its own"
    works = [engine for engine, why_not in engines.items() if not why_not]
    lines = [
        f"file system {kind}: {words.size(disk_bytes)} taken, {free}; {keeps}",
        f"I/O engines: {', '.join(works)}; auto takes {works[0]}",
    ]
    return lines + [f"  not {engine}: {why_not}" for engine, why_not in engines.items() if why_not]


def _as_json(
    root: Path,
    namespaces: list[NamespaceSurvey],
    direct: Direct | None,
    mount: Mount,
    engines: dict[str, str],
) -> dict[str, object]:
    works = [engine for engine, why_not in engines.items() if not why_not]
    return {
        "root": words.printable(str(root)),
        "io_path": None if direct is None else str(direct),
        "direct": None if direct is None else dataclasses.asdict(direct),
        "io_engine": works[0],
        "io_engines": {name: {"works": not why, "reason": why} for name, why in engines.items()},
        "file_system": mount.kind,
        "manifest": "shared" if mount.shares_manifest else "in memory",
        "free_bytes": mount.free_bytes,
        "total_bytes": mount.total_bytes,
        "chunks": sum(each.chunks for each in namespaces),
        "bytes": sum(each.bytes for each in namespaces),
        "disk_bytes": sum(each.disk_bytes for each in namespaces),
        "namespaces": [told(each) for each in namespaces],
    }


def _row(found: NamespaceSurvey, now: float) -> tuple[str, ...]:
    return (
        words.printable(found.model),
        found.digest,
        "+".join(found.layouts) or "-",
        str(len(found.ranks)),
        str(found.chunks),
        words.size(found.bytes),
        words.age(now, found.oldest_mtime_seconds),
        words.age(now, found.newest_mtime_seconds),
        str(found.temp_files),
        str(found.quarantined),
    )


def _direct(root: Path) -> tuple[Direct | None, str]:
    """How files under `root` are read and written; None, and why, where nothing can be written."""
    try:
        return maintenance.probe_io_path(root), ""
    except OSError as error:
        return None, f"cannot be written to ({error.strerror})"
