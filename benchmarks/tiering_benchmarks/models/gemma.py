"""Gemma 2 and 3: sliding windows and full attention take turns.

Its norms multiply by one more than their weight, and what a layer adds to the residual stream
passes one. The head is the embedding, which is also multiplied by sqrt(hidden): its entries are
small, else the residual would swamp what attention says, and the KV cache would not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tiering_benchmarks.models.weights import (
    GAIN_HEAD,
    GAIN_MLP,
    GAIN_QK,
    VOCABULARY,
    Weight,
    attention,
    mlp,
)

SLIDING, FULL = "sliding_attention", "full_attention"
# What a layer's attention adds, where the embedding's share is 1.
SHARE_ATTENTION = 3.0


@dataclass(frozen=True, slots=True)
class Gemma:
    """A Gemma's dimensions; `layers` has the kind of attention of each."""

    generation: int
    layers: tuple[str, ...]
    window: int = 256
    hidden: int = 256
    intermediate: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64

    def config(self) -> dict[str, Any]:
        kind = {2: "gemma2", 3: "gemma3_text"}[self.generation]
        return {
            "architectures": [f"Gemma{self.generation}ForCausalLM"],
            "model_type": kind,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": len(self.layers),
            "layer_types": list(self.layers),
            "sliding_window": self.window,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "query_pre_attn_scalar": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
            "attention_bias": False,
        }

    def weights(self) -> Iterator[Weight]:
        queries, pairs = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shares = {
            "input_layernorm": 1.0,
            "post_attention_layernorm": SHARE_ATTENTION,
            "pre_feedforward_layernorm": 1.0,
            "post_feedforward_layernorm": GAIN_MLP,
        }
        # Multiplied by sqrt(hidden), its entries are of deviation 1.
        yield Weight("model.embed_tokens.weight", (VOCABULARY, self.hidden), 1.0, tokens=True)
        for layer in range(len(self.layers)):
            at = f"model.layers.{layer}"
            yield from attention(f"{at}.self_attn", self.hidden, queries, pairs)
            yield from mlp(f"{at}.mlp", self.hidden, self.intermediate)
            for norm, share in shares.items():
                yield Weight(f"{at}.{norm}.weight", (self.hidden,), mean=share - 1)
            if self.generation == 3:
                for norm in ("q_norm", "k_norm"):
                    name = f"{at}.self_attn.{norm}.weight"
                    yield Weight(name, (self.head_dim,), mean=GAIN_QK - 1)
        yield Weight("model.norm.weight", (self.hidden,), mean=GAIN_HEAD - 1)


GEMMA2 = Gemma(generation=2, layers=(SLIDING, FULL) * 2)
# Two layers with a window for each without: vLLM makes three groups that share their bytes.
GEMMA3 = Gemma(generation=3, layers=(SLIDING, SLIDING, FULL) * 2)
