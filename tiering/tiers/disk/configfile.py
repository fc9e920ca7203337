"""A namespace's config.json: written once, and from then on checked against who opens it.

Runs on the event loop with aiofiles; called by `FsTier.open` only.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os
import orjson

from tiering.errors import ConfigError
from tiering.tiers.disk.diskio import create_private
from tiering.tiers.disk.temps import temp_name


async def agree(path: Path, description: dict[str, object]) -> None:
    """Leave `description` in the file `path`, or find it there.

    ConfigError where the file says something else: the directory's short digest collided, or
    somebody changed the file. OSError where it can neither be read nor written.
    """
    try:
        async with aiofiles.open(path, "rb") as file:
            found = await file.read()
    except FileNotFoundError:
        await _write(path, description)
        return
    differing = difference(found, description)
    if differing is not None:
        raise ConfigError(
            "secondary_tiers[].root_dir",
            str(path),
            f"the file describes another run than this one ({differing})",
            f"move {path.parent} and its _r<rank> siblings away, or use another root_dir",
        )


def difference(found: bytes, description: dict[str, object]) -> str | None:
    """In what a config.json that was `found` differs from `description`; None where it does not."""
    try:
        config = orjson.loads(found)
    except orjson.JSONDecodeError:
        return "not JSON"
    if not isinstance(config, dict):
        return "not a JSON object"
    names = sorted(config.keys() | description.keys())
    differing = [name for name in names if config.get(name) != description.get(name)]
    return ", ".join(differing) or None


async def _write(path: Path, description: dict[str, object]) -> None:
    """Whole and on the disk before it has its name, so that no crash leaves half of it."""
    content = orjson.dumps(description, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    temp = path.with_name(temp_name())
    try:
        async with aiofiles.open(temp, "wb", opener=_opener) as file:
            await file.write(content)
            await file.flush()
            await aiofiles.os.wrap(os.fsync)(file.fileno())
        await aiofiles.os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            await aiofiles.os.unlink(temp)
        raise


def _opener(path: Any, flags: int) -> int:
    return create_private(path, (flags & os.O_ACCMODE) | os.O_CLOEXEC)
