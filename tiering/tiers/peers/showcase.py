"""What of this engine's host tier peers may have, and what is kept there for them.

A mirror of the core's index on the tiers' loop: so peers are served while the engine idles, without
asking its scheduler. It lags, and that is harmless: what is read under a reference counts only if
its slot has the same generation afterwards. What was promised is pinned by the core, until `keep`
comes back. Loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tiering.peers.messages import Reference

COMPLETE_MAX = 16_384
"""Requests that are remembered to be complete when nothing is kept for them, or not any more: of
any before, a decoder that asks for what is not here waits until its deadline. As many are that
were over before they were complete."""


class Showcase:
    """`shown` is called with keys that have just come to be here."""

    def __init__(self, shown: Callable[[Sequence[bytes]], None]) -> None:
        self._shown = shown
        self._at: dict[bytes, Reference] = {}
        self._kept: dict[str, _Kept] = {}
        self._complete: dict[str, None] = {}
        # Requests that were over before they were complete.
        self._over: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __repr__(self) -> str:
        return f"<Showcase {len(self)} chunks, kept for {len(self._kept)} requests>"

    @property
    def kept_chunks(self) -> int:
        """How many are kept that were not fetched yet."""
        return sum(len(kept.left) for kept in self._kept.values())

    def left(self, kv_request_id: str) -> int:
        """How many are kept for that request, and were not fetched yet."""
        kept = self._kept.get(kv_request_id)
        return 0 if kept is None else len(kept.left)

    def show(self, keys: Sequence[bytes], slots: Sequence[int], generations: Sequence[int]) -> None:
        """`keys` can be read from `slots` while these have `generations`."""
        self._at.update(zip(keys, map(Reference, slots, generations), strict=True))
        self._shown(keys)

    def hide(self, keys: Sequence[bytes]) -> None:
        """`keys`, or all where there are none, are not there any more."""
        if not keys:
            self._at.clear()
        for key in keys:
            self._at.pop(key, None)

    def places(self, keys: Sequence[bytes]) -> list[Reference | None]:
        """Where each of `keys` is, None where it is not here."""
        return list(map(self._at.get, keys))

    async def keep(self, kv_request_id: str, keys: Sequence[bytes], seconds: float) -> set[bytes]:
        """Wait until `keys`, all that there will be for the request, are fetched, or nobody has
        come for `seconds`; those that were."""
        kept = _Kept(dict.fromkeys(keys))
        before = self._kept.get(kv_request_id)
        self._kept[kv_request_id] = kept
        if before is not None:
            before.is_over.set()
        _remember(self._complete, kv_request_id)
        if kv_request_id in self._over:
            del self._over[kv_request_id]
            kept.is_over.set()
        self._shown(keys)
        try:
            async with asyncio.timeout(seconds):
                await kept.is_over.wait()
        except TimeoutError:
            pass
        finally:
            if self._kept.get(kv_request_id) is kept:
                del self._kept[kv_request_id]
        return set(keys).difference(kept.left)

    def is_complete(self, kv_request_id: str) -> bool:
        """Whether nothing more will come for the request."""
        return kv_request_id in self._kept or kv_request_id in self._complete

    def fetched(self, kv_request_id: str, keys: Sequence[bytes]) -> None:
        """A peer has read `keys`."""
        if (kept := self._kept.get(kv_request_id)) is not None:
            for key in keys:
                kept.left.pop(key, None)
            if not kept.left:
                kept.is_over.set()

    def request_over(self, kv_request_id: str) -> None:
        """The peer wants nothing more for the request. It may have given up before all that is to
        be kept for it is here, and then none of it is."""
        if (kept := self._kept.get(kv_request_id)) is not None:
            kept.is_over.set()
        elif kv_request_id not in self._complete:
            _remember(self._over, kv_request_id)


def _remember(among: dict[str, None], kv_request_id: str) -> None:
    among[kv_request_id] = None
    if len(among) > COMPLETE_MAX:
        del among[next(iter(among))]


class _Kept:
    """What is pinned for one request, and was not fetched yet."""

    def __init__(self, left: dict[bytes, None]) -> None:
        self.left = left
        self.is_over = asyncio.Event()
        if not left:
            self.is_over.set()
