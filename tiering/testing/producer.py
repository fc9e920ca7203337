"""A process that serves rows by a transport until it is told to stop, for tests and benchmarks of
the reading end: another engine, as far as a link can tell, that can be stopped and killed.

`Producer` starts and ends it. It runs `python -m tiering.testing.producer MAKER ROWS ROW_BYTES`,
MAKER being `module:function` of what makes a transport of what is served.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import sys
from collections.abc import Callable

from tiering.peers.messages import Offer
from tiering.peers.transports.base import Served, Transport
from tiering.testing.children import Child, stay
from tiering.testing.rowspace import RowSpace

SESSION = bytes(range(16))
TOKEN = bytes(range(32))


class Producer(Child):
    """Within `with`: serves `rows` rows of `row_bytes` to SESSION and TOKEN."""

    def __init__(self, maker: str, rows: int, row_bytes: int) -> None:
        """`maker` is `module:function`, importable in a fresh interpreter with this one's path."""
        super().__init__("-m", "tiering.testing.producer", maker, rows, row_bytes)
        details = base64.b64decode(self.told["details"])
        self.offer = Offer(self.told["transport"], self.told["address"], details)


async def _serve(maker: Callable[[Served], Transport], rows: int, row_bytes: int) -> None:
    space = RowSpace(rows, row_bytes)
    transport = maker(space.served)
    await transport.open()
    transport.admit(SESSION, TOKEN)
    offer = transport.offer()
    details = base64.b64encode(offer.details).decode()
    await stay(transport=offer.transport, address=offer.address, details=details)
    await transport.close()


def main() -> None:
    """The process itself."""
    maker, rows, row_bytes = sys.argv[1:]
    module, _, function = maker.partition(":")
    made = getattr(importlib.import_module(module), function)
    asyncio.run(_serve(made, int(rows), int(row_bytes)))


if __name__ == "__main__":
    main()
