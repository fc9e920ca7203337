"""`S3Store`: an ObjectStore that is a bucket of an S3-compatible store.

Needs the extra `s3`, whose packages are loaded by `open` and not before. Each operation is one
request, but for an object above the limit of a single PUT: that goes in parts, one after the other,
and is there whole or not at all. There is no HEAD. A request that is refused for its credentials is
sent once more where others can be had. How many are under way is the caller's to limit.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tiering.clock import Clock, UnixClock
from tiering.config.obj import BucketConfig
from tiering.errors import ConfigError
from tiering.tiers.obj import dialect
from tiering.tiers.obj.dialect import Answer
from tiering.tiers.obj.store import NotNowError, ObjectStore, Page, StoreError

if TYPE_CHECKING:
    from tiering.tiers.obj.credentials import Wallet
    from tiering.tiers.obj.wire import Wire

SINGLE_PUT_BYTES_MAX = 5 << 30
DELETES_MAX = 1000
_PART_BYTES = 64 << 20
_PARTS_MAX = 10_000
_CRC32 = "x-amz-checksum-crc32"
# A longer listing is read in a thread: 1,000 names take some milliseconds.
_INLINE_BYTES = 16 << 10


class S3Store(ObjectStore):
    """The bucket of `config`, whose keys a user finds under `where`."""

    def __init__(
        self,
        config: BucketConfig,
        *,
        where: str = "store_config",
        prefix: str = "",
        single_put_bytes: int = SINGLE_PUT_BYTES_MAX,
        clock: Clock | None = None,
    ) -> None:
        """`prefix`: what `open` tries to list; `clock`: seconds since the epoch."""
        self._config = config
        self._where = where
        self._prefix = prefix
        self._single_put_bytes = single_put_bytes
        self._clock = clock or UnixClock()
        self._wallet: Wallet | None = None
        self._wire: Wire | None = None
        self._sent: dict[str, int] = {}
        self._deletes_many = True

    def __repr__(self) -> str:
        state = "open" if self._wire is not None else "closed"
        return f"<S3Store {self._config.base_url} {state}>"

    async def open(self) -> None:
        try:
            # Seconds of imports, which the loop need not wait for.
            probe = await asyncio.to_thread(importlib.import_module, "tiering.tiers.obj.probe")
        except ModuleNotFoundError as error:
            raise ConfigError(
                self._where,
                self._config.bucket,
                f"needs a package that is not installed: {error.name}",
                "run pip install 'kv-tiering[s3]'",
            ) from None
        self._wallet, self._wire = await probe.opened(
            self._config, self._where, self._prefix, self._clock
        )
        self._sent = self._wire.requests

    async def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()

    def requests(self) -> dict[str, int]:
        return dict(self._sent)

    async def get(self, name: str, into: Sequence[memoryview]) -> bool:
        answer = await self._ask("GET", name, into=into)
        return self._found(answer, f"GET {name}")

    async def get_small(self, name: str) -> tuple[bytes, str] | None:
        answer = await self._ask("GET", name)
        if not self._found(answer, f"GET {name}"):
            return None
        return answer.body, answer.headers.get("etag", "")

    async def put(self, name: str, body: Sequence[memoryview]) -> None:
        if sum(view.nbytes for view in body) > self._single_put_bytes:
            await self._put_parts(name, body)
        else:
            await self._put(name, body)

    async def put_small(
        self, name: str, body: bytes, *, if_etag: str | None = None, if_absent: bool = False
    ) -> str | None:
        conditions = {"If-None-Match": "*"} if if_absent else {}
        if if_etag is not None:
            conditions["If-Match"] = if_etag
        view = [memoryview(body)]
        checksum = {_CRC32: _crc32(view)} if self._sends_checksums else {}
        answer = await self._ask("PUT", name, headers=conditions | checksum, body=view)
        if answer.status == 501 and conditions:
            # It knows no conditions: look, and then leap.
            there = await self.get_small(name)
            fits = there is None if if_absent else there is not None and there[1] == if_etag
            if not fits:
                return None
            answer = await self._ask("PUT", name, headers=checksum, body=view)
        if conditions and answer.status in (404, 409, 412) and answer.fault.code != "NoSuchBucket":
            return None
        return self._done(answer, f"PUT {name}").headers.get("etag", "")

    async def page(
        self, prefix: str, *, token: str | None = None, after: str = "", limit: int = 1000
    ) -> Page:
        query = dialect.list_query(prefix, token=token, after=after, limit=limit)
        answer = await self._ask("GET", query=query, count_as="list")
        body = self._done(answer, f"LIST {prefix}").body
        if len(body) <= _INLINE_BYTES:
            return dialect.listing(body)
        return await asyncio.to_thread(dialect.listing, body)

    async def delete(self, names: Sequence[str]) -> list[str]:
        if len(names) > DELETES_MAX:
            raise ValueError(f"{len(names)} names, more than {DELETES_MAX} at a time")
        if not names:
            return []
        if self._deletes_many and len(names) > 1:
            body = dialect.delete_request(names)
            digest = hashlib.md5(body, usedforsecurity=False).digest()
            headers = {
                "Content-MD5": base64.b64encode(digest).decode(),
                "Content-Type": "application/xml",
            }
            answer = await self._ask(
                "POST",
                query=[("delete", "")],
                headers=headers,
                body=[memoryview(body)],
                count_as="delete",
            )
            if answer.status not in (405, 501):
                failed = dialect.not_deleted(self._done(answer, "DELETE of several").body)
                return [name for name in names if name in set(failed)]
            self._deletes_many = False
        return await self._delete_singly(names)

    async def _delete_singly(self, names: Sequence[str]) -> list[str]:
        """Stops where the store wants no more now; raises where that is at once."""
        failed: list[str] = []
        for at, name in enumerate(names):
            try:
                answer = await self._ask("DELETE", name)
                if answer.status != 404 or answer.fault.code == "NoSuchBucket":
                    self._done(answer, f"DELETE {name}")
            except NotNowError:
                if at == 0:
                    raise
                return failed + list(names[at:])
            except StoreError:
                if len(names) == 1:
                    raise
                failed.append(name)
        return failed

    @property
    def _sends_checksums(self) -> bool:
        return self._config.request_checksums == "when_supported"

    async def _put(
        self, name: str, body: Sequence[memoryview], query: Sequence[tuple[str, str]] = ()
    ) -> dialect.Part:
        """The whole object, or with a `query` a part of it."""
        crc32 = await asyncio.to_thread(_crc32, body) if self._sends_checksums else ""
        headers = {_CRC32: crc32} if crc32 else {}
        answer = await self._ask("PUT", name, query=query, headers=headers, body=body)
        return dialect.Part(self._done(answer, f"PUT {name}").headers.get("etag", ""), crc32)

    async def _put_parts(self, name: str, body: Sequence[memoryview]) -> None:
        """Whatever ends it early, the parts that are there are given up."""
        asked = f"PUT {name} in parts"
        # AWS takes no part with a checksum of which the start of the upload did not tell, and
        # completes none that tells of one without those of all parts.
        headers = {"x-amz-checksum-algorithm": "CRC32"} if self._sends_checksums else {}
        answer = await self._ask(
            "POST", name, query=[("uploads", "")], headers=headers, count_as="multipart"
        )
        upload = ("uploadId", dialect.upload_id(self._done(answer, asked).body))
        try:
            total = sum(view.nbytes for view in body)
            part_bytes = max(min(_PART_BYTES, self._single_put_bytes), -(-total // _PARTS_MAX))
            uploaded = [
                await self._put(name, part, [upload, ("partNumber", str(number))])
                for number, part in enumerate(cut(body, part_bytes), 1)
            ]
            answer = await self._ask(
                "POST",
                name,
                query=[upload],
                body=[memoryview(dialect.complete_request(uploaded))],
                count_as="multipart",
            )
            if not dialect.is_completed(self._done(answer, asked).body):
                raise self._refused(asked, answer)
        except BaseException:
            await self._give_up(name, upload)
            raise

    async def _give_up(self, name: str, upload: tuple[str, str]) -> None:
        try:
            async with asyncio.timeout(self._config.read_timeout_seconds):
                await self._ask("DELETE", name, query=[upload])
        except (StoreError, TimeoutError):
            # Its parts stay until a lifecycle rule of the bucket takes them.
            return

    async def _ask(
        self,
        method: str,
        name: str = "",
        *,
        query: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] | None = None,
        count_as: str = "",
    ) -> Answer:
        """The answer, whatever it is, to a request that is sent twice at most."""
        if self._wallet is None or self._wire is None:
            raise StoreError("the object store is not open")
        keys = await self._wallet.keys()
        for last in (False, True):
            answer = await self._wire.exchange(
                keys,
                method,
                name,
                query,
                headers=headers,
                body=body,
                into=into,
                count_as=count_as,
            )
            if last or not answer.is_stale:
                break
            keys = await self._wallet.renewed(keys)
        return answer

    def _found(self, answer: Answer, asked: str) -> bool:
        """Whether there is such an object; a bucket that is gone is an error."""
        if answer.status == 404 and answer.fault.code in ("", "NoSuchKey", "NotFound"):
            return False
        self._done(answer, asked)
        return True

    def _done(self, answer: Answer, asked: str) -> Answer:
        if answer.status not in (200, 204):
            raise self._refused(asked, answer)
        return answer

    def _refused(self, asked: str, answer: Answer) -> StoreError:
        hidden = () if self._wallet is None else self._wallet.secrets
        return dialect.refusal(asked, answer, hidden)


def cut(body: Sequence[memoryview], part_bytes: int) -> list[list[memoryview]]:
    """The buffers `body`, one after the other, in parts of so many bytes, the last one shorter."""
    parts: list[list[memoryview]] = []
    room = 0
    for view in body:
        rest = view.cast("B")
        while rest:
            if room == 0:
                parts.append([])
                room = part_bytes
            parts[-1].append(rest[:room])
            taken = min(room, len(rest))
            rest, room = rest[taken:], room - taken
    return parts


def _crc32(body: Sequence[memoryview]) -> str:
    """As S3 writes it."""
    value = 0
    for view in body:
        value = zlib.crc32(view, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()
