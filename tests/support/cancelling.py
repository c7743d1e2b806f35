"""Cancelling a task at each of its await points, counted, in both ways a loop can do it."""

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Literal

Way = Literal["waiting", "woken"]
"""``waiting``: while what it waits for is not there. ``woken``: when it is there already and the
task has not run yet; the result is then lost, and whoever made it must be given it back."""


@types.coroutine
def _counted(
    coroutine: Coroutine[Any, Any, Any], reached: Callable[[int, Any], None]
) -> Generator[Any, Any, Any]:
    """Run ``coroutine``; tell ``reached`` of each of its suspensions and what it waits for."""
    count = 0
    send: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731 - replaced below
    while True:
        try:
            waited = send()
        except StopIteration as done:
            return done.value
        reached(count, waited)
        count += 1
        try:
            yield waited
        except BaseException as error:
            thrown = error
            send = lambda: coroutine.throw(thrown)  # noqa: E731, B023
        else:
            send = lambda: coroutine.send(None)  # noqa: E731


async def cancelled_at(
    make: Callable[[], Coroutine[Any, Any, Any]], point: int, way: Way
) -> tuple[bool, Any]:
    """Run ``make()`` and cancel it at its await ``point``.

    Return whether it was cancelled, and its result where it was not: it has fewer points, or what
    it had begun could not be taken back.
    """
    loop = asyncio.get_running_loop()

    def reached(count: int, waited: Any) -> None:
        if count != point:
            return
        if way == "waiting" or waited is None:
            loop.call_soon(task.cancel)
        else:  # told before the task is, since it was asked before
            waited.add_done_callback(lambda _: task.cancel())

    async def run() -> Any:
        return await _counted(make(), reached)

    task = asyncio.create_task(run())
    await asyncio.wait({task})
    return task.cancelled(), None if task.cancelled() else task.result()
