"""How a disk tier of either layout begins: its directories, config.json, and what needs both.

`tiering gc`, and cleaners of others, may take a directory at any moment: what they take before it
is in use is made again. Called on the event loop; what blocks runs in the tier's pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tiering.namespace import Namespace
from tiering.tiers.disk import configfile, diskio
from tiering.tiers.disk.iopool import IoPool, Lane
from tiering.tiers.disk.paths import CONFIG_NAME

T = TypeVar("T")

TRIES_MAX = 8


async def begin(
    pool: IoPool,
    root: Path,
    namespace: Namespace,
    directories: Sequence[Path],
    use: Callable[[], T],
) -> T:
    """Make `root`, the namespace's own directory and `directories` below it, agree on config.json,
    and give what `use`, in the pool, makes of them; `use` may be called several times.

    ConfigError where the user can help it, OSError for the rest."""
    config_dir = root / namespace.directory

    def make() -> None:
        diskio.make_private_dir(root)
        for directory in (config_dir, *directories):
            diskio.make_private_dirs(root, directory)

    tries = 0
    while True:
        tries += 1
        try:
            await pool.call(Lane.WRITE, make)
            await configfile.agree(config_dir / CONFIG_NAME, namespace.describe())
            made: T = await pool.call(Lane.WRITE, use)
            return made
        except FileNotFoundError:
            if tries == TRIES_MAX:
                raise
