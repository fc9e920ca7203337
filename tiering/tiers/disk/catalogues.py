"""Where the chunks of a namespace are described for whoever announces them. Blocking."""

from __future__ import annotations

import errno
from pathlib import Path

from tiering.tiers.disk import diskio, mounts
from tiering.tiers.disk.paths import CATALOGUE_NAME, FsPaths


def catalogue_path(root: Path, namespace: str) -> Path:
    """The file, in a directory that is there; OSError where there can be none."""
    if not mounts.is_local(root):
        told = "its file system may be another machine's, whose locks cannot be trusted"
        raise OSError(errno.ENOTSUP, told, str(root))
    directory = FsPaths(root, namespace, 0).config_dir
    diskio.make_private_dirs(root, directory)
    return directory / CATALOGUE_NAME
