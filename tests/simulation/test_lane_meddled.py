"""The lane where everybody meddles: sub-agents, cancels, shared servers, updates, short memory."""

import asyncio
import random

import msgspec
import pytest

from stoker.coordinator.lane import Lane
from stoker.model.generation import Message, Role
from stoker.model.ids import RolloutId
from stoker.testing.virtual_clock import run_virtual
from support.inference import lane_over, request, sim

ROLLOUTS = 25
FAULTS = {"too_many": 0.05, "broken": 0.05, "closed": 0.05, "hang": 0.03, "late": 0.03}


class _Scene:
    """Rollouts with one to three histories each, on one lane."""

    def __init__(self, seed: int, faults: dict[str, float]) -> None:
        self.chance = random.Random(seed)
        self.model = sim(
            "y" * self.chance.randint(1, 60), c=0.1, p=0.01, window=self.chance.randint(1, 8),
            replicas=self.chance.randint(1, 3), kv_tokens=self.chance.choice((200, 400, 1000)),
            seed=seed, faults=faults,
        )  # fmt: skip
        self.lane: Lane = lane_over(self.model, retries=60, call_timeout=300)

    async def rollout(self, number: int) -> None:
        rollout = RolloutId(f"rol_{number}")
        await asyncio.sleep(self.chance.uniform(0, 30))
        while not self.lane.may_start():
            await asyncio.sleep(0.5)
        self.lane.none_held()
        self.lane.started(rollout)
        try:
            async with asyncio.TaskGroup() as agents:
                for agent in range(self.chance.choice((1, 1, 2, 3))):
                    agents.create_task(self.agent(rollout, str(agent)))
        finally:
            self.lane.ended(rollout)

    async def agent(self, rollout: RolloutId, history: str) -> None:
        known, messages = b"", [Message(role=Role.USER, content=f"q{history}")]
        for step in range(self.chance.randint(1, 5)):
            ids = known if self.chance.random() < 0.5 else b""
            asked = request(rollout, step=step, messages=tuple(messages), prompt_ids=ids)
            name = f"{rollout}/{history}.{step}"
            asked = msgspec.structs.replace(asked, history=history, request_id=name)
            said = await self.lane.generate(asked, (asyncio.get_running_loop().time(),))
            known = said.prompt_ids + said.token_ids
            seen = "z" * self.chance.randint(0, 10)
            messages.append(Message(role=Role.ASSISTANT, content=said.text))
            messages.append(Message(role=Role.TOOL, content=seen))
            await asyncio.sleep(self.chance.expovariate(0.2))

    async def cancels(self, rollouts: list[asyncio.Task[None]]) -> None:
        for task in rollouts:
            await asyncio.sleep(self.chance.uniform(0, 10))
            if self.chance.random() < 0.3:
                task.cancel()

    async def meddles(self) -> None:
        """Share servers out, bound parallelism, hold, drain and take calls back, for ever."""
        lane = self.lane
        try:
            while True:
                await asyncio.sleep(self.chance.expovariate(0.1))
                what = self.chance.choice(("share", "limit", "pause", "drain", "take back"))
                if what == "share":
                    part = self.chance.choice((1.0, 0.5, 0.1)), self.chance.choice((1.0, 0.5, 0.3))
                    lane.share({one.replica: part for one in lane.info.replicas})
                elif what == "limit":
                    lane.parallelism.limit(self.chance.choice((None, 1, 2)))
                else:
                    await self.hold(what)
        finally:
            lane.share({one.replica: (1.0, 1.0) for one in lane.info.replicas})

    async def hold(self, what: str) -> None:
        self.lane.pause("test")
        try:
            if what == "take back":
                await self.lane.take_back()
            if what != "pause":
                await self.lane.until_idle()
            await asyncio.sleep(self.chance.uniform(0, 5))
        finally:
            self.lane.resume("test")

    async def looks(self) -> None:
        """Nothing waits that could run, at any moment."""
        while True:
            if not self.lane._held_by:
                self.require_conserving()
            await asyncio.sleep(self.chance.choice((0.0, 0.01, 0.3, 1.0)))

    def require_conserving(self) -> None:
        matching, working = self.lane._ready, self.lane.working
        with_room = [index for index, one in self.lane._replicas.items() if one.room > 0]
        fitting, parked = matching._fitting.first(), matching._parked.first()
        for index in with_room:
            memory = working.memory(index)
            assert memory is not None
            assert not len(matching._open), "an open call beside room"
            assert not len(matching._at_home[index]), "a cached call beside room at home"
            assert fitting is None or not working.fits(fitting.history, index)
            assert parked is None or parked.tokens > memory.free, "a parked call beside memory"
            assert parked is None or memory.hot, "a parked call beside an empty cache"

    def require_nothing_left(self) -> None:
        lane, working = self.lane, self.lane.working
        assert (lane.ready_depth(), lane.parked(), lane.running, working._new) == (0, 0, 0, 0)
        assert (working._contexts, working._rollouts) == ({}, {})
        assert (lane.parallelism._taken, lane.parallelism._waiting) == ({}, {})
        assert lane.figures().idle_while_ready_share == 0
        for index, replica in lane._replicas.items():
            memory = working.memory(index)
            assert memory is not None
            assert (replica.held, memory.hot_tokens, memory.residency._held) == (0, 0, 0)
            assert not [*memory.hot, *memory.waiting, *memory.residency._before]
            assert self.model._replicas[index].load().running == 0


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["well", "faulty"])
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_whoever_meddles_nothing_waits_that_could_run_and_nothing_is_left(
    seed: int, faults: dict[str, float]
) -> None:
    async def main() -> None:
        scene = _Scene(seed, faults)
        rollouts = [asyncio.create_task(scene.rollout(number)) for number in range(ROLLOUTS)]
        besides = [asyncio.create_task(scene.meddles()), asyncio.create_task(scene.looks())]
        ended, _ = await asyncio.gather(
            asyncio.gather(*rollouts, return_exceptions=True), scene.cancels(rollouts)
        )
        for task in besides:
            task.cancel()
        stopped = await asyncio.gather(*besides, return_exceptions=True)
        for one in (*ended, *stopped):
            assert one is None or isinstance(one, asyncio.CancelledError), f"seed {seed}: {one!r}"
        scene.require_nothing_left()

    run_virtual(main())
