"""What is read off vLLM's own description of a KV cache, kind by kind, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiering.config import EXTRA_CONFIG, ConnectorConfig, parse
from tiering.errors import ConfigError
from tiering_connectors.vllm.geometry import Geometry, Region, geometry_of
from tiering_connectors.vllm.groups import Kind

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    # vLLM's own imports are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

BLOCKS = 6
HEADS = {"num_kv_heads": 2, "head_size": 8}


def spec(kind: str, block_size: int = 16, **facts: Any) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface

    made = getattr(kv_cache_interface, kind)
    if kind == "MambaSpec":
        states = {"shapes": ((4, 8), (2,)), "dtypes": (torch.float32, torch.float32)}
        return made(block_size=block_size, **states, **facts)
    return made(block_size=block_size, dtype=torch.float32, **HEADS, **facts)


def group(kv_cache_spec: Any, *layers: str, **facts: Any) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    return KVCacheGroupSpec(list(layers), kv_cache_spec, **facts)


def config_of(*groups: Any, **facts: Any) -> Any:
    """Every group from the first byte on, layer after layer."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

    tensors = []
    for own in groups:
        page = own.kv_cache_spec.page_size_bytes // (
            len(own.layer_names) if hasattr(own.kv_cache_spec, "kv_cache_specs") else 1
        )
        size = page * BLOCKS * len(own.layer_names)
        tensors.append(KVCacheTensor(size, own.layer_names, page * BLOCKS, page))
    return KVCacheConfig(BLOCKS, tensors, list(groups), **{"hash_block_size": 16, **facts})


def read(
    config: Any,
    parallel: dict[str, int] | None = None,
    theirs: dict[str, Any] | None = None,
    **ours: Any,
) -> Geometry:
    """`theirs`: other parts of vLLM's configuration."""
    sizes = {"world_size": 1, "tensor_parallel_size": 1} | (parallel or {})
    vllm_config: Any = SimpleNamespace(parallel_config=SimpleNamespace(**sizes), **(theirs or {}))
    tier = {"cpu_bytes_to_use": 1 << 30}
    return geometry_of(vllm_config, config, parse(ConnectorConfig, tier | ours, EXTRA_CONFIG))


SERVED: list[tuple[str, dict[str, Any], Kind, int, int]] = [
    ("FullAttentionSpec", {}, Kind.FULL, 0, 4),
    ("FullAttentionSpec", {"sliding_window": 64}, Kind.FULL, 0, 4),
    ("MLAAttentionSpec", {"cache_dtype_str": "auto"}, Kind.FULL, 0, 4),
    ("RSWASpec", {"rswa_window": 64}, Kind.FULL, 0, 4),
    ("SlidingWindowSpec", {"sliding_window": 100}, Kind.WINDOW, 100, 4),
    ("SlidingWindowSpec", {"sliding_window": 40}, Kind.WINDOW, 40, 2),
    (
        "SlidingWindowSpec",
        {"sliding_window": 60, "extra_retained_tokens": 8},
        Kind.WINDOW,
        68,
        4,
    ),
    ("SlidingWindowMLASpec", {"sliding_window": 100}, Kind.WINDOW, 100, 4),
    ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 32}, Kind.LOCAL, 32, 2),
    ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 8192}, Kind.LOCAL, 8192, 4),
    ("MambaSpec", {"mamba_cache_mode": "align"}, Kind.STATE, 0, 1),
]


@pytest.mark.parametrize(("name", "facts", "kind", "span", "per_chunk"), SERVED)
def test_each_kind_is_served_for_what_it_keeps(
    name: str, facts: dict[str, Any], kind: Kind, span: int, per_chunk: int
) -> None:
    own = spec(name, **facts)
    found = read(config_of(group(own, "a", "b")), blocks_per_chunk=4)
    (only,) = found.groups
    assert (only.kind, only.span, only.blocks_per_chunk) == (kind, span, per_chunk)
    assert (only.index, only.tokens_per_block, only.is_draft) == (0, 16, False)
    page = own.page_size_bytes
    assert found.regions == ((Region(0, page, page), Region(page * BLOCKS, page, page)),)
    assert found.share_bytes == 2 * page * per_chunk
    assert (found.num_blocks, found.world, found.replicas) == (BLOCKS, 1, 1)


def test_a_group_of_several_page_sizes_is_one_group() -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor, UniformTypeKVCacheSpecs

    small, large = spec("FullAttentionSpec"), spec("FullAttentionSpec", head_size_v=24)
    first, second = small.page_size_bytes, large.page_size_bytes
    assert first < second
    both = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"a": small, "b": large, "c": small}
    )
    stride = 2 * first + second
    tensors = [
        KVCacheTensor(stride * BLOCKS, ["b"], 0, stride),
        KVCacheTensor(stride * BLOCKS, ["a", "c"], first, stride, offset=second),
    ]
    config = KVCacheConfig(BLOCKS, tensors, [group(both, "a", "b", "c")], hash_block_size=16)
    found = read(config)
    assert found.groups[0].kind is Kind.FULL
    assert found.regions == ((Region(0, stride, stride),),)


def test_groups_of_a_hybrid_model_are_kept_apart() -> None:
    groups = [
        group(spec("FullAttentionSpec"), "a"),
        group(spec("SlidingWindowSpec", 32, sliding_window=1024), "b", "c", is_eagle_group=True),
        group(spec("MambaSpec", 64, mamba_cache_mode="align"), "d"),
    ]
    found = read(config_of(*groups), block_size=64)
    assert [g.index for g in found.groups] == [0, 1, 2]
    assert [g.kind for g in found.groups] == [Kind.FULL, Kind.WINDOW, Kind.STATE]
    assert [g.tokens_per_chunk for g in found.groups] == [64, 64, 64]
    assert [g.is_draft for g in found.groups] == [False, True, False]
    assert found.align == 64
    assert {regions[0].offset for regions in found.regions} == {0}
    assert found.share_bytes == max(share.share_bytes for share in found.shares)
    assert len({g.description for g in found.groups}) == 3


@pytest.mark.parametrize(
    ("marked", "drops", "drafts"),
    [
        (False, None, [False, False]),
        (False, True, [True, True]),
        (False, False, [False, False]),
        (True, True, [False, True]),
    ],
)
def test_where_vllm_marks_no_draft_any_group_may_be_one(
    marked: bool, drops: bool | None, drafts: list[bool]
) -> None:
    full = spec("FullAttentionSpec")
    config = config_of(group(full, "a"), group(full, "b", is_eagle_group=marked))
    speculative = None if drops is None else SimpleNamespace(use_eagle_block_drop=lambda: drops)
    if speculative is not None:
        speculative.use_eagle = speculative.use_eagle_block_drop
    found = read(config, theirs={"speculative_config": speculative})
    assert [own.is_draft for own in found.groups] == drafts


def test_latent_attention_over_whole_prompts_only_is_refused() -> None:
    config = config_of(group(spec("MLAAttentionSpec"), "a"))

    def theirs(use_mla: bool, in_pieces: bool) -> dict[str, Any]:
        return {
            "model_config": SimpleNamespace(use_mla=use_mla),
            "scheduler_config": SimpleNamespace(enable_chunked_prefill=in_pieces),
        }

    for use_mla, in_pieces in ((True, True), (False, False), (False, True)):
        assert read(config, theirs=theirs(use_mla, in_pieces)).world == 1
    with pytest.raises(ConfigError, match="--enable-chunked-prefill = False: vLLM cannot go on"):
        read(config, theirs=theirs(use_mla=True, in_pieces=False))


def test_what_a_group_holds_is_told_apart_by_its_description() -> None:
    def told(name: str, **facts: Any) -> str:
        return read(config_of(group(spec(name, **facts), "a"))).groups[0].description

    windows = [told("SlidingWindowSpec", sliding_window=wide) for wide in (64, 128)]
    wide = told("FullAttentionSpec", head_size_v=16)
    assert len({*windows, wide, told("FullAttentionSpec")}) == 4
    assert told("FullAttentionSpec") == told("FullAttentionSpec")


def test_ranks_multiply_rows_and_replicas_do_not() -> None:
    config = config_of(group(spec("MLAAttentionSpec"), "a"), kv_tp_replicas=4)
    ranks = {"world_size": 8, "tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    found = read(config, ranks)
    assert (found.world, found.replicas) == (8, 4)
    assert found.row.payload_bytes == 2 * found.share_bytes
    odd = read(config, {"world_size": 6, "tensor_parallel_size": 6})
    assert odd.replicas == 1


def refusal(config: Any, parallel: dict[str, int] | None = None, **ours: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(config, parallel, **ours)
    return str(caught.value)


NOT_FOUND_AGAIN = (
    "vLLM does not find its blocks again by their hash; "
    "use a model without such layers, or no connector"
)


@pytest.mark.parametrize(
    ("name", "facts", "of_group", "told"),
    [
        (
            "MambaSpec",
            {"mamba_cache_mode": "none"},
            {},
            "kv_cache_groups[1] = \"MambaSpec with mamba_cache_mode 'none'\": keeps no state at "
            "the end of a block, so there is nothing to go on from; "
            "start vLLM with --enable-prefix-caching --mamba-cache-mode align",
        ),
        (
            "CircularBufferSpec",
            {},
            {},
            f"kv_cache_groups[1] = 'CircularBufferSpec': {NOT_FOUND_AGAIN}",
        ),
        (
            "SlidingWindowMLASpec",
            {"sliding_window": 64, "bounded_replay": True},
            {},
            f"kv_cache_groups[1] = 'SlidingWindowMLASpec': {NOT_FOUND_AGAIN}",
        ),
        (
            "FullAttentionSpec",
            {},
            {"host_resident": True},
            f"kv_cache_groups[1] = 'FullAttentionSpec': {NOT_FOUND_AGAIN}",
        ),
        (
            "FullAttentionSpec",
            {},
            {"enable_kv_transfer": False},
            f"kv_cache_groups[1] = 'FullAttentionSpec': {NOT_FOUND_AGAIN}",
        ),
        (
            "CrossAttentionSpec",
            {},
            {},
            "kv_cache_groups[1] = 'CrossAttentionSpec': this kind of KV cache is not served; "
            "use a model without such layers, or no connector",
        ),
    ],
)
def test_a_kind_that_cannot_be_kept_is_refused_with_the_reason(
    name: str, facts: dict[str, Any], of_group: dict[str, Any], told: str
) -> None:
    fine = group(spec("FullAttentionSpec"), "a")
    config = config_of(fine, group(spec(name, **facts), "b", **of_group))
    assert refusal(config) == told


def test_a_model_without_a_cache_is_refused() -> None:
    assert refusal(config_of()) == (
        "kv_cache_groups = 'none': the model has no KV cache, so there is nothing to keep; "
        "start it without the connector"
    )


def test_blocks_that_are_not_whole_hashes_are_refused() -> None:
    config = config_of(group(spec("FullAttentionSpec", 24), "a"))
    assert refusal(config) == (
        "--block-size = '24': is not a multiple of the 16 tokens that vLLM hashes at a time; "
        "choose a multiple of 16"
    )


def test_chunks_that_are_not_whole_blocks_are_refused() -> None:
    config = config_of(group(spec("FullAttentionSpec"), "a"))
    assert "is not a multiple of the 16 tokens in a block" in refusal(config, block_size=40)


def test_a_layout_that_spreads_blocks_is_refused() -> None:
    config = config_of(group(spec("FullAttentionSpec"), "a"), kv_cache_layout="LHBNC")
    assert refusal(config).startswith("kv_cache_layout = 'LHBNC': spreads a block")


@pytest.mark.parametrize(
    ("size", "flag"),
    [
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("nnodes", "--nnodes"),
    ],
)
def test_parallelism_that_is_not_served_is_refused(size: str, flag: str) -> None:
    config = config_of(group(spec("FullAttentionSpec"), "a"))
    assert refusal(config, {size: 2}) == (
        f"{flag} = 2: this version of the TieredConnector does not serve it; write 1"
    )
    assert read(config, {size: 1}).world == 1
