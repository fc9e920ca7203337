"""Qwen3-Next: layers with a recurrent state (a gated delta net) and full attention take turns.

Each layer ends in a small mixture of experts. Its norms multiply by one more than their weight,
those of the delta net by the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tiering_benchmarks.models.weights import (
    GAIN_HEAD,
    GAIN_MLP,
    GAIN_QK,
    GAIN_VO,
    VOCABULARY,
    Weight,
    attention,
    embedding,
    mlp,
)

LINEAR, FULL = "linear_attention", "full_attention"
# The logarithm of the rate at which a state fades: over hundreds of tokens, so that it matters
# what a prompt said blocks ago.
LOG_FADING = -5.0


@dataclass(frozen=True, slots=True)
class Qwen3Next:
    """Its dimensions; `state_*` are those of the delta net, whose heads are of `head_dim`, too."""

    layers: tuple[str, ...] = (LINEAR, FULL) * 2
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    state_key_heads: int = 2
    state_value_heads: int = 4
    state_window: int = 4
    experts: int = 4
    experts_per_token: int = 2
    intermediate: int = 128

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": len(self.layers),
            "layer_types": list(self.layers),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.state_key_heads,
            "linear_num_value_heads": self.state_value_heads,
            "linear_key_head_dim": self.head_dim,
            "linear_value_head_dim": self.head_dim,
            "linear_conv_kernel_dim": self.state_window,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.intermediate,
            "shared_expert_intermediate_size": self.intermediate,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
        }

    def weights(self) -> Iterator[Weight]:
        yield embedding("model.embed_tokens.weight", self.hidden)
        for layer, kind in enumerate(self.layers):
            at = f"model.layers.{layer}"
            yield from (
                self._state(f"{at}.linear_attn")
                if kind == LINEAR
                else self._full(f"{at}.self_attn")
            )
            yield from self._experts(f"{at}.mlp")
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield Weight(f"{at}.{norm}.weight", (self.hidden,))
        yield Weight("model.norm.weight", (self.hidden,))
        yield Weight("lm_head.weight", (VOCABULARY, self.hidden), GAIN_HEAD, tokens=True)

    def _state(self, at: str) -> Iterator[Weight]:
        keys, values = self.state_key_heads * self.head_dim, self.state_value_heads * self.head_dim
        heads = self.state_value_heads
        yield Weight(f"{at}.in_proj_qkvz.weight", (2 * keys + 2 * values, self.hidden), GAIN_VO)
        yield Weight(f"{at}.in_proj_ba.weight", (2 * heads, self.hidden), 1.0)
        yield Weight(f"{at}.conv1d.weight", (2 * keys + values, 1, self.state_window), 1.0)
        yield Weight(f"{at}.out_proj.weight", (self.hidden, values), GAIN_VO)
        yield Weight(f"{at}.norm.weight", (self.head_dim,), mean=1.0)
        yield Weight(f"{at}.A_log", (heads,), mean=LOG_FADING)
        yield Weight(f"{at}.dt_bias", (heads,))

    def _full(self, at: str) -> Iterator[Weight]:
        queries, pairs = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield from attention(at, self.hidden, queries, pairs, gates=queries)
        for norm in ("q_norm", "k_norm"):
            yield Weight(f"{at}.{norm}.weight", (self.head_dim,), mean=GAIN_QK - 1)

    def _experts(self, at: str) -> Iterator[Weight]:
        yield Weight(f"{at}.gate.weight", (self.experts, self.hidden), 1.0)
        yield Weight(f"{at}.shared_expert_gate.weight", (1, self.hidden), GAIN_MLP)
        for expert in ("shared_expert", *(f"experts.{n}" for n in range(self.experts))):
            yield from mlp(f"{at}.{expert}", self.hidden, self.intermediate)
