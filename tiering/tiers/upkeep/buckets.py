"""What lies in a bucket under a prefix: its namespaces, chunks, bytes, ages. For `tiering stat`.

One listing, a LIST for every 1,000 objects and one at a time, and a GET for each namespace's
config.json; changes nothing. Engines may write meanwhile, so the numbers are of no single moment.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from tiering.clock import Clock
from tiering.errors import TieringError
from tiering.tiers.disk.paths import CONFIG_NAME, key_of, parse_directory
from tiering.tiers.obj.pacing import Lane, Pacer
from tiering.tiers.obj.store import Listed, ObjectStore, Page, StoreError
from tiering.tiers.upkeep.survey import BucketSurvey, NamespaceSurvey

Result = TypeVar("Result")

LAYOUT = "objects"
# A store that is asked for too much gets so long for one request, with the pauses it wants.
_REQUEST_SECONDS = 60.0
_CONFIG_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class _Found:
    """One namespace: `size_bytes` of all of its objects; ages by the store's clock."""

    model: str
    digest: str
    ranks: set[int] = field(default_factory=set)
    chunks: int = 0
    chunk_bytes: int = 0
    size_bytes: int = 0
    config: Listed | None = None
    oldest: float | None = None
    newest: float | None = None

    def chunk(self, listed: Listed) -> None:
        self.chunks += 1
        self.chunk_bytes += listed.size_bytes
        first, last = self.oldest, self.newest
        self.oldest = listed.modified if first is None else min(first, listed.modified)
        self.newest = listed.modified if last is None else max(last, listed.modified)


class Tally:
    """Counts objects by their names, in whatever order they come. `above`: what all of them begin
    with, such as "team/kv/". Pure."""

    def __init__(self, above: str) -> None:
        self._above = above
        self.found: dict[str, _Found] = {}
        self.objects = self.object_bytes = self.others = self.other_bytes = 0

    def add(self, objects: Sequence[Listed]) -> None:
        for listed in objects:
            self.objects += 1
            self.object_bytes += listed.size_bytes
            if not self._is_part(listed):
                self.others += 1
                self.other_bytes += listed.size_bytes

    def _is_part(self, listed: Listed) -> bool:
        """Whether it belongs to a namespace, where it is counted then."""
        top, *rest = listed.name.removeprefix(self._above).split("/")
        name = parse_directory(top)
        if name is None or not rest:
            return False
        found = self.found.setdefault(name.namespace, _Found(name.model, name.digest))
        found.size_bytes += listed.size_bytes
        if name.rank is None:
            found.config = listed if rest == [CONFIG_NAME] else found.config
        else:
            found.ranks.add(name.rank)
            if len(rest) == 3 and key_of(*rest) is not None:
                found.chunk(listed)
        return True


class BucketLook:
    """One look at what in `store`, which it opens and closes, has names that begin with `above`,
    such as "team/kv/". `clock` is monotonic; `progress` is told how many objects it has seen."""

    def __init__(
        self, store: ObjectStore, above: str, clock: Clock, progress: Callable[[int], None]
    ) -> None:
        self._store = store
        self._above = above
        self._clock = clock
        self._progress = progress
        self._pacer = Pacer(1, clock, random.Random())

    async def survey(self) -> BucketSurvey:
        """ConfigError where the bucket cannot be used, TieringError where it fails later."""
        try:
            await self._store.open()
            tally = Tally(self._above)
            async for objects in self._pages():
                tally.add(objects)
                self._progress(tally.objects)
            told = [await self._told(*each) for each in sorted(tally.found.items())]
        except StoreError as error:
            raise TieringError(f"cannot look into the bucket: {error}") from error
        finally:
            self._pacer.close()
            await self._store.close()
        return BucketSurvey(
            told, tally.objects, tally.object_bytes, tally.others, tally.other_bytes
        )

    async def _pages(self) -> AsyncIterator[list[Listed]]:
        token: str | None = None
        while True:
            page = await self._page(token)
            yield page.objects
            if page.token is None:
                return
            if page.token == token:
                raise StoreError("the listing goes in circles; is this an S3 store?")
            token = page.token

    async def _page(self, token: str | None) -> Page:
        return await self._insist(lambda: self._store.page(self._above, token=token))

    async def _told(self, directory: str, found: _Found) -> NamespaceSurvey:
        config, problem = await self._config(found.config)
        return NamespaceSurvey(
            directory=directory,
            model=str(config.get("model", found.model)),
            digest=found.digest,
            config=config,
            layouts=(LAYOUT,),
            ranks=tuple(sorted(found.ranks)),
            chunks=found.chunks,
            bytes=found.chunk_bytes,
            disk_bytes=found.size_bytes,
            oldest_mtime_seconds=found.oldest,
            newest_mtime_seconds=found.newest,
            temp_files=0,
            quarantined=0,
            problems=(problem,) if problem else (),
        )

    async def _config(self, listed: Listed | None) -> tuple[dict[str, Any], str]:
        """What config.json says, empty where it says nothing; and why it cannot be read."""
        if listed is None:
            return {}, ""
        name = listed.name
        if listed.size_bytes > _CONFIG_BYTES_MAX:
            return {}, f"{name}: {listed.size_bytes} bytes are too many for one"
        try:
            got = await self._insist(lambda: self._store.get_small(name))
        except StoreError as error:
            return {}, str(error)
        try:
            config = orjson.loads(got[0]) if got is not None else {}
        except orjson.JSONDecodeError:
            return {}, ""
        return (config, "") if isinstance(config, dict) else ({}, "")

    async def _insist(self, request: Callable[[], Awaitable[Result]]) -> Result:
        deadline = self._clock.now() + _REQUEST_SECONDS
        return await self._pacer.insist(Lane.UPKEEP, deadline, request)
