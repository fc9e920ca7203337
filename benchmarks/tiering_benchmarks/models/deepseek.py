"""DeepSeek-V2: latent attention. The KV cache has one compressed vector a token for all heads.

vLLM's CPU kernel is made for the vector of the large models, so that one is of full size here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tiering_benchmarks.models.weights import (
    GAIN_HEAD,
    GAIN_QK,
    GAIN_VO,
    VOCABULARY,
    Weight,
    embedding,
    mlp,
)


@dataclass(frozen=True, slots=True)
class Deepseek:
    """Its dimensions; `latent` and `rotary` are the two parts of a token's vector."""

    layers: int = 3
    hidden: int = 256
    intermediate: int = 512
    heads: int = 4
    head_dim: int = 64
    latent: int = 512
    rotary: int = 64

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            # No layer has experts.
            "first_k_dense_replace": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": self.latent,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": self.rotary,
            "v_head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
        }

    def weights(self) -> Iterator[Weight]:
        hidden, heads, latent = self.hidden, self.heads, self.latent
        yield embedding("model.embed_tokens.weight", hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            own = f"{at}.self_attn"
            queries = heads * (self.head_dim + self.rotary)
            yield Weight(f"{own}.q_proj.weight", (queries, hidden), GAIN_QK)
            yield Weight(
                f"{own}.kv_a_proj_with_mqa.weight", (latent + self.rotary, hidden), GAIN_QK
            )
            yield Weight(f"{own}.kv_a_layernorm.weight", (latent,), mean=1.0)
            yield Weight(f"{own}.kv_b_proj.weight", (heads * 2 * self.head_dim, latent), GAIN_QK)
            yield Weight(f"{own}.o_proj.weight", (hidden, heads * self.head_dim), GAIN_VO)
            yield from mlp(f"{at}.mlp", hidden, self.intermediate)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield Weight(f"{at}.{norm}.weight", (hidden,), mean=1.0)
        yield Weight("model.norm.weight", (hidden,), mean=1.0)
        yield Weight("lm_head.weight", (VOCABULARY, hidden), GAIN_HEAD, tokens=True)
