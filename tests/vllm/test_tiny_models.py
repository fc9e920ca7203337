"""Models are made once, whole, and alike every time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiering.errors import ConfigError
from tiering_benchmarks.models import RECIPE_FILE, make_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_recipe_gives_the_same_bytes(tiny_model: Path, tmp_path: Path) -> None:
    assert contents(make_model(tmp_path, "tiny")) == contents(tiny_model)
    assert [path.name for path in tmp_path.iterdir()] == ["llama-tiny"]


def test_a_complete_model_is_left_alone_and_an_outdated_one_is_made_again(tmp_path: Path) -> None:
    model = make_model(tmp_path, "tiny")
    weights = model / "model.safetensors"
    fresh = weights.stat()
    assert make_model(tmp_path, "tiny") == model
    assert weights.stat().st_ino == fresh.st_ino

    recipe = model / RECIPE_FILE
    recipe.write_text(recipe.read_text().replace('"version": 1', '"version": 0'))
    make_model(tmp_path, "tiny")
    assert weights.stat().st_ino != fresh.st_ino
    assert '"version": 1' in recipe.read_text()


def test_what_is_not_a_model_of_ours_is_never_removed(tmp_path: Path) -> None:
    precious = tmp_path / "llama-tiny" / "precious"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(ConfigError, match="not a model made here; move it away"):
        make_model(tmp_path, "tiny")
    assert precious.read_text() == "mine"


def test_an_unknown_size_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="size = 'huge': no such model; choose from tiny, demo"):
        make_model(tmp_path, "huge")
