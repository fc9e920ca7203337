"""Llama: full attention in every layer; with the draft that guesses its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
class Llama:
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

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
        }

    def weights(self) -> Iterator[Weight]:
        yield embedding("model.embed_tokens.weight", self.hidden)
        yield from self.matrices("model.")
        yield Weight("lm_head.weight", (VOCABULARY, self.hidden), GAIN_HEAD, tokens=True)
        for layer in range(self.layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield Weight(f"model.layers.{layer}.{norm}.weight", (self.hidden,), mean=1.0)
        yield Weight("model.norm.weight", (self.hidden,), mean=1.0)

    def matrices(self, prefix: str) -> Iterator[Weight]:
        """Those of the layers."""
        queries, pairs = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            at = f"{prefix}layers.{layer}"
            yield from attention(f"{at}.self_attn", self.hidden, queries, pairs)
            yield from mlp(f"{at}.mlp", self.hidden, self.intermediate)


@dataclass(frozen=True, slots=True)
class EagleDraft:
    """One layer that reads a Llama's last hidden state and the token that followed it.

    Embedding and head are the Llama's own. Its guesses are random and mostly wrong: it is there
    for the KV cache that it keeps beside the Llama's.
    """

    of: Llama

    def config(self) -> dict[str, Any]:
        return self._layer().config()

    def weights(self) -> Iterator[Weight]:
        hidden = self.of.hidden
        yield Weight("fc.weight", (hidden, 2 * hidden), 1.0)
        yield from self._layer().matrices("")
        yield Weight("layers.0.post_attention_layernorm.weight", (hidden,), mean=1.0)

    def _layer(self) -> Llama:
        return replace(self.of, layers=1)


SIZES = {
    # For tests: a prompt of 4096 tokens costs under a CPU second.
    "tiny": Llama(layers=4, hidden=256, intermediate=512, heads=4, kv_heads=2),
    # 92 million parameters: computing a long prompt takes seconds on two cores, reading it does
    # not.
    "demo": Llama(layers=14, hidden=768, intermediate=2048, heads=12, kv_heads=2),
}
