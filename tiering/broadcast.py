"""The events of a program's TieredStore, for routers: what is said to `TieredStore(events=...)`.

Owns the announcer, and a task that passes on what is found out later, such as what a disk holds
from before. On the program's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tiering.clock import UnixClock
from tiering.config import StoreConfig
from tiering.events import Event
from tiering.events.announcer import Announcer
from tiering.events.blocks import AllBlocksCleared, BlockEvent
from tiering.events.descriptions import Shape, describe
from tiering.keys import GROUP_BYTES, token_keys
from tiering.store import namespace_of
from tiering.wiring import build_catalogues, media_of

LATER_SECONDS = 0.05
DESCRIPTIONS_MAX = 1 << 18


class Broadcast:
    """Between `async with`, around the store's. `publish` takes events on the loop, such as
    `ZmqPublisher.publish`; it must not wait and must not raise.

    A router can use what it knows the tokens of: say so by `describe`, before `save` and `load`.
    """

    def __init__(self, config: StoreConfig, publish: Callable[[list[BlockEvent]], None]) -> None:
        layout = config.layout
        self._layout = layout
        self._publish = publish
        self._shape = Shape(0, layout.block_tokens, layout.blocks_per_chunk, "full_attention")
        self._announcer = Announcer(
            self._shape,
            media_of(config),
            build_catalogues(config, namespace_of(config)),
            UnixClock(),
            descriptions_max=DESCRIPTIONS_MAX,
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Broadcast:
        """Say that nothing that was published under this name before is so."""
        self._publish([AllBlocksCleared()])
        self._task = asyncio.get_running_loop().create_task(self._go_on())
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._pass_on()
        # It may wait for the disk.
        await asyncio.to_thread(self._announcer.close)

    def describe(
        self,
        tokens: Sequence[int],
        keys: Sequence[bytes] | None = None,
        *,
        salt: bytes = b"",
        lora_name: str | None = None,
    ) -> None:
        """The full chunks of `tokens`, a prompt, may be stored or loaded soon, under `keys`: those
        of `KVLayout.keys(tokens, salt)` unless given. OverflowError for a token that is no unsigned
        32-bit integer."""
        layout = self._layout
        if keys is None:
            keys = layout.keys(tokens, salt)
        count = len(keys) * layout.blocks_per_chunk
        own = list(tokens[: count * layout.block_tokens])
        blocks = [key[:-GROUP_BYTES] for key in token_keys(own, layout.block_tokens, salt)]
        if len(blocks) != count:
            raise ValueError(f"{len(tokens)} tokens for {len(keys)} chunks")
        if keys:
            run = describe(self._shape, keys, own, blocks, None, lora_name)
            self._announcer.expect(run, own)

    def publish(self, events: list[Event]) -> None:
        """As the store's EventSink."""
        self._announcer.publish(events)
        self._pass_on()

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be told without anyone's doing."""
        return self._announcer.is_busy

    def stats(self) -> dict[str, int]:
        """Blocks told of, and what could not be."""
        return self._announcer.counters()

    def _pass_on(self) -> None:
        while events := self._announcer.take():
            self._publish(events)

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(LATER_SECONDS)
            if self._announcer.is_busy:
                self._pass_on()

    def __repr__(self) -> str:
        return f"<Broadcast {self._announcer!r}>"
