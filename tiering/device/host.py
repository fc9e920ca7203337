"""Copies for a device whose memory is the host's own: vLLM's CPU backend, and tests.

Owns one thread and the copies queued for it. Loads go before stores, since requests wait for
loads; within a direction the order is the one given. Each copy takes its own copy of its block
map, so a caller may reuse its arrays at once. A copy that fails does not touch the others.
May be called from any thread; `close` from any but a future's callback.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tiering.device.base import BlockMap, ByteArray, DeviceCopier, HostPages
from tiering.errors import ClosedError, CopyError
from tiering.layout import ShareLayout
from tiering_kernels.rows import gather_pages, scatter_pages

Copy = tuple[BlockMap, Future[None]]


class HostCopier(DeviceCopier):
    """One rank's copies between page arrays in host memory and its share of the rows."""

    def __init__(self, groups: Sequence[HostPages], share: ByteArray) -> None:
        """`groups` in the order that block maps number them. `share` is this rank's part of the
        host tier: uint8, shape `(rows, share_bytes)`, rows may be strided; ValueError where the
        largest group does not fit. Nothing is copied here.
        """
        need = max(group.layout.share_bytes for group in groups)
        if share.shape[1] < need:
            raise ValueError(f"a share of {share.shape[1]} bytes, but the layout has {need}")
        self._groups = [(tuple(g.pages), _layers_of(share, g.layout)) for g in groups]
        self._loads: deque[Copy] = deque()
        self._stores: deque[Copy] = deque()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tiering-host-copier", daemon=True)
        self._thread.start()

    def gather(self, blocks: BlockMap) -> Future[None]:
        return self._submit(self._stores, blocks)

    def scatter(self, blocks: BlockMap) -> Future[None]:
        return self._submit(self._loads, blocks)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._groups = []

    def __repr__(self) -> str:
        with self._changed:
            state = "closed" if self._closing else "open"
            queued = f"{len(self._loads)} loads and {len(self._stores)} stores queued"
        return f"<HostCopier {state}, {queued}>"

    def _submit(self, queue: deque[Copy], blocks: BlockMap) -> Future[None]:
        kept = blocks.copied()
        future: Future[None] = Future()
        with self._changed:
            if self._closing:
                raise ClosedError("the copier is closed")
            queue.append((kept, future))
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._loads or self._stores or self._closing)
                if self._loads:
                    copy, (blocks, future) = scatter_pages, self._loads.popleft()
                elif self._stores:
                    copy, (blocks, future) = gather_pages, self._stores.popleft()
                else:
                    return
            self._carry_out(copy, blocks, future)

    def _carry_out(self, copy: Callable[..., None], blocks: BlockMap, future: Future[None]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            pages, shares = self._groups[blocks.group]
            copy(pages, blocks.blocks, blocks.slots, blocks.positions, shares)
        except Exception as error:
            failure = CopyError(f"{copy.__name__}, {len(blocks)} blocks: {error}")
            # Without its traceback, whose frames would keep the region mapped.
            failure.__cause__ = error.with_traceback(None)
            future.set_exception(failure)
        else:
            future.set_result(None)


def _layers_of(share: ByteArray, layout: ShareLayout) -> tuple[ByteArray, ...]:
    """Views of each layer's part: shape `(rows, blocks_per_chunk, page_bytes)`. Splitting the
    last axis of an array never copies, however its rows are strided."""
    count = layout.blocks_per_chunk
    return tuple(
        share[:, start : start + page * count].reshape(len(share), count, page)
        for start, page in zip(layout.layer_offsets, layout.page_bytes, strict=True)
    )
