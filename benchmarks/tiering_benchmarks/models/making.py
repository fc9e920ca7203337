"""A model's folder, from its making to its check for completeness.

A folder appears whole or not at all, and several processes may ask for it at once. The recipe in
it says all that decides its bytes.
"""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tiering.errors import ConfigError
from tiering_benchmarks.models.deepseek import Deepseek
from tiering_benchmarks.models.gemma import GEMMA2, GEMMA3
from tiering_benchmarks.models.llama import SIZES
from tiering_benchmarks.models.llama4 import Llama4
from tiering_benchmarks.models.qwen3next import Qwen3Next
from tiering_benchmarks.models.weights import (
    MAX_TOKENS,
    SEED,
    SPECIAL_TOKENS,
    VOCABULARY,
    Family,
    write_config,
    write_weights,
)

RECIPE_VERSION = 1
RECIPE_FILE = "recipe.json"

MODELS: Mapping[str, Family] = {
    **SIZES,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "qwen3next": Qwen3Next(),
    "mla": Deepseek(),
    "chunked": Llama4(),
}


def make_model(directory: Path, size: str) -> Path:
    """The folder `directory`/llama-`size` with a model that vLLM can serve, made if need be; for
    a model of another family, `directory`/`size`.

    A complete one of the same recipe is left as it is. Raises ConfigError for an unknown size, or
    where something else is in the way.
    """
    model = MODELS.get(size)
    if model is None:
        raise ConfigError("size", size, "no such model", f"choose from {', '.join(MODELS)}")

    def write(draft: Path) -> None:
        write_config(draft, model.config())
        write_weights(draft / "model.safetensors", model.weights())
        _write_tokenizer(draft)

    name = f"llama-{size}" if size in SIZES else size
    return make_folder(directory / name, recipe_of(model), write)


def recipe_of(model: Family, seed: int = SEED) -> dict[str, Any]:
    """All that decides a model's bytes: the corpus comes with Python, the numbers from torch."""
    import torch

    return {
        "version": RECIPE_VERSION,
        "seed": seed,
        "family": type(model).__name__,
        "shape": asdict(model),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def make_folder(target: Path, recipe: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """`target`, filled by `write` unless it is there and complete. Its parent need not exist.
    Raises ConfigError where something else is in the way."""
    if _is_complete(target, recipe):
        return target
    directory = target.parent
    if target.exists() and not (target / RECIPE_FILE).exists():
        raise ConfigError(
            "directory", str(directory), f"{target} is not a model made here", "move it away"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as making:
        draft = Path(making) / "model"
        draft.mkdir()
        write(draft)
        (draft / RECIPE_FILE).write_text(json.dumps(recipe, indent=2))
        _publish(draft, target, recipe)
    return target


def _publish(draft: Path, target: Path, recipe: dict[str, Any]) -> None:
    if target.exists() and not _is_complete(target, recipe):
        shutil.rmtree(target)
    try:
        draft.rename(target)
    except OSError:
        # Another process was quicker: equally good, as long as it made the same.
        if not _is_complete(target, recipe):
            raise


def _is_complete(target: Path, recipe: dict[str, Any]) -> bool:
    # The recipe's file travels in the same rename as the rest, so it vouches for all of them.
    try:
        found: object = json.loads((target / RECIPE_FILE).read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    # As JSON has no tuples.
    return bool(found == json.loads(json.dumps(recipe)))


def _write_tokenizer(draft: Path) -> None:
    """A byte-level BPE, trained on the reference manual that comes with every Python."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    bos = SPECIAL_TOKENS["bos"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.save(str(draft / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_TOKENS,
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": text for name, text in SPECIAL_TOKENS.items()},
    }
    (draft / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
