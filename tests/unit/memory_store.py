"""An object store in a dict, whose requests wait and fail when a test says so."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiering.tiers.obj.store import LengthError, Listed, ObjectStore, Page

Script = Callable[[str, str], Exception | None]


@dataclass
class Bucket:
    """Objects by name, and when each was put; several stores may share one."""

    objects: dict[str, bytes] = field(default_factory=dict)
    modified: dict[str, float] = field(default_factory=dict)


class MemoryStore(ObjectStore):
    """`script` is asked for every request, by verb and name: what it returns is raised.
    `seconds` is how long each takes. `heeds_conditions`: whether conditional puts are."""

    def __init__(self, bucket: Bucket | None = None) -> None:
        self.bucket = bucket or Bucket()
        self.script: Script = lambda verb, name: None
        self.seconds = 0.0
        self.heeds_conditions = True
        self.today: Callable[[], float] = lambda: 0.0
        self.counts: Counter[str] = Counter()
        self.asked: list[tuple[str, str]] = []
        self.under_way = self.under_way_max = 0
        self.is_open = False

    async def open(self) -> None:
        self.is_open = True

    async def get(self, name: str, into: Sequence[memoryview]) -> bool:
        await self._ask("get", name)
        body = self.bucket.objects.get(name)
        if body is None:
            return False
        if len(body) != sum(part.nbytes for part in into):
            raise LengthError(f"{name} has {len(body)} bytes")
        at = 0
        for part in into:
            part[:] = body[at : at + part.nbytes]
            at += part.nbytes
        return True

    async def put(self, name: str, body: Sequence[memoryview]) -> None:
        content = b"".join(body)
        await self._ask("put", name)
        self._keep(name, content)

    async def get_small(self, name: str) -> tuple[bytes, str] | None:
        await self._ask("get", name)
        body = self.bucket.objects.get(name)
        return None if body is None else (body, _etag(body))

    async def put_small(
        self, name: str, body: bytes, *, if_etag: str | None = None, if_absent: bool = False
    ) -> str | None:
        await self._ask("put", name)
        there = self.bucket.objects.get(name)
        if self.heeds_conditions:
            if if_absent and there is not None:
                return None
            if if_etag is not None and (there is None or _etag(there) != if_etag):
                return None
        self._keep(name, body)
        return _etag(body)

    async def page(
        self, prefix: str, *, token: str | None = None, after: str = "", limit: int = 1000
    ) -> Page:
        await self._ask("list", prefix)
        start = token or after
        names = sorted(n for n in self.bucket.objects if n.startswith(prefix) and n > start)
        listed = [
            Listed(name, len(self.bucket.objects[name]), self.bucket.modified[name])
            for name in names[:limit]
        ]
        return Page(listed, names[limit - 1] if len(names) > limit else None)

    async def delete(self, names: Sequence[str]) -> list[str]:
        assert 0 < len(names) <= 1000
        await self._ask("delete", names[0])
        for name in names:
            self.bucket.objects.pop(name, None)
        return []

    async def close(self) -> None:
        self.is_open = False

    def requests(self) -> dict[str, int]:
        return dict(self.counts)

    def _keep(self, name: str, body: bytes) -> None:
        self.bucket.objects[name] = body
        self.bucket.modified[name] = self.today()

    async def _ask(self, verb: str, name: str) -> None:
        assert self.is_open
        self.counts[verb] += 1
        self.asked.append((verb, name))
        self.under_way += 1
        self.under_way_max = max(self.under_way_max, self.under_way)
        try:
            await asyncio.sleep(self.seconds)
            if (error := self.script(verb, name)) is not None:
                raise error
        finally:
            self.under_way -= 1


def _etag(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()
