"""Where blocks lie in vLLM's KV cache, by the description that vLLM gives of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mini_groups as mini
from tiering.errors import ConfigError
from tiering.layout import ShareLayout
from tiering_connectors.vllm.geometry import (
    Geometry,
    Region,
    _refuse_layout,
    _regions,
    device_type,
    layer_specs,
    layout_digest,
)

BLOCKS, PAGE, LAYERS = 5, 64, 3
TORCH = "needs torch: `make test` installs it"


def tensor(
    layers: list[str], layer_stride: int, block_stride: int, offset: int = 0
) -> SimpleNamespace:
    """As vLLM's `KVCacheTensor`."""
    return SimpleNamespace(
        layers=layers, layer_stride=layer_stride, block_stride=block_stride, offset=offset
    )


def layers_of(name: str, count: int = LAYERS) -> list[str]:
    return [f"{name} {i}" for i in range(count)]


def regions_of(
    tensors: list[SimpleNamespace], layers: list[str], page: int | dict[str, int] = PAGE
) -> tuple[Region, ...]:
    spec: Any = SimpleNamespace(page_size_bytes=page)
    if isinstance(page, dict):
        each = {name: SimpleNamespace(page_size_bytes=size) for name, size in page.items()}
        spec = SimpleNamespace(kv_cache_specs=each)
    return _regions(SimpleNamespace(kv_cache_tensors=tensors), set(layers), spec)  # type: ignore[arg-type]


def geometry(*regions: tuple[Region, ...], per_chunk: int = 2) -> Geometry:
    groups = mini.numbered([mini.full(16, per_chunk) for _ in regions])
    return Geometry(groups, regions, 16, BLOCKS, world=1, share_bytes=0)


LAYERS_OUTERMOST = [tensor(layers_of("a"), PAGE * BLOCKS, PAGE)]
BLOCKS_OUTERMOST = [tensor(layers_of("a"), PAGE, PAGE * LAYERS)]


def test_layers_outermost_give_a_region_each() -> None:
    regions = regions_of(LAYERS_OUTERMOST, layers_of("a"))
    assert regions == tuple(Region(i * PAGE * BLOCKS, PAGE, PAGE) for i in range(LAYERS))
    assert geometry(regions).shares == (ShareLayout((PAGE,) * LAYERS, 2),)
    assert geometry(regions).block_bytes == [PAGE * LAYERS]


def test_blocks_outermost_give_one_region_for_all_layers() -> None:
    regions = regions_of(BLOCKS_OUTERMOST, layers_of("a"))
    assert regions == (Region(0, PAGE * LAYERS, PAGE * LAYERS),)
    assert geometry(regions).block_bytes == [PAGE * LAYERS]


def test_pages_with_a_gap_between_them_are_not_joined() -> None:
    """Padding, and pages of others between those of the group."""
    padded = regions_of(BLOCKS_OUTERMOST, layers_of("a"), page=PAGE - 16)
    assert padded == tuple(Region(i * PAGE, PAGE * LAYERS, PAGE - 16) for i in range(LAYERS))
    outer = regions_of(BLOCKS_OUTERMOST, ["a 0", "a 2"])
    assert outer == (Region(0, PAGE * LAYERS, PAGE), Region(2 * PAGE, PAGE * LAYERS, PAGE))


def test_pages_that_follow_each_other_with_another_stride_are_not_joined() -> None:
    tensors = [tensor(["a 0"], 0, 4 * PAGE), tensor(["a 1"], 0, 2 * PAGE, offset=PAGE)]
    assert regions_of(tensors, layers_of("a", 2)) == (
        Region(0, 4 * PAGE, PAGE),
        Region(PAGE, 2 * PAGE, PAGE),
    )
    # Layer outermost, one block: what follows is another block, not the rest of this one.
    single = [tensor(layers_of("a", 2), PAGE, PAGE)]
    assert len(regions_of(single, layers_of("a", 2))) == 2


def test_groups_may_lie_on_the_same_bytes() -> None:
    tensors = [
        tensor(layers_of("a"), PAGE * BLOCKS, PAGE),
        tensor(layers_of("b", 2), PAGE * BLOCKS, PAGE),
    ]
    first = regions_of(tensors, layers_of("a"))
    second = regions_of(tensors, layers_of("b", 2), page=PAGE // 2)
    assert second == tuple(Region(region.offset, PAGE, PAGE // 2) for region in first[:2])
    both = geometry(first, second)
    assert both.block_bytes == [3 * PAGE, PAGE]
    assert [share.share_bytes for share in both.shares] == [6 * PAGE, 2 * PAGE]


def test_layers_of_one_group_may_have_pages_of_several_sizes() -> None:
    tensors = [tensor(["a 0"], 0, 3 * PAGE), tensor(["a 1"], 0, 3 * PAGE, offset=PAGE)]
    regions = regions_of(tensors, layers_of("a", 2), page={"a 0": PAGE, "a 1": 2 * PAGE})
    assert regions == (Region(0, 3 * PAGE, 3 * PAGE),)


def test_a_rank_may_have_no_layer_of_a_group() -> None:
    assert regions_of(LAYERS_OUTERMOST, layers_of("b")) == ()
    both = geometry(regions_of(LAYERS_OUTERMOST, layers_of("a")), ())
    assert both.block_bytes == [3 * PAGE, 0]


def test_blocks_of_all_groups_end_at_multiples_of_their_block_sizes() -> None:
    groups = mini.numbered([mini.full(4), mini.window(20, 6), mini.state(8)])
    of_all = mini.geometry_for(groups, 2, BLOCKS, world=4, replicas=2)
    assert of_all.align == 24
    assert [of_all.hashes_per_chunk(group) for group in groups] == [2, 3, 4]
    assert [of_all.share_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert of_all.row.payload_bytes == 2 * of_all.share_bytes


@pytest.mark.parametrize("tensors", [LAYERS_OUTERMOST, BLOCKS_OUTERMOST])
def test_the_pages_are_the_tensors_own_memory(tensors: list[SimpleNamespace]) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    (placed,) = tensors
    raw = torch.arange(LAYERS * BLOCKS * PAGE, dtype=torch.int32).to(torch.uint8)
    caches = {
        name: raw.as_strided(
            (BLOCKS, 1, 1, PAGE), (placed.block_stride, PAGE, PAGE, 1), i * placed.layer_stride
        )
        for i, name in enumerate(placed.layers)
    }
    halves = [layers_of("a", 2), ["a 2"]]
    groups = geometry(*(regions_of(tensors, layers) for layers in halves)).pages(caches)
    for layers, own in zip(halves, groups, strict=True):
        for block in range(BLOCKS):
            whole = np.concatenate([page[block] for page in own.pages])
            wanted = np.concatenate([caches[name][block].numpy().ravel() for name in layers])
            assert (whole == wanted).all()
    groups[0].pages[0][0, 0] = 255 - groups[0].pages[0][0, 0]
    assert groups[0].pages[0][0, 0] == caches["a 0"][0, 0, 0, 0]


def test_memory_smaller_than_described_is_refused() -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    regions = regions_of(LAYERS_OUTERMOST, layers_of("a"))
    short = torch.zeros(LAYERS * BLOCKS * PAGE - 1, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="less than it described"):
        geometry(regions).pages({"a 0": short})


def test_the_digest_tells_layouts_apart_and_not_where_they_lie() -> None:
    torch = pytest.importorskip("torch", reason=TORCH)

    def digest(
        shape: tuple[int, ...], layout: str | None = None, names: str = "ab", blocks: int = BLOCKS
    ) -> bytes:
        raw = torch.zeros(4 * blocks * PAGE, dtype=torch.uint8)
        first = raw[: blocks * PAGE].view(blocks, *shape)
        # A recurrent layer has several tensors.
        page = raw[blocks * PAGE :].view(-1, PAGE)[:blocks]
        states = [page[:, : PAGE // 2], page[:, PAGE // 2 :]]
        config: Any = SimpleNamespace(kv_cache_layout=layout)
        regions = regions_of([tensor(layers_of("a"), PAGE * blocks, PAGE)], layers_of("a"))
        return layout_digest({names[0]: first, names[1]: states}, config, geometry(regions))

    whole = digest((PAGE,))
    assert digest((PAGE,)) == whole
    assert digest((PAGE,), blocks=2 * BLOCKS) == whole
    others = {digest((2, PAGE // 2)), digest((PAGE,), "LBHNC"), digest((PAGE,), names="ac")}
    assert len(others | {whole}) == 4


def test_all_of_a_workers_cache_must_be_on_one_device() -> None:
    def on(kind: str) -> Any:
        return SimpleNamespace(device=SimpleNamespace(type=kind))

    assert device_type({"a": on("cpu"), "b": [on("cpu"), on("cpu")]}) == "cpu"
    with pytest.raises(ConfigError, match="cpu, meta"):
        device_type({"a": on("cpu"), "b": [on("cpu"), on("meta")]})


def test_the_specs_of_a_group_are_those_of_its_layers() -> None:
    one = SimpleNamespace(kv_cache_specs=None)
    assert layer_specs(one) == [one]
    assert layer_specs(SimpleNamespace(kv_cache_specs={"a": 1, "b": 2})) == [1, 2]


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layouts_that_spread_a_block_are_refused(layout: str) -> None:
    with pytest.raises(ConfigError, match=layout):
        _refuse_layout(layout)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", None])
def test_layouts_that_keep_a_block_together_are_served(layout: str | None) -> None:
    _refuse_layout(layout)
