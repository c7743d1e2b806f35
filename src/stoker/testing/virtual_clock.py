"""Virtual time: an asyncio loop whose clock jumps to the next timer when nothing is ready.

A run that would take an hour of sleeping takes milliseconds and comes out the same each time.
``run_virtual`` is ``asyncio.run`` on such a loop; ``VirtualClock`` is the matching ``Clock``.

Invariants: time never goes back and only moves when no callback is ready; a loop with nothing
ready and no timer is a deadlock and raises ``VirtualDeadlock`` naming every task that waits. What
is handed to a thread (``asyncio.to_thread``) is done at once, in no time and in turn. It does not
virtualise processes or sockets: whoever waits for those waits in vain.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

from stoker.errors import InternalError
from stoker.seams.clock import Instant

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

WALL_START = 1_800_000_000.0
"""Wall time at virtual second 0: fixed, so that recorded times repeat."""


class VirtualDeadlock(InternalError):
    """Nothing is ready and no timer is set: the program waits for what can never happen."""

    code = "virtual_deadlock"


class _JumpingSelector(selectors.DefaultSelector):
    """Polls what is real and, where the loop would sleep, moves its clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.passes: Callable[[float], None] = lambda _seconds: None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            waiting = _waiting_tasks()
            raise VirtualDeadlock(
                f"at virtual second {self.now:.3f} nothing is ready and no timer is set; "
                f"waiting: {'; '.join(waiting) or 'no task'}"
            )
        self.passes(timeout)
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._jumping.now

    def on_passing(self, passes: Callable[[float], None]) -> None:
        """Tell ``passes`` the seconds of each jump before it: nothing changes during one."""
        self._jumping.passes = passes

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> "asyncio.Future[_T]":
        """Call ``func`` here and now; its result, or what it raised, is in the future."""
        del executor
        done: asyncio.Future[_T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            done.set_exception(error)
        return done


class VirtualClock:
    """The ``Clock`` of the running virtual loop (of any loop: it reads the loop's time)."""

    def monotonic(self) -> float:
        """Return the loop's time, seconds."""
        return asyncio.get_running_loop().time()

    def now(self) -> Instant:
        """Return this moment; wall time starts at a fixed date."""
        at = self.monotonic()
        return Instant(boot=at, wall=WALL_START + at)


def run_virtual(main: Coroutine[Any, Any, _T]) -> _T:
    """Run ``main`` to its end in virtual time, starting at second 0, and return its result.

    Raises:
        VirtualDeadlock: nothing could ever happen again; the message names the waiting tasks.

    **Cancellation:** tasks that ``main`` leaves behind are cancelled, as by ``asyncio.run``.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def _waiting_tasks() -> list[str]:
    return [_where(task) for task in asyncio.all_tasks(asyncio.get_running_loop())]


def _where(task: "asyncio.Task[Any]") -> str:
    frames = task.get_stack(limit=1)
    if not frames:
        return task.get_name()
    frame = frames[-1]
    return f"{task.get_name()} at {frame.f_code.co_filename}:{frame.f_lineno}"
