"""Which namespace a running vLLM belongs to: everything that changes the bytes of its KV cache.

Read off vLLM's configuration, the weights on disk and the machine, in the scheduler's process, at
start. Where something cannot be told, it makes a namespace of its own rather than a shared one.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiering.keys import tagged
from tiering.namespace import Namespace
from tiering_connectors.vllm.geometry import Geometry
from tiering_connectors.vllm.hashing import hash_seed_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("tiering")

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_SAMPLES = 16
_SAMPLE_BYTES = 4096


def namespace_of(
    vllm_config: VllmConfig, geometry: Geometry, layout_digests: Sequence[bytes]
) -> Namespace:
    """`layout_digests`: what each rank said of its tensors, in rank order."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    revision = model.revision or _cached_revision(model.model)
    return Namespace(
        model=model.model,
        revision=revision,
        weights_fingerprint=_fingerprint(model),
        kv_dtype=f"{cache.cache_dtype} of {model.dtype}",
        layout=hashlib.sha256(b"".join(layout_digests)).hexdigest(),
        backend=_device_type(),
        platform=f"{platform.system()} {platform.machine()}",
        isa=_isa(),
        engine=_engine(),
        tokens_per_block=geometry.align,
        blocks_per_chunk=max(group.blocks_per_chunk for group in geometry.groups),
        groups=tuple(map(repr, geometry.groups)),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        pcp_size=getattr(parallel, "prefill_context_parallel_size", 1),
        dcp_size=parallel.decode_context_parallel_size,
        share_bytes=geometry.share_bytes,
        ranks=geometry.row.ranks,
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=hash_seed_digest(str(cache.prefix_caching_hash_algo)),
    )


def _fingerprint(model: Any) -> str:
    """Of the weights, where they lie in a local folder, and of the configuration that vLLM runs
    them with: overrides of RoPE or quantisation change K without changing a file."""
    fields = [
        ("config", model.hf_config.to_json_string().encode()),
        ("quantization", str(model.quantization).encode()),
        ("load_format", str(model.config_format).encode()),
    ]
    folder = Path(model.model)
    if folder.is_dir():
        fields.append(("weights", weights_digest(folder)))
    return hashlib.sha256(tagged(fields)).hexdigest()


def weights_digest(folder: Path) -> bytes:
    """Of a folder's weight files: names, sizes, and 16 samples of 4 KiB spread over each. Cheap at
    any size, and another training run differs in all of them."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in WEIGHT_SUFFIXES):
        size = path.stat().st_size
        digest.update(tagged([("name", path.name.encode()), ("size", b"%d" % size)]))
        with path.open("rb") as file:
            for at in _sample_offsets(size):
                file.seek(at)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def _sample_offsets(size: int) -> Iterable[int]:
    last = max(0, size - _SAMPLE_BYTES)
    return sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)})


def _cached_revision(model: str) -> str:
    """The commit of a model from a hub, read from where its files lie in the local cache."""
    if Path(model).is_dir():
        return ""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
    except Exception as error:
        log.debug("no cached revision of %s: %s", model, error)
        return ""
    return Path(found).parent.name if isinstance(found, str) else ""


def _device_type() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def _isa() -> str:
    """On the CPU backend vLLM repacks K for the instruction set; elsewhere it does not matter."""
    if _device_type() != "cpu":
        return ""
    import torch

    capability = str(torch.backends.cpu.get_cpu_capability())
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: "unknown")()
    return f"{capability} amx={amx}"


def _engine() -> str:
    import vllm

    return f"vllm {vllm.__version__}"
