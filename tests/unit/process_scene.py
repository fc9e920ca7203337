"""A ProcessPortal over a region of few rows, real directories, and tiers that do as files say.

Run as a program, this file is an engine: it opens such a portal, says its child's pid, and waits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tiering.config import ConnectorConfig, parse
from tiering.layout import RowLayout
from tiering.process.portal import ProcessPortal
from tiering.residency.plan import News, Outcome, Verdict
from tiering.testing.examples import CHUNK_BYTES, example_namespace, payload_of
from tiering.tiers.host import Region, region_name

ROWS = 16
NEVER = 60.0

OWN_TIERS = '''
"""Tiers of the user's own, that wait for files and end for them."""

import asyncio, logging, os, time
from pathlib import Path
from tiering.testing.memory import MemoryTier

class Steered(MemoryTier):
    """Waits in `read` and `write` while there is a file `hold`; dies at once for a file `die`."""

    def __init__(self, namespace, chunk_bytes, *, folder, password="", **more):
        super().__init__(name="steered")
        self.folder = Path(folder)
        (self.folder / "password").write_text(password)

    async def open(self):
        if (self.folder / "refuse").exists():
            from tiering.errors import TierError
            raise TierError("steered", b"\\x01", "not today")
        await super().open()

    async def _steer(self, buffers):
        if (self.folder / "die").exists():
            os.kill(os.getpid(), 9)
        if (self.folder / "hang").exists():
            (self.folder / "hangs").touch()
            time.sleep(600)
        if (self.folder / "raise").exists():
            raise KeyError("a bug")
        while (self.folder / "hold").exists():
            (self.folder / "held").touch()
            for buffer in buffers:
                buffer[:4] = b"held"
            await asyncio.sleep(0.01)

    async def contains(self, keys):
        await self._steer([])
        return await super().contains(keys)

    async def read(self, keys, buffers):
        await self._steer(buffers)
        return await super().read(keys, buffers)

    async def write(self, keys, buffers):
        logging.getLogger("tiering.own").warning("writing %d", len(keys))
        await self._steer([])
        return await super().write(keys, buffers)

class Stillborn(MemoryTier):
    def __init__(self, namespace, chunk_bytes):
        os._exit(7)
'''


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it never happened"
        time.sleep(0.002)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Scene:
    """An open portal and its region; a portal's outcomes by step."""

    def __init__(self, region: Region, portal: ProcessPortal) -> None:
        self.region = region
        self.portal = portal
        self.news: list[News] = []

    @property
    def pid(self) -> int:
        """Of the child that runs now."""
        link = self.portal._link()
        assert link is not None
        return link.process.pid

    def fill(self, slot: int, key: bytes) -> None:
        self.region.row(slot)[:] = payload_of(key)

    def holds(self, slot: int, key: bytes) -> bool:
        return bytes(self.region.row(slot)) == payload_of(key)

    def pump(self) -> None:
        self.news += self.portal.drain()

    def outcomes(self, *ids: int) -> list[tuple[Verdict, ...]]:
        """The final verdicts of these steps, waited for."""

        def final() -> dict[int, tuple[Verdict, ...]]:
            self.pump()
            outcomes = [n for n in self.news if isinstance(n, Outcome) and n.final]
            assert len({outcome.id for outcome in outcomes}) == len(outcomes)
            return {outcome.id: outcome.verdicts for outcome in outcomes}

        until(lambda: set(ids) <= set(final()))
        return [final()[number] for number in ids]


def make_region(folder: Path) -> Region:
    """With ROWS rows of a chunk, and without a name."""
    row = RowLayout(CHUNK_BYTES)
    name = region_name(f"{folder} {os.getpid()}")
    region = Region.open(name, row, (ROWS + 1) * row.row_bytes, folder)
    region.unlink()
    np.copyto(region.rows_view(), 0)
    return region


def portal_over(region: Region, *tiers: dict[str, Any], **more: Any) -> ProcessPortal:
    config = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": list(tiers), **more}
    return ProcessPortal(parse(ConnectorConfig, config), example_namespace(), region)


def fs(root: Path, **more: object) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(root), **more}


def steered(folder: Path, **more: object) -> dict[str, Any]:
    """A tier of `OWN_TIERS`, which `write_own_tiers` puts on the path."""
    return {"type": "Steered", "module_path": "steered_tiers", "folder": str(folder), **more}


def write_own_tiers(folder: Path) -> None:
    (folder / "steered_tiers.py").write_text(OWN_TIERS)


@contextmanager
def opened(folder: Path, *tiers: dict[str, Any], **more: Any) -> Iterator[Scene]:
    region = make_region(folder)
    portal = portal_over(region, *tiers, **more)
    portal.start()
    try:
        yield Scene(region, portal)
    finally:
        assert portal.close(0.0)
        region.close()


def main(folder: str, tiers: Sequence[dict[str, Any]]) -> None:
    sys.path.insert(0, folder)
    with opened(Path(folder), *tiers) as scene:
        print(scene.pid, flush=True)
        if any(tier.get("forks") for tier in tiers):
            # A fork that has everything open that this process has.
            fork = os.fork()
            if fork == 0:
                time.sleep(600)
            print(fork, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
