"""Keep KV chunks of a model in host memory and on disk, without any LLM server.

Run it twice: the second time, everything is found on the disk.

    python docs/examples/tiered_store.py /tmp/kv-example
"""

import asyncio
import sys
from pathlib import Path

from tiering import FsTierConfig, KVLayout, MiB, StoreConfig, TieredStore

layout = KVLayout(layers=8, kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16")


async def main(root: Path) -> None:
    config = StoreConfig(
        layout=layout,
        cpu_bytes_to_use=16 * MiB,
        secondary_tiers=[FsTierConfig(root_dir=str(root))],
    )
    tokens = list(range(1000))
    keys = layout.keys(tokens)  # one key for each full chunk, each chained to its parent
    async with TieredStore(config) as store:
        found = await store.match(keys)  # asks, and changes nothing
        print(f"{found} of {len(keys)} chunks are stored")

        async with store.load(keys[:found]) as chunks:  # in host memory until the block ends
            pages = [bytearray(layout.chunk_bytes) for _ in range(chunks.found)]
            await chunks.copy_to(pages)
        for page, key in zip(pages, keys, strict=False):
            assert page == compute(key), "never a wrong byte"

        fresh = keys[found:]
        saved = await store.save(fresh, [compute(key) for key in fresh])
        await store.flush()  # until the disk has them too
        print(f"{saved} more are stored now")
        print(store.stats())


def compute(key: bytes) -> bytes:
    """What a model would compute for this prefix."""
    return (key * (layout.chunk_bytes // len(key) + 1))[: layout.chunk_bytes]


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).absolute()))
