"""C11 and C12: foreign awaitables are named, say what to use, and bar a reward even if caught."""

import asyncio
import contextlib
import socket
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import stoker
from stoker.errors import ForeignAwaitable
from stoker.rollout.program import Rollout
from stoker.testing.driver import Drive, drive

# Coroutines that a refused asyncio function never ran are reported by Python when collected.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Foreign = Callable[[stoker.Context], Awaitable[Any]]


async def _work(ctx: stoker.Context) -> float:
    await ctx.sleep(1)
    return 1.0


async def _create_task(ctx: stoker.Context) -> None:
    await asyncio.create_task(_work(ctx))


async def _wait_for(ctx: stoker.Context) -> None:
    await asyncio.wait_for(_work(ctx), 1)


async def _gather(ctx: stoker.Context) -> None:
    await asyncio.gather(_work(ctx), _work(ctx))


async def _gather_of_verbs(ctx: stoker.Context) -> None:
    await asyncio.gather(ctx.sleep(1), ctx.sleep(2))


async def _task_group(ctx: stoker.Context) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_work(ctx))


async def _timeout(ctx: stoker.Context) -> None:
    async with asyncio.timeout(1):
        await ctx.sleep(1)


async def _sleep(_ctx: stoker.Context) -> None:
    await asyncio.sleep(1)


async def _sleep_zero(_ctx: stoker.Context) -> None:
    await asyncio.sleep(0)


async def _to_thread(_ctx: stoker.Context) -> None:
    await asyncio.to_thread(len, "x")


async def _connection(_ctx: stoker.Context) -> None:
    await asyncio.open_connection("127.0.0.1", 9)


async def _subprocess(_ctx: stoker.Context) -> None:
    await asyncio.create_subprocess_exec("true")


async def _future(_ctx: stoker.Context) -> None:
    await asyncio.get_running_loop().create_future()


async def _queue(_ctx: stoker.Context) -> None:
    await asyncio.Queue[int]().get()


async def _raw_socket(_ctx: stoker.Context) -> None:
    with socket.socket() as sock:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", 9))


async def _http_in_thread(_ctx: stoker.Context) -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, urllib.request.urlopen, "http://127.0.0.1:9/")


async def _own_awaitable(_ctx: stoker.Context) -> None:
    class Odd:
        def __await__(self) -> Any:
            yield "odd"

    await Odd()


_IN_A_GROUP = """
async with library.create_task_group() as group:
    group.start_soon(library.sleep, 1)
"""
_WITH_A_LIMIT = """
with library.fail_after(1):
    await ctx.sleep(1)
"""
_WITH_A_CLIENT = """
async with library.AsyncClient() as client:
    await client.get("http://127.0.0.1:9/")
"""


def _named(value: object) -> str:
    return str(getattr(value, "__name__", value))


CASES: list[tuple[Foreign, str, str]] = [
    (_create_task, "asyncio.create_task", "ctx.gather"),
    (_wait_for, "asyncio.wait_for", "ctx.timeout"),
    (_gather, "asyncio.gather", "ctx.gather"),
    (_gather_of_verbs, "asyncio.gather", "ctx.gather"),
    (_task_group, "asyncio.TaskGroup", "ctx.gather"),
    (_timeout, "asyncio.timeout", "ctx.timeout"),
    (_sleep, "asyncio.sleep", "ctx.sleep"),
    (_sleep_zero, "asyncio.sleep", "ctx.sleep"),
    (_to_thread, "asyncio.to_thread", "ctx.local"),
    (_connection, "asyncio.open_connection", "ctx.call"),
    (_subprocess, "asyncio.create_subprocess_exec", "box.run"),
    (_future, "loop.create_future", "ctx.local"),
    (_queue, "asyncio.Queue", "ctx.gather"),
    (_raw_socket, "loop.sock_connect", "ctx.local"),
    (_http_in_thread, "loop.run_in_executor", "ctx.local"),
    (_own_awaitable, "builtins.str", "ctx.local"),
]


def program_around(foreign: Foreign, *, catch: bool) -> Rollout:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        if not catch:
            await foreign(ctx)
            return 1.0
        with contextlib.suppress(Exception):
            await foreign(ctx)
        return 0.0

    return program


@pytest.mark.parametrize(("foreign", "names", "instead"), CASES, ids=_named)
def test_c12_a_foreign_awaitable_is_named_and_says_what_to_use(
    foreign: Foreign, names: str, instead: str
) -> None:
    result = drive(program_around(foreign, catch=False))
    assert result.outcome is not None
    assert result.outcome.fault is not None
    assert result.outcome.fault.code == "foreign_awaitable"
    message = result.outcome.fault.message
    assert names in message
    assert instead in message
    assert "test_rollout_guard.py:" in message
    assert result.calls == (), "nothing was started"


@pytest.mark.parametrize("foreign", [case[0] for case in CASES], ids=_named)
def test_c11_a_caught_foreign_awaitable_still_bars_a_reward(foreign: Foreign) -> None:
    result = drive(program_around(foreign, catch=True))
    assert [fault.code for fault in result.tainted] == ["foreign_awaitable"]
    assert result.outcome is not None
    assert result.outcome.reward is None
    assert result.outcome.fault is not None
    assert result.outcome.fault.code == "foreign_awaitable"


def test_a_program_may_vouch_for_its_result_after_a_foreign_awaitable() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        try:
            await asyncio.sleep(1)
        except ForeignAwaitable as fault:
            ctx.recovered(fault)
        return 1.0

    outcome = drive(program).outcome
    assert outcome is not None
    assert outcome.reward == 1.0


def test_c12_asyncio_run_inside_a_program_says_what_to_do() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        coroutine = _work(ctx)
        try:
            asyncio.run(coroutine)
        finally:
            coroutine.close()
        return 1.0

    outcome = drive(program).outcome
    assert outcome is not None
    assert outcome.fault is not None
    assert outcome.fault.code == "foreign_awaitable"
    assert "ctx.local" in outcome.fault.message


def test_a_verb_of_another_rollout_is_refused() -> None:
    other: list[Any] = []

    @stoker.rollout
    async def lends(ctx: stoker.Context, task: stoker.Task) -> float:
        other.append(ctx.sleep(1))
        await other[0]
        return 1.0

    class Unawaited:
        def __await__(self) -> Any:
            return (yield other[0])

    @stoker.rollout
    async def borrows(ctx: stoker.Context, task: stoker.Task) -> float:
        await Unawaited()
        return 1.0

    drive(lends)
    outcome = drive(borrows).outcome
    assert outcome is not None
    assert outcome.fault is not None
    assert "another rollout's context" in outcome.fault.message


def test_the_loop_of_the_process_itself_is_put_back() -> None:
    async def host() -> Drive:
        loop = asyncio.get_running_loop()
        result = drive(program_around(_sleep, catch=False))
        assert asyncio.get_running_loop() is loop
        task = asyncio.create_task(asyncio.sleep(0))
        await task
        return result

    assert asyncio.run(host()).outcome is not None


@pytest.mark.parametrize(
    ("library", "code", "names", "instead"),
    [
        ("anyio", "await library.sleep(1)", "anyio.sleep", "ctx.sleep"),
        ("anyio", "await library.to_thread.run_sync(len, 'x')", "anyio.run_sync", "ctx.local"),
        ("anyio", _IN_A_GROUP, "anyio.TaskGroup", "ctx.gather"),
        ("anyio", _WITH_A_LIMIT, "anyio.fail_after", "ctx.timeout"),
        ("httpx", _WITH_A_CLIENT, "httpx.", "ctx.local"),
    ],
)
@pytest.mark.parametrize("catch", [False, True])
def test_c12_async_libraries_are_named_and_taint(
    *, library: str, code: str, names: str, instead: str, catch: bool
) -> None:
    module = pytest.importorskip(library, reason=f"{library} is not installed: pip install it")
    scope: dict[str, Any] = {"library": module}
    body = "".join(f"    {line}\n" for line in code.splitlines())
    exec(compile(f"async def foreign(ctx):\n{body}", __file__, "exec"), scope)
    result = drive(program_around(scope["foreign"], catch=catch))
    assert result.outcome is not None
    assert result.outcome.reward is None
    assert result.outcome.fault is not None
    assert result.outcome.fault.code == "foreign_awaitable"
    assert names in result.outcome.fault.message
    assert instead in result.outcome.fault.message
