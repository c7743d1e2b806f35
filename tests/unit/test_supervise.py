"""What supervision does when its own looking fails, or it is cancelled more than once."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

import pytest

from stoker.errors import BoxFailed
from stoker.model.execution import Limits
from stoker.model.tools import LimitKind
from stoker.sandbox.maker_client import Started
from stoker.sandbox.making import Exited, WorkOrder
from stoker.sandbox.supervise import Work, supervise

_PATIENCE = 20.0
_KILLED, _WELL = 9, 0


class ScriptedMaker:
    """Starts nothing; its process ends when it is killed, or when the test says so."""

    def __init__(self) -> None:
        self.dead = False
        self.begun = asyncio.Event()
        self.killing = asyncio.Event()
        self.may_kill = asyncio.Event()
        self.may_kill.set()
        self.started: Started | None = None

    async def spawn(
        self, _order: WorkOrder, _standard: Sequence[int], _passed: Sequence[int] = ()
    ) -> Started:
        """Start it."""
        self.started = Started(1, asyncio.get_running_loop())
        self.started.pid.set_result(os.getpid())
        self.begun.set()
        return self.started

    async def kill(self, started: Started) -> None:
        """End it."""
        self.killing.set()
        await self.may_kill.wait()
        self.end(started, _KILLED)

    def end(self, started: Started, status: int) -> None:
        """Let it end so, unless it has."""
        if not started.exited.done():
            started.exited.set_result(Exited(1, status, 0.0, 0))


def _work(**options: object) -> Work:
    found = {"order": WorkOrder(argv=[b"it"]), "stdin": b"", "limits": Limits()}
    return Work(**{**found, "timeout_seconds": _PATIENCE, **options})  # type: ignore[arg-type]


def _within(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), _PATIENCE))


def _broken() -> LimitKind | None:
    raise ValueError("no such field")


def test_a_limit_that_cannot_be_looked_at_ends_the_action_as_our_failure() -> None:
    async def main() -> None:
        maker = ScriptedMaker()
        with pytest.raises(BoxFailed, match="ValueError: no such field"):
            await supervise(maker, _work(watchers=[_broken]))
        assert maker.killing.is_set()

    _within(main)


def test_one_that_fails_once_the_time_is_up_leaves_that_verdict() -> None:
    async def main() -> None:
        looks: list[int] = []

        def broken_later() -> LimitKind | None:
            looks.append(1)
            if len(looks) > 1:
                raise OSError("gone")
            return LimitKind.DISK

        ended = await supervise(ScriptedMaker(), _work(watchers=[broken_later]))
        assert ended.result.limit is LimitKind.DISK

    _within(main)


def test_a_verdict_that_cannot_be_read_is_our_failure_however_the_program_ended() -> None:
    async def main() -> None:
        maker = ScriptedMaker()
        running = asyncio.ensure_future(supervise(maker, _work(watchers=[_broken])))
        await maker.begun.wait()
        assert maker.started is not None
        maker.end(maker.started, _WELL)  # before the first look
        with pytest.raises(BoxFailed, match="could not be looked at"):
            await running
        assert not maker.killing.is_set()

    _within(main)


def test_processes_are_dead_however_often_whoever_waits_is_cancelled() -> None:
    async def main() -> None:
        maker = ScriptedMaker()
        maker.may_kill.clear()
        running = asyncio.ensure_future(supervise(maker, _work()))
        await maker.begun.wait()
        running.cancel()
        await maker.killing.wait()
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not running.done()
        maker.may_kill.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert maker.started is not None
        assert maker.started.exited.done()

    _within(main)
