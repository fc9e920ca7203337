"""What requests have to do with other engines, on the scheduler's side.

Owns what is still to be kept for peers: chunks of finished requests whose copies have not ended.
Sans-IO, on the scheduler's thread; part of the scheduler half.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tiering.metrics import is_worth_a_line
from tiering.residency.answers import Place
from tiering.residency.core import Residency
from tiering_connectors.vllm.roles import NO_ROLES, RoleError, Roles

log = logging.getLogger("tiering")


@dataclass(slots=True)
class _Ending:
    kept_as: str
    keys: Sequence[bytes]


class Peering:
    """One for each half of a scheduler."""

    def __init__(self, core: Residency) -> None:
        self._core = core
        self._endings: list[_Ending] = []
        self._ignored = 0

    def begin(self, owner: str, params: dict[str, object] | None) -> Roles:
        """The roles of a new request, which the core knows; it may have chunks from whom they
        name. Never raises: what cannot be meant is ignored, and computed."""
        roles = self._roles(params)
        if roles.whom is not None:
            whom = roles.whom
            self._core.peers.ask(owner, whom.packed(), has_all=whom.is_prefiller)
        if roles.kept_as is not None:
            self._core.peers.promise(owner)
        return roles

    def never_began(self, params: dict[str, object] | None) -> None:
        """A request is over of which `begin` was never told."""
        self.end(self._roles(params), ())

    def end(self, roles: Roles, keys: Sequence[bytes]) -> None:
        """The request is over: nothing else of it will come than `keys`."""
        if roles.kept_as is not None:
            self._endings.append(_Ending(roles.kept_as, keys))
            self.go_on()

    def go_on(self) -> None:
        """Copies have ended: keep what is whole by now."""
        if not self._endings:
            return
        index, waiting = self._core.index, []
        for ending in self._endings:
            if Place.FILLING in index.places(index.lookup(ending.keys)):
                waiting.append(ending)
            else:
                self._core.peers.keep(ending.kept_as, ending.keys)
        self._endings = waiting

    def forget(self) -> None:
        """After a reset: decoders that wait are told that there is nothing."""
        for ending in self._endings:
            ending.keys = ()
        self.go_on()

    def _roles(self, params: dict[str, object] | None) -> Roles:
        try:
            roles = Roles.of(params)
        except RoleError as error:
            self._ignore(str(error))
            return NO_ROLES
        if roles != NO_ROLES and not self._core.peers:
            self._ignore("kv_transfer_params name another engine, and there is no tier of type p2p")
            return NO_ROLES
        return roles

    def _ignore(self, reason: str) -> None:
        self._ignored += 1
        if is_worth_a_line(self._ignored):
            log.warning("%s; ignored, and computed here (%d so far)", reason, self._ignored)

    def __repr__(self) -> str:
        return f"<Peering {len(self._endings)} endings>"
