"""S3Store against real stores, each over its own process: what is put comes back, and is listed."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from s3_servers import SERVERS, Served, rclone
from scripted_s3 import ScriptedS3
from tiering.config import BucketConfig
from tiering.tiers.obj.s3 import S3Store
from tiering.tiers.obj.store import LengthError, ObjectStore

MIB = 1 << 20
# Of all that these tests put.
PREFIXES = (
    "round/trip ",
    "length",
    "large/",
    "walk",
    "many/n",
    "gone/",
    "small/",
    "at once/",
    "again",
)
OTHERS = ("another",) if "S3_ENDPOINT" in os.environ else ()
KINDS = ("rclone", "rclone over TLS", "seaweed", "moto", "scripted", *OTHERS)


QUICK = "scripted"
PARAMS = [kind if kind == QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.fixture(scope="module", params=PARAMS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("server")
    if request.param == "scripted":
        with ScriptedS3() as scripted:
            yield Served(scripted.endpoint)
    elif request.param == "another":
        given = Served(os.environ["S3_ENDPOINT"], is_given=True)
        asyncio.run(clear(given))
        yield given
        asyncio.run(clear(given))
    elif request.param == "rclone over TLS":
        with rclone(directory, tls=True) as served:
            yield served
    else:
        with SERVERS[request.param](directory) as served:
            yield served


async def clear(server: Served) -> None:
    """Take what these tests put, and nothing else."""
    store = S3Store(BucketConfig(**server.store_config()))  # type: ignore[arg-type]
    await store.open()
    for prefix in PREFIXES:
        while found := (await store.page(prefix)).objects:
            await store.delete([entry.name for entry in found])
    await store.close()


@pytest.fixture
async def store(server: Served) -> AsyncIterator[S3Store]:
    found = S3Store(
        BucketConfig(**server.store_config()),
        single_put_bytes=8 * MIB,  # type: ignore[arg-type]
    )
    await found.open()
    yield found
    await found.close()
    await found.close()


def payload(length: int, seed: int = 1) -> bytearray:
    return bytearray(random.Random(seed).randbytes(length))


def views(buffer: bytearray, *cuts: int) -> list[memoryview]:
    """The whole of it, cut at these places."""
    edges = [0, *cuts, len(buffer)]
    return [memoryview(buffer)[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 4096, MIB + 1, 5 * MIB])
async def test_an_object_comes_back_from_and_into_several_buffers(
    store: ObjectStore, length: int
) -> None:
    body, found = payload(length), bytearray(length)
    name = f"round/trip {length}/ü+&=%~'.bin"
    await store.put(name, views(body, length // 3, length // 2))
    assert await store.get(name, views(found, length // 5))
    assert found == body
    assert await store.get("round/trip/none", [memoryview(found)]) is False


async def test_an_object_of_another_length_is_an_error(store: ObjectStore) -> None:
    await store.put("length", [memoryview(payload(70_000))])
    for length in (69_999, 70_001):
        with pytest.raises(LengthError, match=rf"70000 bytes long, not {length}"):
            await store.get("length", [memoryview(bytearray(length))])
    found = bytearray(70_000)
    assert await store.get("length", [memoryview(found)])
    assert found == payload(70_000)


@pytest.mark.slow
async def test_a_large_object_goes_in_parts(store: S3Store) -> None:
    body, found = payload(17 * MIB), bytearray(17 * MIB)
    await store.put("large/one", views(body, 5 * MIB))
    assert store.requests()["multipart"] == 2
    assert store.requests()["put"] == 3
    assert await store.get("large/one", [memoryview(found)])
    assert found == body


async def test_a_checksum_goes_with_all_that_is_stored(server: Served) -> None:
    """Where it is wanted: with an object, one in parts, and a small one under a condition."""
    keys = server.store_config() | {"request_checksums": "when_supported"}
    store = S3Store(BucketConfig(**keys), single_put_bytes=6 * MIB)  # type: ignore[arg-type]
    await store.open()
    body, found = payload(13 * MIB), bytearray(13 * MIB)
    await store.put("large/sums", views(body, MIB))
    assert store.requests()["multipart"] == 2
    assert await store.get("large/sums", [memoryview(found)])
    assert found == body
    await store.put("large/whole", views(body[: 5 * MIB], MIB))
    assert await store.get("large/whole", [memoryview(found)[: 5 * MIB]])
    assert await store.delete(["small/sum"]) == []
    assert await store.put_small("small/sum", b"sum", if_absent=True)
    assert (await store.get_small("small/sum") or ())[0] == b"sum"
    await store.close()


async def test_a_listing_goes_on_where_it_was_cut(store: ObjectStore) -> None:
    names = [f"walk/{at:02d} <&>ü.bin" for at in range(7)]
    for at, name in enumerate(names):
        await store.put(name, [memoryview(payload(at + 1))])
    await store.put("walked", [memoryview(b"x")])
    found, token, pages = [], None, 0
    while pages == 0 or token is not None:
        page = await store.page("walk/", token=token, limit=3)
        found += page.objects
        token, pages = page.token, pages + 1
    assert pages == 3
    assert [entry.name for entry in found] == names
    assert [entry.size_bytes for entry in found] == list(range(1, 8))
    assert all(abs(entry.modified - time.time()) < 600 for entry in found)
    behind = await store.page("walk/", after=names[4])
    assert [entry.name for entry in behind.objects] == names[5:]
    assert behind.token is None
    assert (await store.page("walk/none")).objects == []


@pytest.mark.slow
async def test_a_thousand_names_are_one_page(store: ObjectStore) -> None:
    async with asyncio.TaskGroup() as group:
        for at in range(120):
            group.create_task(store.put(f"many/{'n' * 120}{at:03d}", [memoryview(b"x")]))
    page = await store.page("many/")
    assert [entry.name[-3:] for entry in page.objects] == [f"{at:03d}" for at in range(120)]


async def test_many_are_deleted_with_one_request(store: S3Store) -> None:
    names = [f"gone/{at} &ü" for at in range(5)]
    for name in names:
        await store.put(name, [memoryview(b"x")])
    assert await store.delete([*names[:4], "gone/was never there"]) == []
    assert store.requests()["delete"] == 1
    assert [entry.name for entry in (await store.page("gone/")).objects] == names[4:]
    assert await store.delete(names[4:]) == []
    assert (await store.page("gone/")).objects == []
    assert await store.delete([]) == []


async def test_a_small_object_is_put_only_where_it_was_expected(
    store: ObjectStore, server: Served
) -> None:
    assert await store.get_small("small/lease") is None
    first = await store.put_small("small/lease", b"first", if_absent=True)
    assert first
    assert await store.get_small("small/lease") == (b"first", first)
    # rclone knows no conditions, and says that by doing it.
    second = await store.put_small("small/lease", b"other", if_absent=True)
    knows = second is None if server.is_given else server.root is None
    assert (second is None) == knows
    third = await store.put_small("small/lease", b"third", if_etag=first)
    assert third
    assert await store.get_small("small/lease") == (b"third", third)
    fourth = await store.put_small("small/lease", b"fourth", if_etag=first)
    assert (fourth is None) == knows
    assert await store.put_small("small/lease", b"at last")
    assert (await store.get_small("small/lease") or ())[0] == b"at last"
    assert (await store.put_small("small/none", b"x", if_etag=first) is None) == knows


@pytest.mark.slow
async def test_many_at_once(store: ObjectStore) -> None:
    bodies = [payload(MIB // 2 + at, at) for at in range(24)]
    found = [bytearray(len(body)) for body in bodies]
    async with asyncio.TaskGroup() as group:
        for at, body in enumerate(bodies):
            group.create_task(store.put(f"at once/{at}", [memoryview(body)]))
    async with asyncio.TaskGroup() as group:
        for at, buffer in enumerate(found):
            group.create_task(store.get(f"at once/{at}", [memoryview(buffer)]))
    assert found == bodies


async def test_a_store_can_be_opened_again(server: Served) -> None:
    config = BucketConfig(**server.store_config())  # type: ignore[arg-type]
    store = S3Store(config)
    for body in (b"one", b"two"):
        await store.open()
        await store.put("again", [memoryview(body)])
        assert store.requests()["put"] == 1
        await store.close()
    assert repr(store) == f"<S3Store {config.base_url} closed>"


@pytest.mark.slow
def test_an_object_is_a_plain_file_of_rclones(tmp_path: Path) -> None:
    """What other tests go by when they look at the bucket from behind."""

    async def put(config: BucketConfig) -> None:
        store = S3Store(config)
        await store.open()
        await store.put("a/b", [memoryview(b"bytes")])
        await store.close()

    with rclone(tmp_path) as served:
        asyncio.run(put(BucketConfig(**served.store_config())))  # type: ignore[arg-type]
        assert served.root is not None
        assert (served.root / "a" / "b").read_bytes() == b"bytes"
