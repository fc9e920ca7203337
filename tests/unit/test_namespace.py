"""Every field of a namespace counts, and no model name can leave the root."""

from __future__ import annotations

import dataclasses
import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.namespace import Namespace
from tiering.testing.examples import example_namespace

HOSTILE_NAMES = [
    "",
    ".",
    "..",
    "...",
    "../../etc/passwd",
    "/etc/passwd",
    "..\\..\\x",
    "a\0b",
    "a\nb\x1b[0m",
    "x" * 10_000,
    "модель/模型",
    "~root",
    "$HOME",
    "-rf",
]


def changed(value: object) -> object:
    match value:
        case str():
            return value + "x"
        case int():
            return value + 1
        case tuple():
            return (*value, "another")
    raise AssertionError(f"no other value for {value!r}")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Namespace)])
def test_each_field_changes_digest_and_directory(field: str) -> None:
    base = example_namespace()
    other = example_namespace(**{field: changed(getattr(base, field))})
    assert other.digest != base.digest
    assert other.directory != base.directory
    assert other.digest_of_rank(0) != base.digest_of_rank(0)
    assert other.describe()[field] != base.describe()[field]


def test_bytes_cannot_move_from_one_field_to_its_neighbour() -> None:
    left = example_namespace(model="ab", revision="c", groups=("x", "y"))
    assert left.digest != example_namespace(model="a", revision="bc", groups=("x", "y")).digest
    assert left.digest != example_namespace(model="ab", revision="c", groups=("xy", "")).digest
    assert left.digest != example_namespace(model="ab", revision="c", groups=("xy",)).digest


def test_the_digest_is_a_fixed_value() -> None:
    """What lies on users' disks must be found again by the next release."""
    base = example_namespace()
    assert base.digest == example_namespace().digest
    assert base.digest.hex() == "d64a08c3b1db9ea8903fd037c6f95da9f97d647e2ffccc9edd122b33e84510f0"


def test_ranks_do_not_share_a_digest() -> None:
    base = example_namespace()
    digests = {base.digest, *(base.digest_of_rank(rank) for rank in range(16))}
    assert len(digests) == 17


def test_the_directory_keeps_a_plain_name_readable() -> None:
    base = example_namespace(model="meta-llama/Llama-3.1-8B")
    assert base.directory == f"meta-llama_Llama-3.1-8B_{base.digest.hex()[:12]}"


@pytest.mark.parametrize("model", HOSTILE_NAMES)
def test_hostile_model_names_give_one_safe_component(model: str) -> None:
    assert_safe(example_namespace(model=model).directory)


@pytest.mark.slow
@given(st.text())
def test_any_model_name_gives_one_safe_component(model: str) -> None:
    assert_safe(example_namespace(model=model).directory)


def assert_safe(directory: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", directory)
    assert len(directory) <= 120


def test_names_that_look_alike_once_safe_stay_apart() -> None:
    directories = {example_namespace(model=m).directory for m in ("a/b", "a_b", "a\\b", "a:b")}
    assert len(directories) == 4


def test_the_description_survives_json() -> None:
    description = example_namespace().describe()
    assert orjson.loads(orjson.dumps(description)) == description
    assert description["digest"] == example_namespace().digest.hex()
