"""Models are made once, whole, and alike every time; and their answers need all of their KV cache.

The last is what makes them fit for other tests: where a block of any group of layers is lost, the
logprobs tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from one_shot import Question, Reply, ask_engine
from prompts import BLOCK, random_prompt
from tiering.errors import ConfigError
from tiering_benchmarks.models import (
    RECIPE_FILE,
    VOCABULARY,
    make_adapter,
    make_draft,
    make_model,
)

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


def test_what_goes_with_a_model_is_alike_every_time(
    adapters: tuple[Path, Path], draft_model: Path, tmp_path: Path
) -> None:
    first, second = adapters
    assert contents(make_adapter(tmp_path, "tiny", 1)) == contents(first)
    assert contents(make_draft(tmp_path, "tiny")) == contents(draft_model)
    weights = "adapter_model.safetensors"
    assert contents(first)[weights] != contents(second)[weights]


PROMPT = random_prompt("models", 31 * BLOCK + 8)
FIRST, LAST = 0, -1
# Rounding is a thousandth of this; equal work gives equal numbers, so it does not count at all.
TOLD_APART = 0.05


def difference(one: Reply, other: Reply) -> float:
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


@pytest.mark.parametrize(
    ("model", "groups", "options"),
    [
        ("tiny_model", [4], {}),
        ("gemma2_model", [2, 2], {}),
        ("gemma3_model", [2, 2, 2], {}),
        ("chunked_model", [2, 2], {}),
        ("qwen3next_model", [2, 2], {"dtype": "bfloat16"}),
    ],
)
def test_a_lost_block_of_any_group_is_told(
    model: str,
    groups: list[int],
    options: dict[str, Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    losses = [(group, which) for group in range(len(groups)) for which in (FIRST, LAST)]
    intact = [Question(PROMPT, salt) for salt in ("one", "other")]
    lossy = [Question(PROMPT, str(loss), lose=loss) for loss in losses]
    # Each is asked twice, in a world of its own: computed, then from what the device holds.
    questions = [
        each
        for question in (*intact, *lossy)
        for each in (Question(PROMPT, question.salt), question)
    ]
    folder = request.getfixturevalue(model)
    told = ask_engine(tmp_path / "log", questions, model=str(folder), **options)
    assert [len(layers) for layers in told.groups] == groups
    cold, warm = told.replies[::2], told.replies[1::2]
    assert {reply.cached_tokens for reply in cold} == {0}
    assert min(reply.cached_tokens for reply in warm) > len(PROMPT) * 3 // 4
    assert warm[0] == warm[1]
    apart = {loss: difference(warm[0], lost) for loss, lost in zip(losses, warm[2:], strict=True)}
    assert min(apart.values()) > TOLD_APART, apart


def test_latent_attention_hears_an_early_token(mla_model: Path, tmp_path: Path) -> None:
    """Its KV cache cannot lose a block, as vLLM's CPU backend keeps none from prompt to prompt."""
    changed = [PROMPT[0] ^ 1, *PROMPT[1:]]
    questions = [Question(PROMPT), Question(PROMPT), Question(changed)]
    told = ask_engine(tmp_path / "log", questions, model=str(mla_model))
    first, again, other = told.replies
    assert first == again
    assert difference(first, other) > TOLD_APART


def test_an_adapter_changes_what_is_said_and_cached(
    tiny_model: Path, adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    """vLLM keeps what is cached under one adapter from the others; were it not to, they would
    answer alike."""
    worlds = (None, *map(str, adapters))
    questions = [Question(PROMPT, adapter=world) for world in worlds for _ in range(2)]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    told = ask_engine(tmp_path / "log", questions, model=str(tiny_model), **options)
    cold, warm = told.replies[::2], told.replies[1::2]
    assert [reply.cached_tokens for reply in cold] == [0, 0, 0]
    assert [reply.tokens for reply in warm] == [reply.tokens for reply in cold]
    plain, first, second = warm
    assert min(difference(*pair) for pair in ((plain, first), (plain, second), (first, second))) > (
        TOLD_APART
    )


def test_a_draft_guesses_and_changes_nothing(
    tiny_model: Path, draft_model: Path, tmp_path: Path
) -> None:
    methods: dict[str, dict[str, Any]] = {
        "none": {},
        "eagle": {"model": str(draft_model)},
        "ngram": {"prompt_lookup_min": 1},
    }
    # Nearly every token is in it, so there is always something to look up.
    questions = [Question(list(range(16, VOCABULARY - 80)))] * 2
    told = {}
    for method, settings in methods.items():
        speculative = {"method": method, "num_speculative_tokens": 2, **settings}
        options = {} if method == "none" else {"speculative_config": speculative}
        told[method] = ask_engine(tmp_path / method, questions, model=str(tiny_model), **options)
    assert {method: each.drafted > 0 for method, each in told.items()} == {
        "none": False,
        "eagle": True,
        "ngram": True,
    }
    # The draft's own layer is in the cache, beside the model's.
    assert {method: sum(map(len, each.groups)) for method, each in told.items()} == {
        "none": 4,
        "eagle": 5,
        "ngram": 4,
    }
    tokens = {method: [reply.tokens for reply in each.replies] for method, each in told.items()}
    assert tokens["eagle"] == tokens["ngram"] == tokens["none"]
