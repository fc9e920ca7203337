"""Llama 4's text part: attention within chunks, and full attention, take turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tiering_benchmarks.models.weights import (
    GAIN_HEAD,
    VOCABULARY,
    Weight,
    attention,
    embedding,
    mlp,
)


@dataclass(frozen=True, slots=True)
class Llama4:
    """Its dimensions; `chunked` says for each layer whether it looks no further than its chunk."""

    chunked: tuple[bool, ...] = (True, False) * 2
    chunk: int = 256
    hidden: int = 256
    intermediate: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "intermediate_size_mlp": self.intermediate,
            "num_hidden_layers": len(self.chunked),
            "no_rope_layers": [int(chunked) for chunked in self.chunked],
            "attention_chunk_size": self.chunk,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            # Normed queries and keys would spread attention thin.
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            # No layer has experts.
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
            "num_local_experts": 1,
            "hidden_act": "silu",
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
        }

    def weights(self) -> Iterator[Weight]:
        queries, pairs = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield embedding("model.embed_tokens.weight", self.hidden)
        for layer in range(len(self.chunked)):
            at = f"model.layers.{layer}"
            yield from attention(f"{at}.self_attn", self.hidden, queries, pairs)
            yield from mlp(f"{at}.feed_forward", self.hidden, self.intermediate)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield Weight(f"{at}.{norm}.weight", (self.hidden,), mean=1.0)
        yield Weight("model.norm.weight", (self.hidden,), mean=1.0)
        yield Weight("lm_head.weight", (VOCABULARY, self.hidden), GAIN_HEAD, tokens=True)
