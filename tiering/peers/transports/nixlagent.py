"""NIXL's agent, on a thread of its own, and what is under way in it.

Its calls may take long: they wire up endpoints, and move rows wherever hardware does not; and two
of them at a time are more than it bears, unless it is told to lock. So the thread makes it, makes
every call, and lets go of it; calls are made in the order in which they were asked for. NIXL's own
progress thread, which takes a whole core, is off: turns of this one let UCX work, often while
there is something to move, seldom while not. NIXL is imported when this is opened.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from tiering.errors import ClosedError, ConfigError
from tiering.peers.transports.landing import Memory
from tiering.underway import to_the_end

# How long until UCX works again: while READs are waited for, where a peer was just heard of, which
# may need this processor to have its own, and else.
_AWAITED_SECONDS, _BUSY_SECONDS, _IDLE_SECONDS = 0.0002, 0.0005, 0.01
_BUSY_FOR_SECONDS = 0.05
_INFINIBAND = Path("/sys/class/infiniband")
_READING = b"reading"

Of = TypeVar("Of")


def has_infiniband() -> bool:
    """Whether this host has a device for RDMA: InfiniBand or RoCE."""
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


class Transfer:
    """READs of `size` bytes for each of `pairs` (address here, address there) from the agent
    `peer`. `ended` has why they have failed, empty where they have not, once nothing of them lands
    any more. `is_awaited`: somebody waits for that."""

    def __init__(self, peer: str, pairs: Sequence[tuple[int, int]], size: int) -> None:
        self.peer = peer
        self.pairs = pairs
        self.size = size
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.is_awaited = True
        # The thread's.
        self.handle: Any = None
        self.outcome: str | None = None


class NixlAgent:
    """Between `open` and `close`, on the running loop; none of it holds the loop up."""

    def __init__(self, name: str, backends: Sequence[str], num_threads: int) -> None:
        self.name = name
        self.serves = False
        """Whether there are peers who may read here."""
        self._backends = list(backends)
        self._inside = _Inside(name, self._backends, num_threads)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tiering-peers-nixl")
        self._is_closed = False
        self._transfers: set[Transfer] = set()
        self._added = 0
        self._timer: asyncio.TimerHandle | None = None
        self._turning: asyncio.Future[bool] | None = None
        self._busy_until = 0.0

    async def open(self, served: Sequence[Memory], lent: Memory) -> bytes:
        """What others need to read `served`; READs may land in `lent`. ConfigError where NIXL
        cannot be had, or not with these backends; then nothing is left open."""
        try:
            metadata = await self.run(self._inside.open, served, lent)
        except BaseException:
            await self.close()
            raise
        self._rest(_IDLE_SECONDS)
        return metadata

    def lend(self, memory: Memory) -> asyncio.Future[object]:
        """READs may land in `memory`, too, once this has come; it raises what NIXL does."""
        return self._submit(self._inside.register, [memory])

    async def add(self, metadata: bytes) -> str:
        """The name of another agent, which may be read until `let_go`, to be called once for each
        call of this. Raises what NIXL does."""
        adding = self._submit(self._inside.add, metadata)
        self._added += 1
        try:
            return await to_the_end(adding)
        except BaseException:
            self._added -= 1
            if not adding.cancelled() and adding.exception() is None:
                self._submit(self._inside.let_go, adding.result())
            raise

    def let_go(self, peer: str) -> None:
        """Whoever has called `add` reads no more of it. It is forgotten once nobody does, and
        nothing lands that was read of it: two sessions may be with the same engine."""
        if not self._is_closed:
            self._added -= 1
            self._submit(self._inside.let_go, peer)

    async def begin(self, transfer: Transfer) -> None:
        """REQUIRES: its peer was added, and what it reads into was lent."""
        work = self._submit(self._inside.begin, transfer)
        self._transfers.add(transfer)
        await to_the_end(work)
        self._tell()
        if transfer.ended.done() or self._timer is None:
            return
        soon = asyncio.get_running_loop().time() + _AWAITED_SECONDS
        if self._timer.when() > soon:
            self._timer.cancel()
            self._rest(_AWAITED_SECONDS)

    async def run(self, call: Callable[..., Of], *arguments: object) -> Of:
        """What `call` gives, in the thread. Cancelled, it comes back when the thread has."""
        return await to_the_end(self._submit(call, *arguments))

    async def close(self) -> None:
        """End all, and the thread. May be called twice. REQUIRES: nobody waits for transfers."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        loop, left = asyncio.get_running_loop(), tuple(self._transfers)
        try:
            await to_the_end(loop.run_in_executor(self._pool, self._inside.close, left))
        finally:
            self._tell()
            self._pool.shutdown()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._transfers)} transfers"
        return f"<NixlAgent {self.name} over {','.join(self._backends)}: {state}>"

    def _submit(self, call: Callable[..., Of], *arguments: object) -> asyncio.Future[Of]:
        if self._is_closed:
            raise ClosedError("the transport nixl is not open")
        return asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    # Turns of the thread

    def _rest(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._begin_turn)

    def _begin_turn(self) -> None:
        self._timer = None
        if not (self.serves or self._added or self._transfers):
            self._rest(_IDLE_SECONDS)
            return
        self._turning = self._submit(self._inside.turn, tuple(self._transfers))
        self._turning.add_done_callback(self._turned)

    def _turned(self, turn: asyncio.Future[bool]) -> None:
        self._turning = None
        self._tell()
        if self._is_closed:
            return
        now = asyncio.get_running_loop().time()
        if turn.result():
            self._busy_until = now + _BUSY_FOR_SECONDS
        if any(transfer.is_awaited for transfer in self._transfers):
            self._rest(_AWAITED_SECONDS)
        else:
            self._rest(_BUSY_SECONDS if now < self._busy_until else _IDLE_SECONDS)

    def _tell(self) -> None:
        """Those who wait, of what has ended."""
        for transfer in [each for each in self._transfers if each.outcome is not None]:
            self._transfers.discard(transfer)
            if not transfer.ended.done():
                transfer.ended.set_result(transfer.outcome or "")


class _Inside:
    """The thread's side."""

    def __init__(self, name: str, backends: list[str], num_threads: int) -> None:
        self._name = name
        self._backends = backends
        self._num_threads = num_threads
        self._agent: Any = None
        self._registered: list[Any] = []
        # How many links and transfers there are with each other agent.
        self._uses: Counter[str] = Counter()

    def open(self, served: Sequence[Memory], lent: Memory) -> bytes:
        """Takes a second or two, and long for many threads."""
        self._agent = _new_agent(self._name, self._backends, self._num_threads)
        try:
            told = self.register(served)
            self.register([lent])
            return bytes(self._agent.get_partial_agent_metadata(told, True, self._backends))
        except Exception as error:
            raise _unusable(self._backends, error) from error

    def register(self, memory: Sequence[Memory]) -> object:
        places = [(each.ctypes.data, each.nbytes, 0, "") for each in memory]
        told = self._agent.register_memory(places, "DRAM")
        self._registered.append(told)
        return told

    def add(self, metadata: bytes) -> str:
        peer = self._agent.add_remote_agent(metadata)
        name = peer.decode() if isinstance(peer, bytes) else str(peer)
        self._uses[name] += 1
        return name

    def let_go(self, peer: str) -> None:
        self._uses[peer] -= 1
        if self._uses[peer] <= 0:
            del self._uses[peer]
            _quietly(self._agent.remove_remote_agent, peer)

    def begin(self, transfer: Transfer) -> None:
        self._uses[transfer.peer] += 1
        _quietly(self._agent.send_notif, transfer.peer, _READING)
        size, agent = transfer.size, self._agent
        try:
            ours = agent.get_xfer_descs([(here, size, 0) for here, _ in transfer.pairs], "DRAM")
            theirs = agent.get_xfer_descs([(far, size, 0) for _, far in transfer.pairs], "DRAM")
            transfer.handle = agent.initialize_xfer("READ", ours, theirs, transfer.peer)
            self._look(transfer, agent.transfer(transfer.handle))
        except Exception as error:
            self._end(transfer, why(error))

    def turn(self, transfers: Collection[Transfer]) -> bool:
        """Let UCX do what the hardware does not; whether a peer was heard of that reads here."""
        heard = bool(_quietly(self._agent.get_new_notifs))
        for transfer in transfers:
            if transfer.outcome is None:
                try:
                    self._look(transfer, self._agent.check_xfer_state(transfer.handle))
                except Exception as error:
                    self._end(transfer, why(error))
        return heard

    def close(self, transfers: Collection[Transfer]) -> None:
        for transfer in transfers:
            if transfer.outcome is None:
                self._end(transfer, "the transport was closed")
        for peer in self._uses:
            _quietly(self._agent.remove_remote_agent, peer)
        for registered in self._registered:
            _quietly(self._agent.deregister_memory, registered)
        # What was given up and is still under way has nobody any more who would let it land.
        self._registered, self._agent = [], None

    def _look(self, transfer: Transfer, state: str) -> None:
        if state != "PROC":
            self._end(transfer, "" if state == "DONE" else f"a transfer ended as {state}")

    def _end(self, transfer: Transfer, outcome: str) -> None:
        if transfer.handle is not None:
            _quietly(self._agent.release_xfer_handle, transfer.handle)
            transfer.handle = None
        transfer.outcome = outcome
        self.let_go(transfer.peer)


def _new_agent(name: str, backends: list[str], num_threads: int) -> Any:
    """ConfigError where NIXL cannot be had."""
    if not has_infiniband():
        # Without such a device UCX's modules for it have nothing to do, and a library of theirs
        # crashes the interpreter at its exit. UCX reads this when it is loaded.
        os.environ.setdefault("UCX_MODULES", "^ib,rdmacm")
    try:
        api = import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            "transport",
            "nixl",
            f"NIXL cannot be imported: {error}",
            "run pip install 'kv-tiering[nixl]', or set transport: tcp",
        ) from error
    try:
        config = api.nixl_agent_config(
            enable_prog_thread=False, num_threads=num_threads, backends=backends
        )
        return api.nixl_agent(name, config)
    except Exception as error:
        raise _unusable(backends, error) from error


def _unusable(backends: Sequence[str], error: Exception) -> ConfigError:
    return ConfigError(
        "backends",
        list(backends),
        f"NIXL cannot use them here: {why(error)}",
        "name others that move host memory, such as UCX, or set transport: tcp",
    )


def why(error: Exception) -> str:
    """What `error` says, or else what it is."""
    return str(error) or type(error).__name__


def _quietly(call: Callable[..., Any], *arguments: Any) -> Any:
    """What `call` gives, None where it fails: where nothing could be done about it."""
    try:
        return call(*arguments)
    except Exception:
        return None
