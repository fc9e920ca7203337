"""Opening a segment tier: its directories, the lock, and what its slots hold.

Called by `SegmentTier.open` only, on the event loop; what blocks runs in the tier's pool.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from tiering.clock import Clock
from tiering.layout import ALIGNMENT
from tiering.namespace import Namespace
from tiering.tiers.disk import diskio
from tiering.tiers.disk.beginning import begin
from tiering.tiers.disk.diskio import Direct, IoPath
from tiering.tiers.disk.iopool import IoPool, Lane
from tiering.tiers.disk.paths import TEMP_SUFFIX
from tiering.tiers.segments.files import SegmentFiles
from tiering.tiers.segments.table import Records

_HEADERS_AT_ONCE = 256

log = logging.getLogger("tiering")


async def make_ready(
    name: str,
    files: SegmentFiles,
    namespace: Namespace,
    io_paths: tuple[IoPath, IoPath],
    pool: IoPool,
    clock: Clock,
) -> Records:
    """Open `files`, and say what is in them: by their table, or by the slots' header pages where
    it is lost. `name` is the tier's; `io_paths` are those for reads and for writes.

    ConfigError where the user can help it, TierError for the rest. `files` may be half open then.
    """
    root = files.directory.parent
    try:
        await begin(pool, root, namespace, [files.directory], lambda: _open(files, io_paths, clock))
        if others := await pool.call(Lane.READ, lambda: _bytes_beside(files.directory)):
            log.info(
                "%s: %d bytes under it are other models' or versions', which max_bytes of layout "
                "segments does not count: see tiering stat, and tiering gc to remove them",
                name,
                others,
            )
        if not files.needs_rebuild:
            found: Records = await pool.call(Lane.READ, files.load)
            return found
        # As many at once as the pool has threads, a page at a time in each.
        keys = await pool.run_spans(Lane.READ, files.keys_in, files.n_slots, _HEADERS_AT_ONCE)
        rebuilt: Records = await pool.call(Lane.WRITE, lambda: files.rebuild(keys))
        return rebuilt
    except OSError as error:
        raise diskio.open_error(name, root, error) from error


def _open(files: SegmentFiles, io_paths: tuple[IoPath, IoPath], clock: Clock) -> None:
    try:
        files.take_lock()
        for left_over in files.directory.glob(f"*{TEMP_SUFFIX}"):
            left_over.unlink(missing_ok=True)
        direct = diskio.probe(files.directory, *io_paths, clock)
        if files.geometry.payload_bytes % ALIGNMENT:
            # Direct I/O moves whole pages only.
            direct = Direct(reads=False, writes=False)
        files.open(direct)
    except FileNotFoundError:
        files.close()
        raise


def _bytes_beside(own: Path) -> int:
    """What the directories of others take on the disk: as after an upgrade, nobody evicts them."""
    total = 0
    for path in own.parent.glob(f"*{own.suffix}/*"):
        if path.parent != own:
            # What vanishes meanwhile takes nothing.
            with contextlib.suppress(FileNotFoundError):
                total += path.lstat().st_blocks * 512
    return total
