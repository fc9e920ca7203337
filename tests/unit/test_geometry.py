"""Where blocks lie in vLLM's KV cache, by the description that vLLM gives of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tiering.errors import ConfigError
from tiering_connectors.vllm.geometry import Geometry, Region, _refuse_layout, _regions

BLOCKS, PAGE, LAYERS = 5, 64, 3


def placed(layer_stride: int, block_stride: int) -> Any:
    tensor = SimpleNamespace(
        layers=[f"layer {i}" for i in range(LAYERS)],
        layer_stride=layer_stride,
        block_stride=block_stride,
        offset=0,
    )
    return SimpleNamespace(kv_cache_tensors=[tensor], num_blocks=BLOCKS)


def geometry(regions: tuple[Region, ...]) -> Geometry:
    return Geometry(
        tokens_per_block=16,
        hashes_per_block=1,
        num_blocks=BLOCKS,
        regions=regions,
        blocks_per_chunk=2,
        ranks=1,
        group="full attention",
    )


def test_layers_outermost_give_a_region_each() -> None:
    regions = _regions(placed(layer_stride=PAGE * BLOCKS, block_stride=PAGE))
    assert regions == tuple(Region(i * PAGE * BLOCKS, PAGE, PAGE) for i in range(LAYERS))
    assert geometry(regions).share.share_bytes == 2 * LAYERS * PAGE


def test_blocks_outermost_give_one_region_for_all_layers() -> None:
    regions = _regions(placed(layer_stride=PAGE, block_stride=PAGE * LAYERS))
    assert regions == (Region(0, PAGE * LAYERS, PAGE * LAYERS),)
    assert geometry(regions).share.share_bytes == 2 * LAYERS * PAGE


@pytest.mark.parametrize(("layer_stride", "block_stride"), [(PAGE * BLOCKS, PAGE), (PAGE, 192)])
def test_the_pages_are_the_tensors_own_memory(layer_stride: int, block_stride: int) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: `make test` installs it")
    raw = torch.arange(LAYERS * BLOCKS * PAGE, dtype=torch.int32).to(torch.uint8)
    caches = {
        f"layer {i}": raw.as_strided(
            (BLOCKS, 1, 1, PAGE), (block_stride, PAGE, PAGE, 1), i * layer_stride
        )
        for i in range(LAYERS)
    }
    pages = geometry(_regions(placed(layer_stride, block_stride))).pages(caches)
    for block in range(BLOCKS):
        whole = np.concatenate([page[block] for page in pages])
        wanted = np.concatenate([caches[name][block].numpy().ravel() for name in sorted(caches)])
        assert (whole == wanted).all()
    pages[0][0, 0] = 255 - pages[0][0, 0]
    assert pages[0][0, 0] == caches["layer 0"][0, 0, 0, 0]


def test_memory_smaller_than_described_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: `make test` installs it")
    regions = _regions(placed(layer_stride=PAGE * BLOCKS, block_stride=PAGE))
    short = torch.zeros(LAYERS * BLOCKS * PAGE - 1, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="less than it described"):
        geometry(regions).pages({"layer 0": short})


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layouts_that_spread_a_block_are_refused(layout: str) -> None:
    with pytest.raises(ConfigError, match=layout):
        _refuse_layout(layout)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", None])
def test_layouts_that_keep_a_block_together_are_served(layout: str | None) -> None:
    _refuse_layout(layout)
