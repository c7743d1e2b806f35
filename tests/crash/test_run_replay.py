"""Replay of real journals at every prefix, under another hash seed than they were recorded with.

The journals come from a run of processes; what a program host asks for when it is rebuilt from the
first turns and given the next result must be what was journalled next.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from stoker.errors import NonDeterministicRollout
from stoker.model.outcome import OutcomeKind
from stoker.rollout.hosts import HostProcess
from stoker.rollout.messages import (
    Deliver,
    Differed,
    Evict,
    FromHost,
    HostCall,
    Loaded,
    RecordedCall,
    RecordedTurn,
    StartRollout,
    Turn,
)
from support import runs_errands as errands
from support.runs import rig, tell
from support.runs_records import Records, Rollout, read

ROLLOUTS = 6
HASH_SEEDS = (1, 4_000_000_000)
SECONDS = 120.0
UNSTEADY = """
import random
import time

import stoker


@stoker.rollout(version="1", boxes=0)
async def unsteady(ctx, task):
    drawn = {
        "wall time": lambda: time.time_ns(),
        "random": random.random,
        "set order": lambda: list({f"name {number}" for number in range(50)}),
    }
    await ctx.call(["true", repr(drawn[task.task_id]())])
    await ctx.call(["true"])
    return 1.0
"""
CAUSES = ("wall time", "random", "set order")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Records]:
    folder = tmp_path_factory.mktemp("recorded")
    log = folder / "tools.log"
    tasks = errands.tasks(ROLLOUTS, log)
    with rig(folder, program=errands.PROGRAM, model=errands.MODEL, tasks=tasks, log=log) as one:
        one.start()
        one.finish()
        return one.program, read(one.run.path)


class Replayer:
    """One program host that rebuilds rollouts."""

    def __init__(self, host: HostProcess) -> None:
        self._host = host
        self._messages: AsyncIterator[FromHost] = host.messages()

    async def loaded(self) -> Loaded:
        message = await anext(self._messages)
        assert isinstance(message, Loaded), message
        return message

    async def say(self, message: StartRollout | Deliver) -> Turn:
        """Send one message and return the turn it causes; a difference fails the test."""
        self._host.send(message)
        async for heard in self._messages:
            assert not isinstance(heard, Differed), heard.fault.message
            if isinstance(heard, Turn):
                assert heard.rollout_id == message.rollout_id
                return heard
        raise AssertionError("the host ended")

    async def every_prefix(self, rollout: Rollout) -> int:
        """Rebuild from every prefix, go one turn further, compare; return how many."""
        turns = rollout.standing.turns
        start = msgspec.structs.replace(self.start_of(rollout), history=())
        first = await self.say(start)
        assert shape(first.calls) == shape(turns[0].calls), f"{rollout.place}, first turn"
        for length in range(1, len(turns)):
            prefix = msgspec.structs.replace(start, history=tuple(turns[:length]))
            stands = await self.say(prefix)
            assert not stands.calls, f"{rollout.place}: prefix {length} asked for calls again"
            assert stands.outcome is None, f"{rollout.place}: prefix {length} had ended already"
            await self._next(rollout, turns[length], length)
        self._host.send(Evict(rollout_id=rollout.rollout_id))
        return len(turns)

    async def _next(self, rollout: Rollout, recorded: RecordedTurn, length: int) -> None:
        result = recorded.result
        assert result is not None, "only the first turn has no result"
        turn = await self.say(
            Deliver(
                rollout_id=rollout.rollout_id,
                path=result.path,
                value=result.value,
                fault=result.fault,
                at=result.at,
            )
        )
        where = f"{rollout.place}, after prefix {length}"
        assert shape(turn.calls) == shape(recorded.calls), where
        assert turn.withdrawn == recorded.withdrawn, where
        last = length == len(rollout.standing.turns) - 1
        assert (turn.outcome is not None) is last, where
        if turn.outcome is not None:
            assert turn.outcome.reward == rollout.outcome.reward, where

    def start_of(self, rollout: Rollout) -> StartRollout:
        """Return the whole journal as a replay."""
        admitted = rollout.standing.admitted
        return StartRollout(
            rollout_id=rollout.rollout_id,
            task=admitted.task,
            epoch=admitted.epoch,
            index=admitted.index,
            group_id=admitted.group_id,
            at=admitted.at,
            history=tuple(rollout.standing.turns),
        )

    async def difference(self, rollout: Rollout) -> Differed:
        """Rebuild a rollout whose program does something else each time."""
        self._host.send(self.start_of(rollout))
        async for heard in self._messages:
            assert isinstance(heard, Differed), f"{rollout.place}: nobody noticed: {heard}"
            return heard
        raise AssertionError("the host ended")


def shape(calls: tuple[HostCall, ...] | tuple[RecordedCall, ...]) -> list[tuple[str, str, str]]:
    return [(call.path, call.verb, call.digest) for call in calls]


@pytest.mark.parametrize("hash_seed", HASH_SEEDS)
def test_c13_real_journals_replay_at_every_prefix(
    hash_seed: int, recorded: tuple[Path, Records], tmp_path: Path
) -> None:
    program, records = recorded

    async def replayed() -> int:
        starting = HostProcess.start(program, log=tmp_path / "host.log", hash_seed=hash_seed)
        async with asyncio.timeout(SECONDS), await starting as host:
            replayer = Replayer(host)
            assert (await replayer.loaded()).hash_seed == hash_seed
            counts = [await replayer.every_prefix(one) for one in records.rollouts.values()]
            return sum(counts)

    prefixes = asyncio.run(replayed())
    tell(f"{prefixes} prefixes of {len(records.rollouts)} journals under hash seed {hash_seed}")
    assert prefixes >= ROLLOUTS * errands.LINES


def test_recorded_journals_have_something_to_replay(recorded: tuple[Path, Records]) -> None:
    _, records = recorded
    assert set(records.outcomes) == {OutcomeKind.COMPLETED.value}
    for rollout in records.rollouts.values():
        assert any(len(turn.calls) > 1 for turn in rollout.standing.turns), "side by side"
        assert any(turn.withdrawn for turn in rollout.standing.turns), "an unfired timeout"


def test_c6_programs_that_use_time_random_or_set_order_differ_on_replay(tmp_path: Path) -> None:
    tasks = [{"task_id": cause, "data": {}} for cause in CAUSES]
    with rig(tmp_path, program=UNSTEADY, model=errands.MODEL, tasks=tasks) as one:
        one.start()
        one.finish()
        records = read(one.run.path)

    async def replayed() -> dict[str, Differed]:
        starting = HostProcess.start(one.program, log=tmp_path / "host.log", hash_seed=1)
        async with asyncio.timeout(SECONDS), await starting as host:
            replayer = Replayer(host)
            await replayer.loaded()
            return {
                cause: await replayer.difference(records.rollouts[cause, 0]) for cause in CAUSES
            }

    for cause, differed in asyncio.run(replayed()).items():
        assert differed.fault.code == NonDeterministicRollout.code, cause
        assert "program.py:" in differed.fault.message, differed.fault.message
