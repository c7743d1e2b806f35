"""The guard: while a program steps, asyncio finds a loop and a task whose every use is refused.

A foreign awaitable is not replayed, so it must not run. The guard loop names the function that the
program called, what to use instead, and taints the rollout even when the program catches the error.
Async generators left half-way are closed here, never as a step of the rollout: when Python
collects them is not deterministic.

The running loop of the process itself is put back after each turn: a host on asyncio lives on.
"""

import asyncio
import inspect
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from types import FrameType
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol

from stoker.errors import ForeignAwaitable, StokerError, VerbMisused
from stoker.rollout.position import WRAPPERS, Place, caller, library, library_called, standing

_set_loop: Callable[[Any], None] = asyncio._set_running_loop  # noqa: SLF001 - the loop's own seam
_get_loop: Callable[[], Any] = asyncio._get_running_loop  # noqa: SLF001 - the loop's own seam

_INSTEAD_OF_LOCKS = "plain variables (siblings take turns, only at an await) and ctx.gather(…)"
_INSTEAD_OF_HTTP = "a @stoker.tool with ctx.call(…), or ctx.local(function, …) with a plain client"
_HTTP = frozenset({"httpx", "httpcore", "aiohttp"})
_INSTEAD = {
    "gather": "ctx.gather(…)",
    "TaskGroup": "ctx.gather(…)",
    "create_task": "ctx.gather(…) or ctx.first(…)",
    "ensure_future": "ctx.gather(…) or ctx.first(…)",
    "wait": "ctx.gather(…) or ctx.first(…)",
    "as_completed": "ctx.gather(…) or ctx.first(…)",
    "wait_for": "async with ctx.timeout(…)",
    "timeout": "async with ctx.timeout(…)",
    "timeout_at": "async with ctx.timeout(…)",
    "sleep": "ctx.sleep(…)",
    "time": "ctx.now()",
    "to_thread": "ctx.local(function, …)",
    "run_in_executor": "ctx.local(function, …)",
    "run_sync": "ctx.local(function, …)",
    "fail_after": "async with ctx.timeout(…)",
    "move_on_after": "async with ctx.timeout(…)",
    "CancelScope": "async with ctx.timeout(…)",
    "open_connection": "ctx.call(…) for a tool, or ctx.local(function, …)",
    "Lock": _INSTEAD_OF_LOCKS,
    "Event": _INSTEAD_OF_LOCKS,
    "Condition": _INSTEAD_OF_LOCKS,
    "Semaphore": _INSTEAD_OF_LOCKS,
    "Queue": _INSTEAD_OF_LOCKS,
    "create_subprocess_exec": "box.run(…) or ctx.call([…])",
    "create_subprocess_shell": "box.run(…) or ctx.call([…])",
}
_INSTEAD_OTHERWISE = "the verbs of ctx, or ctx.local(function, …) for code of others"


class Stepping(Protocol):
    """What the guard needs of the rollout that is running."""

    evicting: bool

    def taint(self, error: StokerError) -> None:
        """Bar a reward."""
        ...


class Before(NamedTuple):
    """What was in force before a turn."""

    loop: object
    hooks: Any
    stepping: Stepping | None


class _State:
    """One per process: programs step on one thread at a time."""

    stepping: Stepping | None = None
    sweeping: str | None = None
    """Name of the async generator being closed."""
    thread: int = 0
    collected: ClassVar[deque[AsyncGenerator[Any, Any]]] = deque()
    """Generators collected on a foreign thread; closed at the next turn."""


def enter(stepping: Stepping) -> Before:
    """Put the guard in force on this thread."""
    before = Before(_get_loop(), sys.get_asyncgen_hooks(), _State.stepping)
    _set_loop(_loop)
    sys.set_asyncgen_hooks(firstiter=None, finalizer=_abandoned)
    _State.stepping = stepping
    _State.thread = threading.get_ident()
    while _State.collected:
        _abandoned(_State.collected.popleft())
    return before


def leave(before: Before) -> None:
    """Put back what was in force."""
    _set_loop(before.loop)
    sys.set_asyncgen_hooks(*before.hooks)
    _State.stepping = before.stepping


def sweeping() -> str | None:
    """Return the name of the abandoned generator whose cleanup is running, if one is."""
    return _State.sweeping


def refuse(what: str, instead: str, place: object) -> ForeignAwaitable:
    """Return the error for ``what``, and taint the rollout that is running."""
    error = ForeignAwaitable(
        f"the program used {what} at {place}; only verbs of its context can be replayed, "
        f"so nothing was started; use {instead}"
    )
    if _State.stepping is not None:
        _State.stepping.taint(error)
    return error


def describe_yielded(yielded: object, coroutine: object) -> ForeignAwaitable:
    """Return the error for something ``coroutine`` awaited that is no verb of this rollout."""
    place = standing(coroutine)
    called = library_called(coroutine)
    if called is not None:
        package, name = called
        return refuse(f"{package}.{name}", _instead(package, name), place)
    if yielded is None:
        return refuse("a bare yield", "ctx.sleep(…)", place)
    kind = f"{type(yielded).__module__}.{type(yielded).__qualname__}"
    if kind.startswith("stoker."):
        return refuse("a verb of another rollout's context", "the ctx it was given", place)
    return refuse(f"await on {kind}", _INSTEAD_OTHERWISE, place)


def _refuse_method(method: str, arguments: tuple[object, ...]) -> ForeignAwaitable:
    for argument in arguments:
        if inspect.iscoroutine(argument):
            argument.close()  # else Python reports it as never awaited
    place = caller()
    called, module = _called_by_program(method)
    return refuse(f"{module}.{called} ({method})", _instead(module, called, method), place)


def _instead(package: str, *names: str) -> str:
    if package in _HTTP:
        return _INSTEAD_OF_HTTP
    return next((_INSTEAD[name] for name in names if name in _INSTEAD), _INSTEAD_OTHERWISE)


def _called_by_program(method: str) -> tuple[str, str]:
    """Return name and top module of the outermost library function between program and guard.

    Only asyncio's own frames are followed by name; for another library the top module says enough.
    """
    frame: FrameType | None = sys._getframe(3)  # noqa: SLF001 - the documented way to the stack
    called, module = method, "asyncio loop"
    while frame is not None:
        top = library(frame)
        if top is None:
            break
        if top in WRAPPERS:
            frame = frame.f_back
            continue
        owner = frame.f_locals.get("self")
        inner = frame.f_code.co_name
        named = type(owner).__name__ if owner is not None else inner
        called, module = named, top
        frame = frame.f_back
    return called, module


def _refusing(name: str) -> Callable[..., Any]:
    def method(_self: object, *arguments: object, **_options: object) -> Any:  # noqa: ANN401 - any, by purpose
        raise _refuse_method(f"loop.{name}", arguments)

    return method


def _refusing_task(name: str) -> Callable[..., Any]:
    def method(_self: object, *arguments: object, **_options: object) -> Any:  # noqa: ANN401 - any, by purpose
        raise _refuse_method(f"task.{name}", arguments)

    return method


_LOOP_METHODS = [name for name in vars(asyncio.AbstractEventLoop) if not name.startswith("_")]
_GuardLoop = type(
    "GuardLoop", (asyncio.AbstractEventLoop,), {name: _refusing(name) for name in _LOOP_METHODS}
)
_TASK_METHODS = ["cancel", "add_done_callback", "remove_done_callback", "result", "exception"]


class _GuardTask:
    """The current task libraries look for: harmless questions are answered, the rest refused."""

    def cancelling(self) -> int:
        """Return 0: nobody asked asyncio to cancel."""
        return 0

    def uncancel(self) -> int:
        """Return 0."""
        return 0

    def get_name(self) -> str:
        """Return a name for messages of libraries."""
        return "rollout"

    def get_coro(self) -> None:
        """Return ``None``."""

    def done(self) -> bool:
        """Return ``False``."""
        return False

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        # Libraries reach for private parts of a task; an AttributeError could be caught unseen.
        raise _refuse_method(f"task.{name}", ())


for _name in _TASK_METHODS:
    setattr(_GuardTask, _name, _refusing_task(_name))

_loop: Any = _GuardLoop()
_task: Any = _GuardTask()
# Without a current task, TaskGroup and anyio fail with messages about themselves (facts).
asyncio._enter_task(_loop, _task)  # noqa: SLF001 - the loop's own seam


def _abandoned(generator: AsyncGenerator[Any, Any]) -> None:
    """Close a generator that was left half-way; verbs it calls in doing so are refused."""
    if threading.get_ident() != _State.thread:
        _State.collected.append(generator)
        return
    code = generator.ag_code  # type: ignore[attr-defined]  # typeshed knows no ag_code here
    name = str(Place(code, code.co_firstlineno))
    before, _State.sweeping = _State.sweeping, name
    closing = generator.aclose()
    try:
        closing.__await__().send(None)
    except BaseException:  # noqa: BLE001, S110 - whatever cleanup raises must not hit the program
        pass
    else:
        report_generator(_State.stepping, name)
    finally:
        _State.sweeping = before


def report_generator(stepping: Stepping | None, name: str) -> None:
    """Taint the rollout that left async generator ``name`` with something to await."""
    if stepping is not None and not stepping.evicting:
        stepping.taint(
            VerbMisused(
                f"the async generator at {name} was left half-way and awaits in its cleanup; "
                "the rest of the cleanup was skipped; wrap it in "
                "`async with contextlib.aclosing(…)`"
            )
        )
