"""What the families share: the vocabulary, how strong each part is, and numbers from a seed.

A family is a frozen dataclass of dimensions that tells its configuration and its weights. A
matrix of gain g has entries of deviation g / sqrt(inputs), so it multiplies the deviation of what
comes in by g.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

SEED = 71
VOCABULARY = 4096
MAX_TOKENS = 32768
SPECIAL_TOKENS = {"pad": "<pad>", "bos": "<s>", "eos": "</s>"}

# Scores have deviation QK**2: of a thousand tokens a handful take nearly all attention. VO**2
# lifts what they say above the residual; the MLP stays below it.
GAIN_QK = 2.0
GAIN_VO = 2.5
GAIN_MLP = 0.7
GAIN_HEAD = 3.0


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the checkpoint: random around `mean`, or `mean` throughout for a gain of 0.

    The last dimension of `shape` is what it takes in. One of `tokens` has a row for each token,
    and the rows of special tokens are 0: a logit of 0 never wins, so none ends an answer early.
    """

    name: str
    shape: tuple[int, ...]
    gain: float = 0.0
    mean: float = 0.0
    tokens: bool = False


class Family(Protocol):
    """A dataclass that can be made into a model."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def config(self) -> dict[str, Any]:
        """What config.json says, besides what it says for every family."""
        ...

    def weights(self) -> Iterator[Weight]:
        """All of them, in the order in which they draw their numbers."""
        ...


def embedding(name: str, hidden: int, deviation: float = 1.0) -> Weight:
    """It is looked up, not multiplied: its entries are of `deviation`."""
    return Weight(name, (VOCABULARY, hidden), deviation * math.sqrt(hidden))


def mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[Weight]:
    """The gated MLP that all families have."""
    yield Weight(f"{prefix}.gate_proj.weight", (intermediate, hidden), GAIN_MLP)
    yield Weight(f"{prefix}.up_proj.weight", (intermediate, hidden), GAIN_MLP)
    yield Weight(f"{prefix}.down_proj.weight", (hidden, intermediate), GAIN_MLP)


def attention(
    prefix: str, hidden: int, queries: int, pairs: int, *, gates: int = 0
) -> Iterator[Weight]:
    """Projections of multi-head attention: `queries` and `pairs` are heads times their size.
    `gates` more outputs of the queries' projection scale what the heads say."""
    yield Weight(f"{prefix}.q_proj.weight", (queries + gates, hidden), GAIN_QK)
    yield Weight(f"{prefix}.k_proj.weight", (pairs, hidden), GAIN_QK)
    yield Weight(f"{prefix}.v_proj.weight", (pairs, hidden), GAIN_VO)
    yield Weight(f"{prefix}.o_proj.weight", (hidden, queries), GAIN_VO)


def write_config(draft: Path, config: dict[str, Any]) -> None:
    """A model's config.json: `config`, and what is the same for every family."""
    common = {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_TOKENS,
        "vocab_size": VOCABULARY,
        "torch_dtype": "bfloat16",
        **{f"{name}_token_id": index for index, name in enumerate(SPECIAL_TOKENS)},
    }
    (draft / "config.json").write_text(json.dumps({**config, **common}, indent=2))


def write_weights(path: Path, weights: Iterable[Weight], seed: int = SEED) -> None:
    """A safetensors file of them, in bfloat16."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {weight.name: _numbers(weight, generator) for weight in weights}
    save_file(tensors, path, metadata={"format": "pt"})


def _numbers(weight: Weight, generator: torch.Generator) -> torch.Tensor:
    import torch

    values = torch.full(weight.shape, weight.mean)
    if weight.gain:
        deviation = weight.gain / math.sqrt(weight.shape[-1])
        values += torch.randn(weight.shape, generator=generator) * deviation
    if weight.tokens:
        values[: len(SPECIAL_TOKENS)] = 0
    return values.to(torch.bfloat16)
