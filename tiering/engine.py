"""Core and portal together: one owner calls `pump` and everything that is due happens.

Owns nothing but the pair. What the core asks for goes out through the portal, what came back goes
into the core, events go to the sink; all of it at once and without waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tiering.errors import ClosedError
from tiering.events import EventSink
from tiering.portal import Portal
from tiering.residency.core import Residency
from tiering.residency.plan import Step, failed

log = logging.getLogger("tiering")


class Engine:
    """Called by the core's owner only: the scheduler's thread, or the program's loop."""

    def __init__(self, core: Residency, portal: Portal, events: EventSink) -> None:
        self.core = core
        self._portal = portal
        self._events = events
        self._restarts = portal.restarts

    def pump(self) -> None:
        """Take in news, hand out steps, publish events. Call it before asking and after
        changing."""
        core = self.core
        if news := self._portal.drain():
            core.apply(news)
        if self._restarts != self._portal.restarts:
            self._restarts = self._portal.restarts
            self._submit(core.peers.told_anew())
        steps, events = core.take_steps(), core.take_events()
        # What peers are shown goes first: of what is kept for one of them, all is shown by then.
        self._submit([*core.peers.told(events), *steps])
        if events:
            self._events.publish(events)

    def _submit(self, steps: Sequence[Step]) -> None:
        if not steps:
            return
        try:
            self._portal.submit(steps)
        except ClosedError as error:
            # The loop is gone: what it cannot do is a miss or an unstored chunk, at once.
            log.debug("%s: %d steps failed", error, len(steps))
            self.core.apply([failed(step) for step in steps])
