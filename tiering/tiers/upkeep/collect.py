"""`tiering gc`: finds and removes what no engine uses any more under a root.

Plans first, in full, and only then removes. Takes nothing that it does not recognise, follows no
link, leaves no root. A namespace goes by renaming its directories into one of our own, so that
engines see all of it or a miss. Blocking; for a command.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tiering.clock import Clock
from tiering.errors import ConfigError
from tiering.tiers.disk import diskio, temps
from tiering.tiers.files.manifest import Manifest
from tiering.tiers.segments import survey as segment_survey
from tiering.tiers.segments.files import LOCK_NAME, holder_of
from tiering.tiers.upkeep import guest
from tiering.tiers.upkeep.collect_contents import Contents, contents_of, opened_seconds
from tiering.tiers.upkeep.guest import Engine
from tiering.tiers.upkeep.namespaces import NamespaceDirs, chosen, nothing_under, read_config

REMOVED_PREFIX = ".removed-"
# An engine that is just starting has made its directories, and not yet its config.json.
UNNAMED_AGE_SECONDS = 3600.0
# Times of files and of processes come from clocks of different fineness.
_SLACK_SECONDS = 2.0

Progress = Callable[[int, int], None]
"""Called with the directories removed so far, and of how many."""


@dataclass(slots=True)
class Candidate:
    """A namespace. `why` it is to go, "" where it stays; `refusal`: why it stays nevertheless.
    `outcome` is kept, would be removed, removed, refused or failed."""

    dirs: NamespaceDirs
    model: str
    contents: Contents
    chunks: int
    last_used_seconds: float
    why: str = ""
    refusal: str = ""
    outcome: str = "kept"


@dataclass(slots=True)
class Plan:
    """What `carry_out` would do, and afterwards has done. `left_overs` are trees that an earlier
    run had begun to remove; `temp_files` those of dead processes."""

    namespaces: list[Candidate] = field(default_factory=list)
    temp_files: list[Path] = field(default_factory=list)
    left_overs: list[Path] = field(default_factory=list)
    empty_directories: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def going(self) -> list[Candidate]:
        return [each for each in self.namespaces if each.why and not each.refusal]


class Collector:
    """For one run over `root`. `clock` counts from 1970. With `named`, only these namespaces go,
    however old they are; else those not used for `orphaned_seconds`, and what has no owner."""

    def __init__(
        self, root: Path, clock: Clock, orphaned_seconds: float, named: Sequence[str] = ()
    ) -> None:
        self._root = root.absolute()
        self._clock = clock
        self._orphaned_seconds = orphaned_seconds
        self._named = tuple(named)

    def plan(self) -> Plan:
        """Changes nothing. ConfigError where the root cannot be read, has no namespace, or none
        of a name that was given."""
        chosen(self._root, self._named)
        namespaces = chosen(self._root, ())
        left_overs = [] if self._named else list(self._left_overs())
        if not namespaces and not left_overs:
            raise nothing_under(self._root)
        plan = Plan(left_overs=left_overs)
        engines, trouble = self._engines()
        ticks = self._last_ticks(namespaces)
        for dirs in namespaces:
            candidate = self._candidate(dirs, ticks.get(dirs.directory, 0))
            plan.namespaces.append(candidate)
            if candidate.why:
                candidate.refusal = self._refusal(candidate, engines, trouble)
                candidate.outcome = "refused" if candidate.refusal else "would be removed"
            if not self._named and (not candidate.why or candidate.refusal):
                plan.temp_files += self._temp_files(dirs)
                plan.empty_directories += candidate.contents.empty_directories
        return plan

    def carry_out(self, plan: Plan, progress: Progress) -> None:
        """Remove what `plan` says. What cannot be removed is told in `plan`, and stays."""
        trees = list(plan.left_overs)
        for candidate in plan.going:
            try:
                candidate.refusal = self._take_away(candidate, trees)
                candidate.outcome = "refused" if candidate.refusal else "removed"
            except OSError as error:
                candidate.outcome, candidate.refusal = "failed", _told(error)
        parts = [part for tree in trees for top in diskio.children(tree) for part in _parts(top)]
        for done, part in enumerate(parts):
            progress(done, len(parts))
            self._remove(part, plan)
        progress(len(parts), len(parts))
        for tree in trees:
            self._remove(str(tree), plan)
        self._forget([each for each in plan.namespaces if each.outcome == "removed"])
        self._sweep(plan)

    # Planning

    def _candidate(self, dirs: NamespaceDirs, file_tick: int) -> Candidate:
        contents = contents_of(dirs)
        slots, slot_tick = _slots_of(dirs)
        used = max(contents.newest_seconds, file_tick / 1e6, slot_tick / 1e6)
        config = read_config(dirs.config_path)
        candidate = Candidate(
            dirs, str(config.get("model", dirs.model)), contents, contents.chunks + slots, used
        )
        idle = self._clock.now() - used
        if self._named:
            candidate.why = "named" if dirs.directory in self._named else ""
        elif idle > self._orphaned_seconds:
            candidate.why = "orphaned"
        elif not os.path.lexists(dirs.config_path) and idle > UNNAMED_AGE_SECONDS:
            candidate.why = "no config.json"
        return candidate

    def _last_ticks(self, namespaces: Sequence[NamespaceDirs]) -> dict[str, int]:
        """When a chunk in a file of each was last used, as far as the manifest says."""

        def newest(manifest: Manifest) -> dict[str, int]:
            return {
                dirs.directory: max(manifest.last_used(each.name) for each in dirs.ranks.values())
                for dirs in namespaces
                if dirs.ranks
            }

        with contextlib.suppress(OSError, *guest.UNAVAILABLE):
            return guest.ask(self._root, self._clock, newest) or {}
        return {}

    def _engines(self) -> tuple[list[Engine], str]:
        """Who has the root open in layout "files"; why that cannot be known."""
        try:
            return guest.engines(self._root, self._clock), ""
        except (OSError, *guest.UNAVAILABLE) as error:
            return [], str(error)

    def _refusal(self, candidate: Candidate, engines: Sequence[Engine], trouble: str) -> str:
        dirs = candidate.dirs
        if candidate.contents.foreign:
            return f"{candidate.contents.foreign[0]} is no part of it: move that away first"
        for directory in dirs.segments.values():
            with _locked(directory) as holder:
                if holder:
                    return f"process {holder} has it open: stop that first"
        if dirs.segments and not dirs.ranks:
            return ""  # its engine would hold the lock
        if trouble:
            return f"the manifest does not tell whether an engine has it open ({trouble})"
        opened = opened_seconds(dirs)
        for engine in engines:
            if engine.started_seconds <= opened + _SLACK_SECONDS:
                return f"{engine} may have it open: stop that first"
        return ""

    def _temp_files(self, dirs: NamespaceDirs) -> Iterator[Path]:
        now = self._clock.now()
        for directory in (dirs.config_dir, *dirs.staging_dirs):
            yield from temps.abandoned(directory, now)

    def _left_overs(self) -> Iterator[Path]:
        """Trees that a run of this has begun to remove, and nobody is removing."""
        for entry in diskio.children(self._root):
            owner = entry.name.removeprefix(REMOVED_PREFIX)
            if owner == entry.name or not entry.is_dir(follow_symlinks=False):
                continue
            silent = self._clock.now() - entry.stat(follow_symlinks=False).st_mtime
            if temps.is_owner(owner) and temps.is_gone(owner, silent):
                yield Path(entry.path)

    # Removing

    def _take_away(self, candidate: Candidate, trees: list[Path]) -> str:
        """Rename the directories of a namespace out of reach; why it was not done. Raises
        OSError."""
        dirs = candidate.dirs
        with contextlib.ExitStack() as stack:
            for directory in dirs.segments.values():
                if holder := stack.enter_context(_locked(directory)):
                    return f"process {holder} has just opened it"
            if opened_seconds(dirs) > candidate.contents.opened_seconds:
                return "an engine has just opened it"
            aside = self._root / f"{REMOVED_PREFIX}{temps.owner_name()}"
            diskio.make_private_dir(aside)
            trees.append(aside)
            # config.json last: what an interruption leaves can still be told by it.
            for path in dirs.all_directories:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path, aside / path.name)
        return ""

    def _remove(self, path: str, plan: Plan) -> None:
        try:
            while os.path.isdir(path) and not os.path.islink(path):
                with contextlib.suppress(FileNotFoundError):  # another run is at it, too
                    shutil.rmtree(path)
            if os.path.lexists(path):
                os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            plan.problems.append(_told(error))

    def _forget(self, removed: Sequence[Candidate]) -> None:
        paths = [path for each in removed for path in each.dirs.ranks.values()]

        def forget(manifest: Manifest) -> None:
            for path in paths:
                manifest.forget_directory(path)

        # Engines that cannot be told find the files missing when they want to evict them.
        with contextlib.suppress(OSError, *guest.UNAVAILABLE):
            guest.ask(self._root, self._clock, forget)

    def _sweep(self, plan: Plan) -> None:
        """Temp files and empty directories; times tell who uses a namespace, so they stay."""
        for directory in {path.parent for path in plan.temp_files}:
            with _keeping_times(directory):
                temps.sweep([directory], self._clock.now())
        for directory in plan.empty_directories:
            with contextlib.suppress(OSError):
                directory.rmdir()


def _slots_of(dirs: NamespaceDirs) -> tuple[int, int]:
    """The chunks in segments, and the tick of the last use of one."""
    chunks, ticks = 0, [0]
    for directory in dirs.segments.values():
        with contextlib.suppress(OSError, ConfigError):
            found = segment_survey.survey(directory)
            chunks += found.chunks
            ticks.append(found.newest_tick or 0)
    return chunks, max(ticks)


@contextmanager
def _locked(directory: Path) -> Iterator[str]:
    """Hold the lock of a segment directory, so that no engine opens it; yields who has it
    instead, "" if nobody."""
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield ""
        return
    try:
        yield "" if diskio.lock(descriptor, 0.0) else holder_of(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _keeping_times(directory: Path) -> Iterator[None]:
    try:
        before = directory.stat()
        yield
        os.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))
    except FileNotFoundError:
        return


def _parts(entry: os.DirEntry[str]) -> list[str]:
    """What to remove at a time of a directory: its children."""
    if not entry.is_dir(follow_symlinks=False):
        return [entry.path]
    return [child.path for child in diskio.children(entry.path)]


def _told(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}"
