"""What goes with the Llama models: LoRA adapters, and a draft that guesses their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiering_benchmarks.models.llama import SIZES, EagleDraft, Llama
from tiering_benchmarks.models.making import make_folder, recipe_of
from tiering_benchmarks.models.weights import Weight, write_config, write_weights


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA of the projections that write and read the KV cache, so that what is cached under
    one adapter is wrong under another."""

    base: Llama
    rank: int = 8
    # Of what it adds, where the projection's own output is 1 or more.
    gain: float = 1.0

    def config(self) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": ["q_proj", "k_proj", "v_proj"],
        }

    def weights(self) -> Iterator[Weight]:
        queries = self.base.heads * self.base.head_dim
        pairs = self.base.kv_heads * self.base.head_dim
        outputs = {"q_proj": queries, "k_proj": pairs, "v_proj": pairs}
        for layer in range(self.base.layers):
            for name, rows in outputs.items():
                at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                yield Weight(f"{at}.lora_A.weight", (self.rank, self.base.hidden), 1.0)
                yield Weight(f"{at}.lora_B.weight", (rows, self.rank), self.gain)


def make_adapter(directory: Path, size: str, seed: int) -> Path:
    """The folder `directory`/llama-`size`-lora-`seed`: an adapter of the Llama of that size, in
    PEFT's format. Another one for each seed; made if need be, as `make_model` makes models."""
    adapter = Adapter(SIZES[size])

    def write(draft: Path) -> None:
        (draft / "adapter_config.json").write_text(json.dumps(adapter.config(), indent=2))
        write_weights(draft / "adapter_model.safetensors", adapter.weights(), seed)

    target = directory / f"llama-{size}-lora-{seed}"
    return make_folder(target, recipe_of(adapter, seed), write)


def make_draft(directory: Path, size: str) -> Path:
    """The folder `directory`/llama-`size`-eagle: a draft for vLLM's speculative method `eagle`,
    of one layer of that Llama. Made if need be, as `make_model` makes models."""
    draft = EagleDraft(SIZES[size])

    def write(folder: Path) -> None:
        write_config(folder, draft.config())
        write_weights(folder / "model.safetensors", draft.weights())

    return make_folder(directory / f"llama-{size}-eagle", recipe_of(draft), write)
