"""Processes of a simulated run that can be stopped, go on, and be killed at any moment.

All share one loop and one thread. Whatever is called on the loop belongs to the process in whose
context it was scheduled: while that is stopped, its callbacks wait, timers included, and run in
their order once it goes on, as after SIGSTOP and SIGCONT. A process that was killed is one that is
stopped for good; nothing of it is cleaned up by itself.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from tiering.testing.simloop import SimLoop

_CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar(
    "simulated process", default=None
)


class _Turn:
    """A callback of a process, run when it is due and the process is not stopped."""

    __slots__ = ("_args", "_callback", "_process", "context", "handle")

    def __init__(
        self,
        process: Process,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context,
    ) -> None:
        self.context = context
        self.handle: asyncio.Handle | None = None
        self._process = process
        self._callback = callback
        self._args = args

    def __call__(self) -> None:
        if self._process.is_stopped:
            self._process.held.append(self)
        elif self.handle is None or not self.handle.cancelled():
            self._callback(*self._args)


class Process:
    """`name` is for messages. Work begins in it by `start` and `soon`."""

    def __init__(self, name: str, loop: ProcessLoop) -> None:
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.held: list[_Turn] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in order
        self._loop = loop
        self._stopped_at = 0.0
        self._stopped_seconds = 0.0
        self._context = contextvars.copy_context()
        self._context.run(_CURRENT.set, self)

    @property
    def context(self) -> contextvars.Context:
        """For what is scheduled to run in this process."""
        return self._context.copy()

    @property
    def seconds(self) -> float:
        """The loop's time, less that for which it was stopped."""
        until = self._stopped_at if self.is_stopped else self._loop.time()
        return until - self._stopped_seconds

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work, context=self.context)

    def stop(self) -> None:
        if not self.is_stopped:
            self.is_stopped = True
            self._stopped_at = self._loop.time()

    def go_on(self) -> None:
        """Nothing where it is dead or is not stopped."""
        if self.is_stopped and not self.is_dead:
            self._resume()

    def kill(self) -> None:
        self.stop()
        self.is_dead = True

    def let_go(self) -> None:
        """At the end of a run: what is left of it can be cancelled."""
        if self.is_stopped:
            self.is_dead = False
            self._resume()

    async def bury(self) -> None:
        """End what is left of a dead process, when nobody looks at it any more."""
        self.let_go()
        while self.tasks:
            for task in list(self.tasks):
                task.cancel()
            await asyncio.wait(set(self.tasks))

    def _resume(self) -> None:
        self.is_stopped = False
        self._stopped_seconds += self._loop.time() - self._stopped_at
        held, self.held = self.held, []
        for turn in held:
            if turn.handle is None or not turn.handle.cancelled():
                self._loop.again(turn)

    def __repr__(self) -> str:
        state = "dead" if self.is_dead else "stopped" if self.is_stopped else "runs"
        return f"<Process {self.name}: {state}, {len(self.tasks)} tasks>"


def current() -> Process:
    """The process that calls this. REQUIRES: one does."""
    process = _CURRENT.get()
    assert process is not None
    return process


class ProcessLoop(SimLoop):
    """A loop whose callbacks belong to processes."""

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        turn = _turn(callback, args, context)
        if turn is None:
            return super().call_soon(callback, *args, context=context)
        turn.handle = super().call_soon(turn, context=turn.context)
        return turn.handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        turn = _turn(callback, args, context)
        if turn is None:
            return super().call_at(when, callback, *args, context=context)
        handle = super().call_at(when, turn, context=turn.context)
        turn.handle = handle
        return handle

    def again(self, turn: _Turn) -> None:
        """For Process: what was held is due now."""
        super().call_soon(turn, context=turn.context)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        context = options.get("context")
        process = _CURRENT.get() if context is None else context.get(_CURRENT)
        if process is not None:
            process.tasks[task] = None
            forget = partial(process.tasks.pop, task)
            task.add_done_callback(lambda _: forget(None), context=contextvars.Context())
        return task


def _turn(
    callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None
) -> _Turn | None:
    process = _CURRENT.get() if context is None else context.get(_CURRENT)
    if process is None:
        return None
    return _Turn(process, callback, args, context or contextvars.copy_context())
