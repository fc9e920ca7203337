"""Which seed vLLM's block hashes start from: keys of engines with other seeds never meet.

Read off vLLM's own rule, since the seed itself is set only after the connectors are made. An
engine whose seed is random stores under keys that no other engine, and no restart, ever asks for.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

from tiering.namespace import RANDOM_HASH_SEED

log = logging.getLogger("tiering")

# All engines with a random seed share one directory: a directory each would leave one behind at
# each start, and the bound on the disk lets the oldest of what they stored in vain go first.
RANDOM = RANDOM_HASH_SEED

UNKNOWN = "unknown"
"""In place of a digest where this vLLM has another rule."""


def hash_seed_digest(algorithm: str) -> str:
    """64 hex digits that are equal for engines whose first hash is equal, or RANDOM, or UNKNOWN.
    `algorithm` is `cache_config.prefix_caching_hash_algo`."""
    try:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

        hash_of = get_hash_fn_by_name(algorithm)
        seed, other = resolve_none_hash_seed(hash_of), resolve_none_hash_seed(hash_of)
        if seed != other:
            return RANDOM
        return hashlib.sha256(bytes(hash_of(seed))).hexdigest()
    except Exception as error:
        log.debug("the seed of block hashes cannot be told: %s", error)
        return UNKNOWN


def hash_warning(algorithm: str, seed_digest: str, tiers: Sequence[str]) -> str | None:
    """What to say at start of a seed that makes `tiers`, by their names, useless after a restart
    and to other engines."""
    if seed_digest != RANDOM or not tiers:
        return None
    return (
        f"block hashes start from a random seed (--prefix-caching-hash-algo {algorithm} without "
        f"PYTHONHASHSEED): what this engine stores in {', '.join(tiers)} is found by no other "
        f"engine, nor by itself after a restart. Set PYTHONHASHSEED to the same value for all "
        f"engines that share it, or use sha256"
    )
