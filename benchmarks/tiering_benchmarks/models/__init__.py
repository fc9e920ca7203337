"""Tiny models, made on the spot: random weights, a local tokenizer, nothing downloaded.

The same recipe gives the same bytes on the same Python and torch. What matters about the weights:
attention is peaky and outweighs the residual stream, so one wrong block of KV cache, far back in
the prompt, changes what the model says. (With usual random weights it would not, and tests would
prove nothing.) Each family has its file; `making` writes the folders.
"""

from tiering_benchmarks.models.command import add_command
from tiering_benchmarks.models.extras import make_adapter, make_draft
from tiering_benchmarks.models.llama import SIZES
from tiering_benchmarks.models.making import MODELS, RECIPE_FILE, make_model
from tiering_benchmarks.models.weights import VOCABULARY

__all__ = [
    "MODELS",
    "RECIPE_FILE",
    "SIZES",
    "VOCABULARY",
    "add_command",
    "make_adapter",
    "make_draft",
    "make_model",
]
