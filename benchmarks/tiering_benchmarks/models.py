"""Tiny Llama models, made on the spot: random weights, a local tokenizer, nothing downloaded.

Owns a model folder from its making to its check for completeness. The same recipe gives the same
bytes on the same Python and torch. What matters about the weights: attention is peaky and
outweighs the residual stream, so one wrong block of KV cache, far back in the prompt, changes
what the model says. (With usual random weights it would not, and tests would prove nothing.)
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiering.errors import ConfigError

if TYPE_CHECKING:
    import torch

RECIPE_VERSION = 1
SEED = 71
VOCABULARY = 4096
MAX_TOKENS = 32768
SPECIAL_TOKENS = {"pad": "<pad>", "bos": "<s>", "eos": "</s>"}
RECIPE_FILE = "recipe.json"

# A matrix of gain g has entries of deviation g / sqrt(inputs), so it multiplies the deviation of
# what comes in by g. Scores then have deviation QK**2: of a thousand tokens a handful take nearly
# all attention. VO**2 lifts what they say above the residual; the MLP stays below it.
GAIN_QK = 2.0
GAIN_VO = 2.5
GAIN_MLP = 0.7
GAIN_HEAD = 3.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's dimensions; heads are of `head_dim` values."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 64

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers, in float32, as the harness serves them."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4


SIZES = {
    # For tests: a prompt of 4096 tokens costs under a CPU second.
    "tiny": Shape(layers=4, hidden=256, intermediate=512, heads=4, kv_heads=2),
    # 92 million parameters: computing a long prompt takes seconds on two cores, reading it does
    # not.
    "demo": Shape(layers=14, hidden=768, intermediate=2048, heads=12, kv_heads=2),
}


def make_model(directory: Path, size: str) -> Path:
    """The folder `directory`/llama-`size` with a model that vLLM can serve, made if need be.

    A complete one of the same recipe is left as it is. It appears whole or not at all, and
    several processes may ask at once. Raises ConfigError for an unknown size, or where something
    else is in the way.
    """
    shape = SIZES.get(size)
    if shape is None:
        raise ConfigError("size", size, "no such model", f"choose from {', '.join(SIZES)}")
    target = directory / f"llama-{size}"
    recipe = _recipe(shape)
    if _is_complete(target, recipe):
        return target
    if target.exists() and not (target / RECIPE_FILE).exists():
        raise ConfigError(
            "directory", str(directory), f"{target} is not a model made here", "move it away"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as making:
        draft = Path(making) / "model"
        draft.mkdir()
        _write_tokenizer(draft)
        _write_weights(draft, shape)
        (draft / "config.json").write_text(json.dumps(_config(shape), indent=2))
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


def _recipe(shape: Shape) -> dict[str, Any]:
    """All that decides a model's bytes: the corpus comes with Python, the numbers from torch."""
    import torch

    return {
        "version": RECIPE_VERSION,
        "seed": SEED,
        "shape": asdict(shape),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _is_complete(target: Path, recipe: dict[str, Any]) -> bool:
    # The recipe's file travels in the same rename as the rest, so it vouches for all of them.
    try:
        found: object = json.loads((target / RECIPE_FILE).read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return found == recipe


def _config(shape: Shape) -> dict[str, Any]:
    special = {f"{name}_token_id": index for index, name in enumerate(SPECIAL_TOKENS)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "max_position_embeddings": MAX_TOKENS,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **special,
    }


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


def _matrices(shape: Shape) -> Iterator[tuple[str, int, int, float]]:
    """Name, rows (outputs), columns (inputs) and gain of each matrix, in a fixed order."""
    queries, pairs = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # An embedding is looked up, not multiplied: this gain makes its entries of deviation 1.
    yield "model.embed_tokens", VOCABULARY, shape.hidden, math.sqrt(shape.hidden)
    for layer in range(shape.layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        yield f"{attention}.q_proj", queries, shape.hidden, GAIN_QK
        yield f"{attention}.k_proj", pairs, shape.hidden, GAIN_QK
        yield f"{attention}.v_proj", pairs, shape.hidden, GAIN_VO
        yield f"{attention}.o_proj", shape.hidden, queries, GAIN_VO
        yield f"{mlp}.gate_proj", shape.intermediate, shape.hidden, GAIN_MLP
        yield f"{mlp}.up_proj", shape.intermediate, shape.hidden, GAIN_MLP
        yield f"{mlp}.down_proj", shape.hidden, shape.intermediate, GAIN_MLP
    yield "lm_head", VOCABULARY, shape.hidden, GAIN_HEAD


def _norms(shape: Shape) -> Iterator[str]:
    for layer in range(shape.layers):
        yield f"model.layers.{layer}.input_layernorm"
        yield f"model.layers.{layer}.post_attention_layernorm"
    yield "model.norm"


def _write_weights(draft: Path, shape: Shape) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    weights: dict[str, torch.Tensor] = {}
    for name, rows, columns, gain in _matrices(shape):
        values = torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))
        if name == "lm_head":
            # A logit of 0 never wins, so no special token ends an answer early.
            values[: len(SPECIAL_TOKENS)] = 0
        weights[f"{name}.weight"] = values.to(torch.bfloat16)
    for name in _norms(shape):
        weights[f"{name}.weight"] = torch.ones(shape.hidden, dtype=torch.bfloat16)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tiering-bench model` to the command line."""
    parser = commands.add_parser("model", help="make a tiny model that vLLM can serve")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where its folder shall be")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    print(make_model(args.directory, args.size))
    return 0
