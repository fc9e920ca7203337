"""`TieredStore` on real shared memory and a real file system."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tiering import (
    ClosedError,
    ConfigError,
    ConnectorConfig,
    FsTierConfig,
    KVLayout,
    StoreConfig,
    TieredStore,
    TieringError,
)
from tiering.layout import RowLayout

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=16, block_tokens=16)
ROW = RowLayout(LAYOUT.chunk_bytes).row_bytes
HEADER = 4096


def config(root: Path | None, slots: int = 8, **more: object) -> StoreConfig:
    tiers = () if root is None else (FsTierConfig(root_dir=str(root)),)
    return StoreConfig(
        layout=LAYOUT, cpu_bytes_to_use=HEADER + slots * ROW, secondary_tiers=tiers, **more
    )


def chain(count: int, seed: int = 0) -> list[bytes]:
    return LAYOUT.keys([seed * 1000 + i for i in range(count * LAYOUT.chunk_tokens)])


def pages(keys: list[bytes]) -> list[bytes]:
    """Every page stamped with its key."""
    return [(key * (LAYOUT.chunk_bytes // len(key) + 1))[: LAYOUT.chunk_bytes] for key in keys]


async def fetch(store: TieredStore, keys: list[bytes]) -> list[bytes]:
    """What a load yields, copied out."""
    async with store.load(keys) as loaded:
        out = [bytearray(LAYOUT.chunk_bytes) for _ in range(loaded.found)]
        await loaded.copy_to(out)
        assert [bytes(loaded.view(i)) for i in range(loaded.found)] == [bytes(o) for o in out]
    return [bytes(page) for page in out]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TieredStore]:
    async with TieredStore(config(tmp_path / "kv")) as opened:
        yield opened


async def test_what_was_saved_is_found_and_loaded(store: TieredStore) -> None:
    keys = chain(4)
    assert await store.match(keys) == 0
    assert await store.save(keys, pages(keys)) == 4
    assert await store.match(keys) == 4
    assert await store.match(keys + chain(3, seed=9)) == 4
    assert await fetch(store, keys) == pages(keys)
    assert store.stats().slots_held == 0


async def test_it_is_still_there_after_a_restart(tmp_path: Path) -> None:
    keys = chain(5)
    async with TieredStore(config(tmp_path)) as first:
        await first.save(keys, pages(keys))
    async with TieredStore(config(tmp_path)) as second:
        assert second.stats().slots_ready == 0
        assert await second.match(keys) == 5
        assert await fetch(second, keys) == pages(keys)
        assert second.stats().counters["promotions_succeeded"] == 5


@pytest.mark.parametrize(
    "other", [{"model": "other"}, {"revision": "2"}, {"weights_fingerprint": "f"}]
)
async def test_another_model_never_hits(tmp_path: Path, other: dict[str, str]) -> None:
    keys = chain(2)
    async with TieredStore(config(tmp_path)) as first:
        await first.save(keys, pages(keys))
    async with TieredStore(config(tmp_path, **other)) as second:
        assert await second.match(keys) == 0


async def test_a_prefix_passes_through_a_host_tier_smaller_than_it(tmp_path: Path) -> None:
    keys = chain(20)
    async with TieredStore(config(tmp_path, slots=4)) as store:
        assert await store.save(keys, pages(keys)) == 20
        assert await store.flush()
        assert store.stats().counters["cascades_skipped"] == 0
        assert await store.match(keys) == 20
        got = await fetch(store, keys)
        assert got == pages(keys)[:3], "what fits beside the reserve, and no more"


async def test_without_a_disk_it_keeps_what_fits() -> None:
    keys = chain(20)
    async with TieredStore(config(None, slots=4)) as store:
        assert await store.save(keys, pages(keys)) == 4
        assert await fetch(store, keys) == pages(keys)[:4]
        assert await store.match(keys) == 4


@pytest.mark.slow
async def test_many_at_once_get_their_own_bytes(tmp_path: Path) -> None:
    async with TieredStore(config(tmp_path, slots=6)) as store:
        chains = [chain(5, seed) for seed in range(8)]
        saved = await asyncio.gather(*(store.save(keys, pages(keys)) for keys in chains))
        assert saved == [5] * 8
        await store.flush()
        for got, keys in zip(
            await asyncio.gather(*(fetch(store, keys) for keys in chains * 3)),
            chains * 3,
            strict=True,
        ):
            assert got == pages(keys)[: len(got)]
            assert got
        assert store.stats().slots_held == 0


async def test_dropped_is_gone_everywhere(store: TieredStore) -> None:
    keys = chain(3)
    await store.save(keys, pages(keys))
    await store.flush()
    await store.drop(keys[1:])
    assert await store.match(keys) == 1
    await store.flush()
    async with store.load(keys) as loaded:
        assert loaded.found == 1


async def test_a_damaged_chunk_is_a_miss_and_counted(tmp_path: Path) -> None:
    keys = chain(3)
    async with TieredStore(config(tmp_path)) as first:
        await first.save(keys, pages(keys))
    (path,) = tmp_path.rglob(f"{keys[1][:-4].hex()}.bin")
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    async with TieredStore(config(tmp_path)) as second:
        assert await second.match(keys) == 3, "a match reads nothing"
        assert await fetch(second, keys) == pages(keys)[:1]
        assert second.stats().counters["promotions_damaged"] == 1
        assert await second.match(keys) == 1
        assert await second.save(keys, pages(keys)) == 3
        assert await fetch(second, keys) == pages(keys)


@pytest.mark.slow
async def test_cancelled_calls_give_everything_back(tmp_path: Path) -> None:
    async with TieredStore(config(tmp_path, slots=4)) as store:
        keys = chain(16)
        for turns in range(40):
            task = asyncio.ensure_future(store.save(keys, pages(keys)))
            load = asyncio.ensure_future(fetch(store, keys))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            load.cancel()
            await asyncio.gather(task, load, return_exceptions=True)
        await store.flush()
        stats = store.stats()
        assert stats.slots_held == 0
        assert stats.slots_free + stats.slots_ready == stats.slots
        assert await store.save(keys, pages(keys)) == 16
        got = await fetch(store, keys)
        assert got == pages(keys)[: len(got)]


async def test_wrong_sizes_are_refused(store: TieredStore) -> None:
    keys = chain(1)
    with pytest.raises(ValueError, match="a page of 3 bytes"):
        await store.save(keys, [b"abc"])
    with pytest.raises(ValueError, match="1 keys for 2 pages"):
        await store.save(keys, pages(keys) * 2)
    await store.save(keys, pages(keys))
    async with store.load(keys) as loaded:
        with pytest.raises(ValueError, match="2 pages for 1 chunks"):
            await loaded.copy_to([bytearray(LAYOUT.chunk_bytes)] * 2)


async def test_outside_its_block_it_is_closed(tmp_path: Path) -> None:
    store = TieredStore(config(tmp_path))
    with pytest.raises(ClosedError):
        await store.match(chain(1))
    async with store:
        assert repr(store).startswith("<TieredStore <Residency")
    assert repr(store) == "<TieredStore closed>"
    with pytest.raises(ClosedError):
        store.stats()


async def test_loaded_chunks_end_with_their_block(store: TieredStore) -> None:
    """Other chunks may be there afterwards, which would be wrong bytes."""
    keys = chain(2)
    await store.save(keys, pages(keys))
    async with store.load(keys) as loaded:
        overtaken = asyncio.create_task(loaded.copy_to([bytearray(LAYOUT.chunk_bytes)]))
        await asyncio.sleep(0)
    assert loaded.found == 2
    with pytest.raises(ClosedError, match="only inside their `async with` block"):
        await overtaken
    with pytest.raises(ClosedError):
        loaded.view(0)
    with pytest.raises(ClosedError):
        await loaded.copy_to([bytearray(LAYOUT.chunk_bytes)])


async def test_it_is_opened_once_at_a_time(store: TieredStore) -> None:
    with pytest.raises(TieringError, match="is open already"):
        async with store:
            pass
    keys = chain(1)
    assert await store.save(keys, pages(keys)) == 1


@pytest.mark.parametrize("given", [{"cpu_bytes_to_use": 1}, ConnectorConfig(cpu_bytes_to_use=1)])
def test_settings_of_another_kind_are_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"write TieredStore\(StoreConfig\("):
        TieredStore(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", ["2", 2.0, True, 0])
def test_a_layout_is_of_whole_numbers(layers: object) -> None:
    with pytest.raises(ValueError, match=f"layers must be a whole number.* not {layers!r}"):
        KVLayout(layers=layers, kv_heads=2, head_dim=16, block_tokens=16)  # type: ignore[arg-type]
