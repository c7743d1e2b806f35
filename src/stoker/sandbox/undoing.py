"""Work that goes on to its end however often whoever awaits it is cancelled: undoing, clearing.

A second cancellation that left it half done would leave processes, mounts or records behind.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any


async def seen_out(task: "asyncio.Future[Any]") -> None:
    """Wait for the end of ``task``, whatever that is. **Cancellation:** none is heeded."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])


async def to_its_end(removal: Coroutine[Any, Any, None]) -> None:
    """Await ``removal`` and raise what it raises. **Cancellation:** none is heeded."""
    task = asyncio.ensure_future(removal)
    await seen_out(task)
    task.result()
