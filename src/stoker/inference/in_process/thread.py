"""The engine's own thread: asyncio hands calls over, the thread steps, answers come back.

What the event loop asks for is done between two steps, in order. Whatever a step raises fails the
calls in flight and no more: the next ones find clean slots. ``close`` ends the thread after the
step it is in.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from stoker.errors import ModelUnavailable
from stoker.inference.in_process.engine import Engine, Running
from stoker.seams.clock import Clock, SystemClock

_T = TypeVar("_T")
_CLOSED = "the in-process model is closed"
_TURNS = 4
"""Turns of the event loop in which a lane hands a freed place to the next ready call."""
_TURNS_SHARE = 0.1
"""The part of a step's time that is waited for that, at most: an empty place costs more."""


class EngineThread:
    """Drives one engine; made and used on one event loop."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.engine: Engine | None = None
        """Stepped once it is there; nobody but the thread touches it from then on."""
        self._clock = clock or SystemClock()
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._asked: deque[Callable[[], None]] = deque()
        self._closing = False
        self._calls: dict[Running, asyncio.Future[None]] = {}
        self._doing: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="stoker-torch", daemon=True)
        self._thread.start()

    @property
    def calls(self) -> tuple[Running, ...]:
        """The sequences in flight, as the event loop knows them."""
        return tuple(self._calls)

    async def do(self, what: Callable[[], _T]) -> _T:
        """Do ``what`` on the thread between two steps; return or raise what it does.

        Raises:
            ModelUnavailable: closed before it was done.

        **Cancellation:** what has begun is done to its end; nobody hears of it.
        """
        if self._closing:
            raise ModelUnavailable(_CLOSED)
        done: Future[_T] = Future()
        self._doing.add(done)
        done.add_done_callback(self._doing.discard)

        def doing() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(what())
            except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
                done.set_exception(error)

        self._ask(doing)
        return await asyncio.wrap_future(done)

    async def run(self, sequence: Running) -> None:
        """Return when ``sequence`` has ended.

        Raises:
            ModelUnavailable: the engine failed, or is closed.

        **Cancellation:** the sequence is aborted before the next step.
        """
        engine = self.engine
        assert engine is not None, "there is an engine before there are calls"
        if self._closing:
            raise ModelUnavailable(_CLOSED)
        done = self._calls[sequence] = self._loop.create_future()
        self._ask(lambda: engine.submit(sequence))
        try:
            await done
        except asyncio.CancelledError:
            self._ask(lambda: engine.abort(sequence))
            raise
        finally:
            del self._calls[sequence]

    def ended(self, sequence: Running, problem: ModelUnavailable | None) -> None:
        """Tell who waits for ``sequence``; called by the engine, on the thread."""
        with suppress(RuntimeError):  # the event loop is gone, and whoever waited with it
            self._loop.call_soon_threadsafe(self._answer, sequence, problem)

    async def close(self) -> None:
        """End the thread after the step it is in; calls in flight fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)
        for sequence in self.calls:
            self._answer(sequence, ModelUnavailable(_CLOSED))
        for done in tuple(self._doing):
            done.set_exception(ModelUnavailable(_CLOSED))

    def _answer(self, sequence: Running, problem: ModelUnavailable | None) -> None:
        done = self._calls.get(sequence)
        if done is None or done.done():
            return
        if problem is None:
            done.set_result(None)
        else:
            done.set_exception(problem)

    def _ask(self, what: Callable[[], None]) -> None:
        with self._changed:
            self._asked.append(what)
            self._changed.notify()

    # --- on the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._asked or self._is_busy())
                if self._closing:
                    return
                asked, self._asked = self._asked, deque()
            for what in asked:
                what()
            if self._is_busy():
                self._step()

    def _is_busy(self) -> bool:
        return self.engine is not None and self.engine.busy

    def _step(self) -> None:
        assert self.engine is not None
        began = self._clock.monotonic()
        try:
            ended = self.engine.step()
        except Exception as error:  # noqa: BLE001 - the thread outlives any step
            # Boundary: whatever a step raises (out of memory, a bug of a library) ends the calls
            # that were in it, and neither the thread nor the run.
            self.engine.fail(
                ModelUnavailable(
                    f"a step of the in-process model failed ({type(error).__name__}: {error}); the "
                    "calls that ran were given up and may be tried again"
                )
            )
            return
        if ended:
            self._wait_for_the_loop(_TURNS_SHARE * (self._clock.monotonic() - began))

    def _wait_for_the_loop(self, seconds: float) -> None:
        """Let the event loop answer and fill the places that came free, for ``seconds`` at most."""
        turned = threading.Event()

        def turn(left: int) -> None:
            if left:
                self._loop.call_soon(turn, left - 1)
            else:
                turned.set()

        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(turn, _TURNS)
            turned.wait(seconds)
