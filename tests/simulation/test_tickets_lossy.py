"""A bad queue in virtual time: tickets dropped, doubled, delayed, and a ledger out of reach."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from stoker.broker.base import Ticket
from stoker.model.action import Effect
from stoker.model.completion import CompletionStatus
from stoker.model.ids import ActionId
from stoker.model.tools import RunRequest, RunResult
from stoker.testing.boxes import MemoryBackend, MemoryBox, output
from stoker.testing.virtual_clock import run_virtual
from stoker.tickets import Publisher
from stoker.worker.desk import TicketDesk
from support.worker_world import LEASE, World

ACTIONS = 24
SLOTS = 3
EFFECTS = (Effect.EXTERNAL, Effect.IDEMPOTENT, Effect.PURE)


class Play:
    """One seed: a queue, its consumers, and a line that is cut now and then."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.messages: asyncio.Queue[ActionId] = asyncio.Queue()
        self.effects: Counter[str] = Counter()
        self.later: set[asyncio.Task[None]] = set()

    async def tool(self, _box: MemoryBox, request: RunRequest) -> RunResult:
        await asyncio.sleep(self.dice.uniform(0.1, 2.0))
        self.effects[request.argv[-1]] += 1
        await asyncio.sleep(self.dice.uniform(0.1, 2.0))
        return output("done")

    async def publish(self, ticket: Ticket) -> None:
        if self.dice.random() < 0.1:
            raise ConnectionError("the queue is down")
        for _ in range(self.dice.choice((0, 1, 1, 2))):
            task = asyncio.create_task(self.deliver(ticket.action_id))
            self.later.add(task)
            task.add_done_callback(self.later.discard)

    async def deliver(self, action_id: ActionId) -> None:
        await asyncio.sleep(self.dice.uniform(0.0, 20.0))
        await self.messages.put(action_id)

    async def consume(self, desk: TicketDesk) -> None:
        while True:
            action_id = await self.messages.get()
            if not await desk.run(action_id) and self.dice.random() < 0.5:
                await self.messages.put(action_id)
                await asyncio.sleep(1)

    async def cut(self, world: World) -> None:
        while True:
            await asyncio.sleep(self.dice.uniform(5, 40))
            world.ledger.cut = True
            await asyncio.sleep(self.dice.uniform(0.1, 2 * LEASE))
            world.ledger.cut = False


@pytest.mark.parametrize("seed", range(20))
def test_a_lossy_queue_loses_nothing_and_doubles_no_effect(seed: int, tmp_path: Path) -> None:
    play = Play(seed)

    async def whole() -> None:
        backend = MemoryBackend(play.tool)
        async with World(tmp_path, {"fast": SLOTS}, backend, ("fast",)) as world:
            actions = [
                world.program(
                    "act", str(n), path=str(n), effect=EFFECTS[n % 3], deadline_seconds=3600.0,
                    attempts_max=50, deliveries_max=200,
                )
                for n in range(ACTIONS)
            ]  # fmt: skip
            await world.submit(*actions)
            desk = TicketDesk(world.worker, world.ledger, "fast", SLOTS)
            publisher = Publisher(world.ledger, republish_seconds=15.0, clock=world.clock)
            async with asyncio.TaskGroup() as tasks:
                going = [publisher.run(play.publish), play.cut(world)]
                going += [play.consume(desk) for _ in range(SLOTS + 2)]
                begun = [tasks.create_task(one) for one in going]
                for number, action in enumerate(actions):
                    done = await world.completion(action, within=7200)
                    ran = play.effects[str(number)]
                    if action.effect is Effect.EXTERNAL:
                        assert ran <= 1, f"{number} had its effect {ran} times"
                        known = (CompletionStatus.OK, CompletionStatus.AMBIGUOUS)
                        assert done.status in known
                    else:
                        assert done.status is CompletionStatus.OK, (number, done)
                    assert ran or done.status is not CompletionStatus.OK, f"{number} was lost"
                for task in begun:
                    task.cancel()

    run_virtual(whole())
