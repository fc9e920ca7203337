"""`ProcessPortal`: the tiers' loop in a process of its own, which maps the same region.

Owns the steps that are out at the child, so that each has its one final outcome also if the child
dies: then, once the process is gone and nothing of it can touch a slot any more, they have failed.
All of it is for one thread, the core's owner, and never waits, but for `start` and `close`.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Sequence

import orjson

from tiering.clock import Clock, MonotonicClock
from tiering.config import EngineConfig
from tiering.config.given import as_given
from tiering.errors import ClosedError, TieringError
from tiering.namespace import Namespace
from tiering.process.keeper import Keeper
from tiering.process.link import Link
from tiering.process.logs import levels_here
from tiering.process.messages import (
    Came,
    Counted,
    Opened,
    Refused,
    Report,
    Setup,
    Steps,
    Stop,
    crossed,
)
from tiering.residency.plan import News, Outcome, Step, failed
from tiering.tiers.base import GAUGE_PREFIX
from tiering.tiers.host import Region

log = logging.getLogger("tiering")

CLOSE_SECONDS = 2.0
"""For the tiers to close, and for the kernel to end a process."""

WAIT_SECONDS = 0.1

_OF_TIERS = ("cpu_bytes_to_use", "secondary_tiers", "backpressure", "load_deadline_seconds")


class DistantTier:
    """A tier in the child, as far as it is told of. Counters keep their totals when the child is
    started again, but for what the last second of the one before had added."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._before: dict[str, int] = {}
        self._now: dict[str, int] = {}

    def stats(self) -> dict[str, int]:
        before = self._before
        return before | {name: value + before.get(name, 0) for name, value in self._now.items()}

    def told(self, stats: dict[str, int]) -> None:
        """What the tier's own `stats` says."""
        self._now = stats

    def ended(self) -> None:
        """A tier made anew will count from 0."""
        totals = self.stats().items()
        self._before = {name: n for name, n in totals if not name.startswith(GAUGE_PREFIX)}
        self._now = {}

    def __repr__(self) -> str:
        return f"<DistantTier {self.name}>"


class ProcessPortal:
    """For a caller without a loop: the loop runs in a child, from `start` to `close`.

    The child makes the tiers of `config` for `namespace` over the rows of `region`, as those of
    data-parallel replica `replica`. It ends with
    the engine, however that ends. If it ends by itself, everything that is asked of the tiers
    fails until another one has opened them again, which is tried after a pause that grows.
    """

    def __init__(
        self,
        config: EngineConfig,
        namespace: Namespace,
        region: Region,
        replica: int = 0,
        clock: Clock | None = None,
    ) -> None:
        given = {name: value for name, value in as_given(config).items() if name in _OF_TIERS}
        self._setup = Setup(
            config=orjson.dumps(given),
            namespace=namespace,
            region_path=str(region.path),
            replica=replica,
            levels=levels_here(),
            engine_pid=os.getpid(),
        )
        self.tiers: Sequence[DistantTier] = ()
        self.restarts = 0
        self._region = region
        self._clock = clock or MonotonicClock()
        self._keeper: Keeper | None = None
        self._out: dict[int, Step] = {}
        self._news: list[News] = []

    def start(self) -> None:
        self._keeper = keeper = Keeper(self._region, self._setup, self._clock)
        try:
            link = keeper.start()
        except OSError as error:
            self._keeper = None
            raise TieringError(
                f"the process of the tiers cannot be started ({error}): make room for one, or "
                'write "thread" for loop'
            ) from error
        try:
            self._first(link)
        except BaseException:
            self._end(drain_seconds=0.0)
            raise
        keeper.keep()

    def submit(self, steps: Sequence[Step]) -> None:
        link = self._link()
        if link is None or not link.is_open or link.is_silent:
            raise ClosedError("the process of the tiers is not running")
        if not steps:
            return
        if link.send(Steps(list(steps))):
            self._out.update((step.id, step) for step in steps)
        else:
            log.debug("the process of the tiers is behind: %d steps failed", len(steps))
            self._news += map(failed, steps)

    def drain(self) -> list[News]:
        link = self._link()
        if link is not None:
            self._receive(link)
            if link.is_over:
                self._settle(link)
        news, self._news = self._news, []
        return news

    def close(self, drain_seconds: float) -> bool:
        return self._keeper is None or self._end(drain_seconds)

    def _link(self) -> Link | None:
        """The child that the steps that are out are at, or the next."""
        return self._keeper.links[0] if self._keeper is not None and self._keeper.links else None

    def _first(self, link: Link) -> None:
        """Wait until the first child has opened the tiers; raises what they raised."""
        while not link.is_open:
            _wait_for(link, WAIT_SECONDS)
            for report in link.receive():
                if isinstance(report, Refused):
                    raise crossed(report)
                self._take(link, report)
            if link.is_over:
                raise TieringError(
                    f"the process of the tiers ended before they were open "
                    f"({link.how_it_ended()}): what it wrote last, to this process's standard "
                    f"error, says why"
                )

    def _receive(self, link: Link) -> None:
        for report in link.receive():
            self._take(link, report)

    def _take(self, link: Link, report: Report) -> None:
        match report:
            case Came(news):
                for each in news:
                    if isinstance(each, Outcome) and each.final:
                        self._out.pop(each.id, None)
                self._news += news
            case Counted(stats):
                self._count(stats)
            case Opened(names, stats):
                link.is_open = True
                if self.tiers:
                    self.restarts += 1
                    log.info("the process of the tiers runs again: they are back in use")
                else:
                    self.tiers = [DistantTier(name) for name in names]
                self._count(stats)
            case Refused():
                log.warning("the tiers cannot be opened again: %s", crossed(report))

    def _count(self, stats: list[dict[str, int]]) -> None:
        for tier, told in zip(self.tiers, stats, strict=True):
            tier.told(told)

    def _settle(self, link: Link) -> None:
        """The child is gone, and its mapping of the region with it."""
        if self._keeper is not None:
            self._keeper.links.popleft()
        link.close()
        self._news += map(failed, self._out.values())
        self._out.clear()
        for tier in self.tiers:
            tier.ended()

    def _end(self, drain_seconds: float) -> bool:
        """Whether all children are gone."""
        keeper = self._keeper
        if keeper is None:
            return True
        keeper.stop()
        # It may just be starting one.
        while keeper.links or not keeper.has_stopped(WAIT_SECONDS):
            if keeper.links and not self._has_stopped(keeper.links[0], drain_seconds):
                log.warning("the process of the tiers hangs, and is left behind")
                return False
        keeper.close()
        self._keeper = None
        return True

    def _has_stopped(self, link: Link, drain_seconds: float) -> bool:
        link.send(Stop(drain_seconds))
        self._wait_for_end(link, drain_seconds + CLOSE_SECONDS)
        if not link.ended.is_set():
            log.warning("the process of the tiers does not end by itself: it is killed")
            link.process.kill()
            self._wait_for_end(link, CLOSE_SECONDS)
        if link.is_over:
            self._settle(link)
        return link.is_over

    def _wait_for_end(self, link: Link, seconds: float) -> None:
        """Take in what comes meanwhile: the child waits for that."""
        give_up = self._clock.now() + seconds
        while not link.is_over and self._clock.now() < give_up:
            _wait_for(link, WAIT_SECONDS)
            self._receive(link)

    def __repr__(self) -> str:
        return f"<ProcessPortal {self._link()!r}, {len(self._out)} steps out>"


def _wait_for(link: Link, seconds: float) -> None:
    """Until something may have come, or the child has ended."""
    if link.is_silent:
        link.ended.wait(seconds)
        return
    poll = select.poll()
    poll.register(link.stream, select.POLLIN)
    poll.poll(seconds * 1000)
