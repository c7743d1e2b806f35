"""Undoing goes on to its end."""

import asyncio

import pytest

from stoker.errors import BoxFailed
from stoker.sandbox.undoing import to_its_end


def test_an_undoing_ends_however_often_its_caller_is_cancelled() -> None:
    async def main() -> None:
        may, done = asyncio.Event(), []

        async def removal() -> None:
            await may.wait()
            done.append("removed")

        caller = asyncio.ensure_future(to_its_end(removal()))
        for _ in range(3):
            await asyncio.sleep(0)
            caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
        may.set()
        await caller
        assert done == ["removed"]

    asyncio.run(main())


def test_what_an_undoing_could_not_do_is_heard() -> None:
    async def removal() -> None:
        raise BoxFailed("it is stuck")

    with pytest.raises(BoxFailed, match="stuck"):
        asyncio.run(to_its_end(removal()))
