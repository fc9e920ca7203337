"""Two stores of one program's kind: what one has in host memory the other loads."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from tiering import ConfigError, KVLayout, P2pTierConfig, PeerSource, StoreConfig, TieredStore
from tiering.testing.memory import MemoryTier
from tiering.testing.ports import free_port
from tiering.tiers.base import Read

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=64, block_tokens=16)
KEYS = LAYOUT.keys(range(16 * 8))
BYTES = 1 << 20


def config(port: int, model: str = "m", **keys: str) -> StoreConfig:
    tier = P2pTierConfig(host="127.0.0.1", port=port, **keys)  # type: ignore[arg-type]
    return StoreConfig(
        layout=LAYOUT,
        model=model,
        cpu_bytes_to_use=BYTES,
        secondary_tiers=[tier],
        load_deadline_seconds=5.0,
    )


def page(number: int) -> bytes:
    return bytes([number + 1]) * LAYOUT.chunk_bytes


@pytest.fixture
async def source() -> AsyncIterator[PeerSource]:
    port = free_port()
    async with TieredStore(config(port)) as store:
        assert await store.save(KEYS[:6], [page(i) for i in range(6)]) == 6
        yield PeerSource("127.0.0.1", port, "r")


@pytest.mark.parametrize("transport", ["tcp", "shm", "auto"])
async def test_what_another_store_has_is_loaded_from_there(
    source: PeerSource, transport: str
) -> None:
    async with TieredStore(config(free_port(), transport=transport)) as store:
        assert await store.match(KEYS) == 0
        assert await store.match(KEYS, source=source) == 6
        async with store.load(KEYS, source=source) as chunks:
            pages = [bytearray(LAYOUT.chunk_bytes) for _ in range(chunks.found)]
            await chunks.copy_to(pages)
        assert pages == [page(i) for i in range(6)]
        assert await store.match(KEYS) == 6
        (tier,) = store.stats().tiers.values()
        assert (tier["reads_hit"], tier["writes"]) == (6, 0)


async def test_a_source_of_another_model_is_a_miss(source: PeerSource) -> None:
    async with TieredStore(config(free_port(), model="another")) as store:
        async with store.load(KEYS, source=source) as chunks:
            assert chunks.found == 0
        (tier,) = store.stats().tiers.values()
        assert tier["lookups_failed"] == len(KEYS)


async def test_a_source_whose_id_cannot_be_told_is_a_miss(source: PeerSource) -> None:
    unsayable = msgspec.structs.replace(source, kv_request_id="r" * 513, is_prefiller=True)
    async with TieredStore(config(free_port())) as store:
        assert await store.match(KEYS, source=source) == 6
        async with store.load(KEYS, source=unsayable) as chunks:
            assert chunks.found == 0
        assert await store.match(KEYS, source=source) == 6


@pytest.mark.slow
async def test_a_source_that_is_not_there_is_a_miss() -> None:
    gone = PeerSource("127.0.0.1", free_port(), "r")
    async with TieredStore(config(free_port())) as store:
        assert await store.match(KEYS, source=gone) == 0


async def test_a_port_that_is_taken_is_told(source: PeerSource) -> None:
    with pytest.raises(ConfigError, match=rf"port {source.port} .* is taken"):
        async with TieredStore(config(source.port)):
            pass


async def test_a_key_file_that_is_missing_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[0\]\.auth = .*cannot be read"):
        async with TieredStore(config(free_port(), auth="/nowhere/peers.key")):
            pass


async def test_all_interfaces_need_an_address_to_tell() -> None:
    tier = P2pTierConfig(host="0.0.0.0", port=free_port(), allow_unauthenticated=True)
    given = config(1).model_copy(update={"secondary_tiers": (tier,)})
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[0\]\.advertised_host = '0.0.0.0'"):
        async with TieredStore(given):
            pass


async def test_other_hosts_are_let_in_with_a_key_only() -> None:
    tier = P2pTierConfig(host="0.0.0.0", port=free_port(), advertised_host="127.0.0.1")
    given = config(1).model_copy(update={"secondary_tiers": (tier,)})
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[0\]\.host = .*set auth to a file"):
        async with TieredStore(given):
            pass


async def test_tiers_of_ones_own_take_the_place_of_peers_too() -> None:
    own = MemoryTier()
    async with TieredStore(config(free_port()), tiers=[own]) as store:
        assert await store.save(KEYS[:2], [page(0), page(1)]) == 2
        assert await store.flush()
        assert await own.contains(KEYS[:2]) == [Read.HIT] * 2


async def test_a_source_without_a_tier_of_peers_is_told() -> None:
    settings = StoreConfig(layout=LAYOUT, cpu_bytes_to_use=BYTES)
    async with TieredStore(settings) as store:
        with pytest.raises(ConfigError, match="there is no tier of type p2p; add P2pTierConfig"):
            await store.match(KEYS, source=PeerSource("127.0.0.1", 5710, "r"))
