"""What is given as ROOT: the root_dir of an fs tier, or what names a bucket. Reads names only."""

from __future__ import annotations

from pathlib import Path

from tiering.errors import TieringError


def is_json(source: str) -> bool:
    """Whether `source` is a JSON text itself, and not the name of a file."""
    return source.lstrip().startswith(("{", "["))


def is_url(root: str) -> bool:
    """Whether `root` is an address, such as other tools have for a bucket."""
    return not is_json(root) and "://" in root


def names_bucket(root: str) -> bool:
    """Whether `root` is a configuration, or meant to name a bucket in another way."""
    return (
        root == "-"
        or is_json(root)
        or Path(root).is_file()
        or (is_url(root) and not Path(root).exists())
    )


def refuse_bucket(command: str, root: str, instead: str) -> None:
    """TieringError where `root` names a bucket, which `command` is not for."""
    if names_bucket(root):
        raise TieringError(f"{command} takes the root_dir of an fs tier; for a bucket, {instead}")
