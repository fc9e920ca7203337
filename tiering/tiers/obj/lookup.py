"""Finds out what is in the bucket: a walk over all of it, and searches for what it has not shown.

Owns the questions under way: whoever asks the same shares the answer, and one who is cancelled
does not take it from the others. Every question is a LIST, of up to 1,000 names in a walk and of
one name in a search; never a HEAD. Used on the tier's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from tiering.clock import Clock
from tiering.keys import by_group
from tiering.tiers.obj.existence import ChainSearch, Existence
from tiering.tiers.obj.names import ObjNames
from tiering.tiers.obj.pacing import Lane, LateError, Pacer, at_once
from tiering.tiers.obj.store import Listed, ObjectStore, Page, StoreError

PAGE_NAMES = 1000

Known = bool | StoreError
"""Whether a chunk is there, or why nobody could say."""


@dataclass(frozen=True, slots=True)
class _Question:
    """One under way, whose task ends by `deadline`."""

    deadline: float
    task: asyncio.Task[Known]


class Lookup:
    """Of the chunks called `names`, each an object of `object_bytes`; another size is no chunk."""

    def __init__(
        self,
        store: ObjectStore,
        names: ObjNames,
        object_bytes: int,
        existence: Existence,
        pacer: Pacer,
        clock: Clock,
        page_seconds: float,
    ) -> None:
        """`page_seconds`: how long one of a listing may take."""
        self._store = store
        self._names = names
        self._object_bytes = object_bytes
        self._existence = existence
        self._pacer = pacer
        self._clock = clock
        self._page_seconds = page_seconds
        self._asked: dict[bytes, _Question] = {}

    def __repr__(self) -> str:
        return f"<Lookup {len(self._asked)} questions under way, {self._existence!r}>"

    async def find(self, keys: Sequence[bytes], deadline: float) -> list[Known]:
        """Of each key, whether it is there. What is not known is searched for as a chain of each
        group, all at once; a chain that is not done by `deadline` is LateError."""
        known: list[bool | None] = self._existence.ask(keys)
        unknown = [key for key, told in zip(keys, known, strict=True) if told is None]
        if not unknown:
            return [bool(told) for told in known]
        chains = by_group(dict.fromkeys(unknown))
        answers: dict[bytes, Known] = {}
        for found in await at_once(self._search(chain, deadline) for chain in chains):
            answers |= found
        pairs = zip(keys, known, strict=True)
        return [answers[key] if told is None else told for key, told in pairs]

    async def size_of(self, key: bytes, deadline: float) -> int | None:
        """The bytes of its object as a listing has them by `deadline`; None where there is none."""
        name = self._names.chunk(key)
        listed = await self._first(name, deadline)
        return listed.size_bytes if listed is not None and listed.name == name else None

    async def walk(self) -> AsyncGenerator[list[tuple[bytes, float]], None]:
        """Have everything shown, and known from the end on: the keys of each page, and when each
        was put, by the store's clock. StoreError where a page cannot be had, and what was known
        stays."""
        self._existence.walk_begins()
        try:
            token: str | None = None
            while True:
                self._existence.page_asked()
                page = await self._page(token)
                chunks = self._chunks_in(page)
                self._existence.page([key for key, _ in chunks])
                token = page.token
                if token is None:
                    self._existence.walk_ends()
                yield chunks
                if token is None:
                    return
        finally:
            self._existence.walk_breaks_off()

    async def keys(self) -> AsyncIterator[list[bytes]]:
        """Every key, a page at a time; what is known stays as it is. StoreError as above."""
        token: str | None = None
        while True:
            page = await self._page(token)
            yield [key for key, _ in self._chunks_in(page)]
            token = page.token
            if token is None:
                return

    async def close(self) -> None:
        """Call off what is under way."""
        tasks = {question.task for question in self._asked.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _page(self, token: str | None) -> Page:
        deadline = self._clock.now() + self._page_seconds
        prefix = self._names.chunks
        page = await self._pacer.run(
            Lane.UPKEEP, deadline, lambda: self._store.page(prefix, token=token, limit=PAGE_NAMES)
        )
        if page.token is not None and page.token == token:
            raise StoreError(f"a listing of {prefix} goes in circles: is this an S3 store?")
        return page

    def _chunks_in(self, page: Page) -> list[tuple[bytes, float]]:
        return [
            (key, listed.modified)
            for listed in page.objects
            if listed.size_bytes == self._object_bytes
            and (key := self._names.key_of(listed.name)) is not None
        ]

    async def _search(self, chain: list[bytes], deadline: float) -> dict[bytes, Known]:
        search = ChainSearch(len(chain))
        is_begun = False
        while places := search.questions:
            answers = await at_once(self._ask(chain[place], deadline) for place in places)
            for place, answer in zip(places, answers, strict=True):
                if isinstance(answer, LateError) and is_begun:
                    # It had what was left of the time: the store has answered before.
                    answer = LateError("not all found out by its deadline", hangs=False)
                if isinstance(answer, StoreError):
                    return dict.fromkeys(chain, answer)
                search.answer(place, answer)
            is_begun = True
        found = set(search.found)
        there = [key for place, key in enumerate(chain) if place in found]
        missing = [key for place, key in enumerate(chain) if place not in found]
        # What was put or has gone meanwhile is known better than by conclusion.
        self._existence.found(self._still_unknown(there))
        self._existence.missing(self._still_unknown(missing))
        return {key: place in found for place, key in enumerate(chain)}

    def _still_unknown(self, keys: list[bytes]) -> list[bytes]:
        told = zip(keys, self._existence.ask(keys), strict=True)
        return [key for key, known in told if known is None]

    async def _ask(self, key: bytes, deadline: float) -> Known:
        while True:
            (known,) = self._existence.ask([key])
            if known is not None:
                return known
            question = self._asked.get(key) or self._begin(key, deadline)
            is_longer = question.deadline > deadline
            patience = max(0.0, deadline - self._clock.now()) if is_longer else None
            await asyncio.wait({question.task}, timeout=patience)
            if not question.task.done():
                return LateError("not done by its deadline: others wait for it", hangs=False)
            answer = question.task.result()
            # One that another had less time for says nothing about what we have time for.
            if not isinstance(answer, LateError) or question.deadline >= deadline:
                return answer

    def _begin(self, key: bytes, deadline: float) -> _Question:
        # Not in a TaskGroup: others may wait for it when its first asker is gone.
        task = asyncio.get_running_loop().create_task(self._probe(key, deadline))
        question = self._asked[key] = _Question(deadline, task)
        task.add_done_callback(lambda _: self._asked.pop(key, None))
        return question

    async def _probe(self, key: bytes, deadline: float) -> Known:
        try:
            is_there = await self.size_of(key, deadline) == self._object_bytes
        except StoreError as error:
            return error
        (known,) = self._existence.ask([key])
        if known is not None:
            return known  # It was put or has gone meanwhile.
        if is_there:
            self._existence.found([key])
        else:
            self._existence.missing([key])
        return is_there

    async def _first(self, name: str, deadline: float) -> Listed | None:
        """The first object whose name begins with `name`."""
        page = await self._pacer.run(Lane.LOAD, deadline, lambda: self._store.page(name, limit=1))
        return page.objects[0] if page.objects else None
