"""The sides of `tiering-bench tiers --tier obj`: our client, obstore's Rust and boto3 in threads.

Each stores the same buffers and fills buffers of the caller, so many at once, as the tier does, and
is set up as well as it can be: no checksums nobody asked for, bodies that are not signed, no copy
that can be avoided. Their packages are imported only when asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from pydantic import SecretStr

from tiering.config import BucketConfig
from tiering.tiers.obj.s3 import S3Store
from tiering_benchmarks.tiers_run import SideMissing, WrongAnswer

OURS, OBSTORE, BOTO3 = "ours", "obstore", "boto3"
SIDES = (OURS, OBSTORE, BOTO3)

Item = tuple[str, bytearray]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where all sides store."""

    endpoint: str
    name: str
    region: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


class Side(Protocol):
    """Moves all of `items` once, `jobs` of them at a time."""

    def put(self, items: Sequence[Item], jobs: int) -> None: ...

    def get(self, items: Sequence[Item], jobs: int) -> None: ...

    def delete(self, names: Sequence[str]) -> None: ...

    def close(self) -> None: ...

    def about(self) -> str: ...


def open_side(name: str, bucket: Bucket) -> Side:
    """SideMissing where its package is not installed."""
    package = {OURS: "aiobotocore", OBSTORE: "obstore", BOTO3: "boto3"}[name]
    try:
        version(package)
    except PackageNotFoundError:
        raise SideMissing(f"{package} is not installed; pip install {package}") from None
    kinds: dict[str, Callable[[Bucket], Side]] = {OURS: Ours, OBSTORE: Obstore, BOTO3: Boto3}
    return kinds[name](bucket)


class _Looped:
    """A side that runs on an event loop."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def _all(
        self, one: Callable[[Item], Awaitable[None]], items: Sequence[Item], jobs: int
    ) -> None:
        left = iter(items)

        async def job(left: Iterator[Item]) -> None:
            for item in left:
                await one(item)

        async def all_jobs() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(jobs):
                    group.create_task(job(left))

        self._runner.run(all_jobs())


class Ours(_Looped):
    """The client of the object tier."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self._store = S3Store(
            BucketConfig(
                bucket=bucket.name,
                endpoint_override=bucket.endpoint,
                region=bucket.region,
                access_key=SecretStr(bucket.access_key),
                secret_key=SecretStr(bucket.secret_key),
                session_token=SecretStr(bucket.token or ""),
            )
        )
        try:
            self._runner.run(self._store.open())
        except BaseException:
            self._runner.close()
            raise

    def about(self) -> str:
        return f"credentials by aiobotocore {version('aiobotocore')}"

    def put(self, items: Sequence[Item], jobs: int) -> None:
        async def one(item: Item) -> None:
            await self._store.put(item[0], [memoryview(item[1])])

        self._all(one, items, jobs)

    def get(self, items: Sequence[Item], jobs: int) -> None:
        async def one(item: Item) -> None:
            if not await self._store.get(item[0], [memoryview(item[1])]):
                raise WrongAnswer(f"ours does not find {item[0]}")

        self._all(one, items, jobs)

    def delete(self, names: Sequence[str]) -> None:
        for at in range(0, len(names), 1000):
            self._runner.run(self._store.delete(names[at : at + 1000]))

    def close(self) -> None:
        self._runner.run(self._store.close())
        self._runner.close()


class Obstore(_Looped):
    """obstore's asyncio functions over Rust."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        from obstore.store import S3Store as RustStore

        optional = {"session_token": bucket.token} if bucket.token else {}
        make: Any = RustStore
        self._store = make(
            bucket.name,
            endpoint=bucket.endpoint,
            region=bucket.region,
            access_key_id=bucket.access_key,
            secret_access_key=bucket.secret_key,
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            client_options={"allow_http": True},
            **optional,
        )

    def about(self) -> str:
        return f"obstore {version('obstore')}"

    def put(self, items: Sequence[Item], jobs: int) -> None:
        async def one(item: Item) -> None:
            await self._store.put_async(item[0], item[1], use_multipart=False)

        self._all(one, items, jobs)

    def get(self, items: Sequence[Item], jobs: int) -> None:
        async def one(item: Item) -> None:
            found = await self._store.get_async(item[0])
            item[1][:] = memoryview(await found.bytes_async())

        self._all(one, items, jobs)

    def delete(self, names: Sequence[str]) -> None:
        async def gone() -> None:
            await self._store.delete_async(list(names))

        self._runner.run(gone())

    def close(self) -> None:
        self._runner.close()


class Boto3:
    """boto3's client from as many threads as there are to be requests at once."""

    def __init__(self, bucket: Bucket) -> None:
        import boto3
        from botocore.config import Config

        config = Config(
            max_pool_connections=64,
            retries={"max_attempts": 1, "mode": "standard"},
            s3={"addressing_style": "path", "payload_signing_enabled": False},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        self._bucket = bucket.name
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=bucket.endpoint,
            region_name=bucket.region,
            aws_access_key_id=bucket.access_key,
            aws_secret_access_key=bucket.secret_key,
            aws_session_token=bucket.token,
            config=config,
        )

    def about(self) -> str:
        return f"boto3 {version('boto3')}"

    def put(self, items: Sequence[Item], jobs: int) -> None:
        def one(item: Item) -> None:
            self._client.put_object(Bucket=self._bucket, Key=item[0], Body=item[1])

        self._all(one, items, jobs)

    def get(self, items: Sequence[Item], jobs: int) -> None:
        def one(item: Item) -> None:
            found = self._client.get_object(Bucket=self._bucket, Key=item[0])["Body"]
            view, at = memoryview(item[1]), 0
            while at < len(view) and (got := found.readinto(view[at:])):
                at += got
            found.close()

        self._all(one, items, jobs)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._client.delete_object(Bucket=self._bucket, Key=name)

    def close(self) -> None:
        self._client.close()

    def _all(self, one: Callable[[Item], None], items: Sequence[Item], jobs: int) -> None:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, items))
