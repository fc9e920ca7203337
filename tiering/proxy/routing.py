"""Who is asked for what: the engines of a request, in their order, and the role of each.

Decides and does nothing: the server asks, sends, and says here how it went. Ids and time are handed
in. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tiering.clock import Clock
from tiering.proxy.engines import Engine, Lineup
from tiering.proxy.prefixes import PrefixBook, Steps
from tiering.proxy.roles import Asked, Role, remote_decoder, remote_kv_source, remote_prefiller
from tiering.proxy.standing import Standing, Turns


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefiller has computed, and keeps for whoever comes with the id."""

    prefiller: Engine
    kv_request_id: str


class Router:
    """`new_id` gives an id that no request had before."""

    def __init__(self, lineup: Lineup, clock: Clock, new_id: Callable[[], str]) -> None:
        self.lineup = lineup
        self._new_id = new_id
        self._standing = Standing(lineup.engines, clock)
        self._prefillers = Turns(lineup.prefillers, self._standing)
        self._servers = Turns(lineup.servers, self._standing)
        self._book = PrefixBook(lineup.engines)

    # Whom to ask

    def prefillers(self, asked: Asked) -> list[Engine]:
        """Who may compute the prompt, first choice first. Nobody: the one who answers does."""
        return self._prefillers.take() if asked.is_one_prompt else []

    def servers(self) -> list[Engine]:
        """Who may answer, first choice first."""
        return self._servers.take_any()

    # With which role

    def to_prefill(self, prefiller: Engine, asked: Asked) -> tuple[Prefilled, Role]:
        """What `prefiller` is sent the prompt with, and what there is once it has answered."""
        planned = Prefilled(prefiller, self._new_id())
        return planned, remote_decoder(planned.kv_request_id) | self._source(prefiller, asked)

    def to_answer(self, server: Engine, asked: Asked, prefilled: Prefilled | None) -> Role:
        """What `server` is sent the request with."""
        if prefilled is not None:
            return remote_prefiller(prefilled.kv_request_id, prefilled.prefiller)
        # A decoder whose prefill failed computes all itself: the peers are not well.
        return {} if self.lineup.prefillers else self._source(server, asked)

    def _source(self, engine: Engine, asked: Asked) -> Role:
        """Another engine that was sent more of the beginning of the prompt than `engine` was."""
        if not asked.is_one_prompt:
            return {}
        best, most = None, self._book.common(engine, asked.steps)
        for other in self._usable(self.lineup.engines):
            if (common := self._book.common(other, asked.steps)) > most:
                best, most = other, common
        return {} if best is None else remote_kv_source(self._new_id(), best)

    # How it went

    def answered(self, engine: Engine, status: int, steps: Steps = ()) -> None:
        """With this status of HTTP; `steps` are the prompt that it was sent."""
        if status == 429 or status >= 500:
            self._standing.refused(engine)
            return
        self._standing.answered(engine)
        if status == 200:
            self._book.note(engine, steps)

    def overdue(self, engine: Engine) -> None:
        """It did not answer in time."""
        self._standing.refused(engine)

    def lost(self, engine: Engine) -> None:
        """It could not be reached, or went away before it answered."""
        self._standing.refused(engine)
        self._book.forget(engine)

    def probed(self, engine: Engine, is_well: bool) -> None:
        self._standing.probed(engine, is_well)
        if not is_well:
            self._book.forget(engine)

    def usable(self) -> list[Engine]:
        """Of those that answer."""
        return self._usable(self.lineup.servers)

    def _usable(self, engines: Iterable[Engine]) -> list[Engine]:
        return [engine for engine in engines if self._standing.is_usable(engine)]

    def __repr__(self) -> str:
        return f"<Router {self._standing!r}, {self._book!r}>"
