"""Links to peers: by which transport, one for each session, and gone with it. Loop only.

Of what both sides have, the first in order of preference is tried, then the next: shared memory
says no to another host by itself, and TCP reaches whoever the control plane has reached, unless a
firewall lets only that through. Where there is no link to be had, it is left at that for a while
that doubles: finding out takes seconds, and a request that can be computed waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tiering.clock import Clock, MonotonicClock
from tiering.errors import PeerError
from tiering.peers.calls import Peer
from tiering.peers.transports.base import Link, Transport
from tiering.peers.troubles import Troubles

log = logging.getLogger("tiering")


class Links:
    """`transports` in order of preference. Links are opened when first wanted."""

    def __init__(self, transports: Sequence[Transport], clock: Clock | None = None) -> None:
        self._transports = transports
        self._clock = clock or MonotonicClock()
        self._links: dict[Peer, asyncio.Task[Link]] = {}
        self._troubles: Troubles[Peer] = Troubles()

    def __len__(self) -> int:
        return len(self._links)

    async def link(self, peer: Peer) -> Link:
        """The link to `peer`, whose session is open. PeerError where there is none to be had."""
        await self.tidy()
        opening = self._links.get(peer)
        if opening is None or (opening.done() and _failed(opening)):
            if (why := self._troubles.why_not(peer, self._clock.now())) is not None:
                raise PeerError(str(peer.at), why)
            opening = asyncio.get_running_loop().create_task(self._connect(peer))
            self._links[peer] = opening
        await asyncio.wait([opening])
        if opening.cancelled():
            raise PeerError(str(peer.at), "its session was over before a link was open")
        return opening.result()

    async def drop(self, peer: Peer, link: Link) -> None:
        """`link` is of no use: the next one who wants one opens another."""
        opening = self._links.get(peer)
        if opening is not None and opening.done() and not _failed(opening):
            if opening.result() is not link:
                return  # it was given up before, and this is another one
            del self._links[peer]
        await link.close()

    async def tidy(self) -> None:
        """Close those whose session is over."""
        for peer in [peer for peer in self._links if peer.over is not None]:
            await self._end(peer)

    async def close(self) -> None:
        for peer in list(self._links):
            await self._end(peer)

    def __repr__(self) -> str:
        return f"<Links {len(self)}>"

    async def _end(self, peer: Peer) -> None:
        if (opening := self._links.pop(peer, None)) is None:
            return  # somebody else has
        opening.cancel()
        await asyncio.wait([opening])
        self._troubles.forget(peer)
        if not _failed(opening):
            await opening.result().close()

    async def _connect(self, peer: Peer) -> Link:
        offers = {offer.transport: offer for offer in peer.introduction.transports}
        reasons: list[str] = []
        for transport in self._transports:
            if (offer := offers.get(transport.name)) is None:
                continue
            try:
                link = await transport.connect(offer, peer.session_id, peer.token)
            except PeerError as error:
                reasons.append(str(error))
                continue
            log.info("peer %s: chunks come over %s", peer.at, transport.name)
            self._troubles.forget(peer)
            return link
        ours = ", ".join(transport.name for transport in self._transports)
        theirs = ", ".join(offers) or "nothing"
        why = "; ".join(reasons) or f"it offers {theirs}, and this engine has {ours}"
        reason = f"chunks cannot be moved: {why}"
        self._troubles.add(peer, reason, self._clock.now())
        raise PeerError(str(peer.at), reason)


def _failed(opening: asyncio.Task[Link]) -> bool:
    return opening.cancelled() or opening.exception() is not None
