"""Weights that differ give another namespace, also under the same name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tiering_connectors.vllm.identity import weights_digest

SIZE = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(2):
        (tmp_path / f"model-{i}.safetensors").write_bytes(random.Random(i).randbytes(SIZE))
    (tmp_path / "README.md").write_text("not a weight")
    return tmp_path


def retrained(folder: Path) -> None:
    (folder / "model-1.safetensors").write_bytes(random.Random(9).randbytes(SIZE))


def changed_at(where: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / "model-0.safetensors").open("r+b") as file:
            file.seek(where, 0 if where >= 0 else 2)
            byte = file.read(1)[0]
            file.seek(where, 0 if where >= 0 else 2)
            file.write(bytes([byte ^ 1]))

    return change


def longer(folder: Path) -> None:
    with (folder / "model-0.safetensors").open("ab") as file:
        file.write(b"\0")


def one_less(folder: Path) -> None:
    (folder / "model-1.safetensors").unlink()


def swapped(folder: Path) -> None:
    first, second = folder / "model-0.safetensors", folder / "model-1.safetensors"
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)


@pytest.mark.parametrize(
    "change", [retrained, changed_at(0), changed_at(-1), longer, one_less, swapped]
)
def test_other_weights_have_another_digest(folder: Path, change: Callable[[Path], None]) -> None:
    before = weights_digest(folder)
    change(folder)
    assert weights_digest(folder) != before


def test_what_is_not_a_weight_does_not_count(folder: Path, tmp_path: Path) -> None:
    before = weights_digest(folder)
    (folder / "README.md").write_text("other words")
    assert weights_digest(folder) == before


def test_a_file_smaller_than_a_sample_is_read_whole(tmp_path: Path) -> None:
    digests = set()
    for payload in (b"", b"a", b"b"):
        (tmp_path / "m.bin").write_bytes(payload)
        digests.add(weights_digest(tmp_path))
    assert len(digests) == 3
