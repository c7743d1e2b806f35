import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from stoker.broker.base import LeaseRequest, Ticket
from stoker.model.ids import ActionId, WorkerId
from stoker.testing.virtual_clock import run_virtual
from stoker.tickets import Publisher
from support.worker_world import LEASE, World

AGAIN = 30.0


class Queue:
    """Takes tickets, or refuses."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.refuses: set[ActionId] = set()
        self.down = False
        self.hangs = False

    async def publish(self, ticket: Ticket) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.down or ticket.action_id in self.refuses:
            raise ConnectionError("the queue is down")
        self.tickets.append(ticket)

    @property
    def ids(self) -> list[ActionId]:
        return [ticket.action_id for ticket in self.tickets]


def play(directory: Path, scenario: Callable[[World, Queue], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with World(directory, ticket_classes=("fast",)) as world:
            await scenario(world, Queue())

    run_virtual(whole())


async def publishing(world: World, queue: Queue, window: int = 256) -> "asyncio.Task[None]":
    publisher = Publisher(world.ledger, republish_seconds=AGAIN, window=window, clock=world.clock)
    task = asyncio.create_task(publisher.run(queue.publish))
    await asyncio.sleep(1)
    return task


def test_every_queued_action_is_published_once_while_it_waits(tmp_path: Path) -> None:
    async def scenario(world: World, queue: Queue) -> None:
        actions = [world.program("echo", str(n), deadline_seconds=600.0) for n in range(5)]
        await world.submit(*actions[:3])
        task = await publishing(world, queue)
        await world.submit(*actions[3:])
        await asyncio.sleep(AGAIN / 2)
        assert queue.ids == [one.action_id for one in actions]
        assert not task.done()
        task.cancel()

    play(tmp_path, scenario)


def test_what_nobody_came_with_is_published_again_and_what_is_leased_is_not(
    tmp_path: Path,
) -> None:
    async def scenario(world: World, queue: Queue) -> None:
        kept, dropped = (world.program("echo", n, deadline_seconds=600.0) for n in "ab")
        await world.submit(kept, dropped)
        task = await publishing(world, queue)
        lease = LeaseRequest(worker_id=WorkerId("wrk_x"), action_ids=(kept.action_id,))
        assert len((await world.ledger.lease(lease)).leases) == 1
        await asyncio.sleep(AGAIN)
        assert queue.ids.count(dropped.action_id) == 2
        lost = [one for one in queue.tickets if one.action_id == kept.action_id]
        assert [one.delivery for one in lost] == [1, 2], "its worker was lost: at once, once"
        assert LEASE < AGAIN
        task.cancel()

    play(tmp_path, scenario)


def test_a_publisher_that_dies_is_replaced_by_one_that_knows_nothing(tmp_path: Path) -> None:
    async def scenario(world: World, queue: Queue) -> None:
        action = world.program("echo", "a")
        await world.submit(action)
        (await publishing(world, queue)).cancel()
        (await publishing(world, queue)).cancel()
        assert queue.ids == [action.action_id] * 2, "at least once"

    play(tmp_path, scenario)


def test_a_queue_that_is_down_gets_everything_when_it_is_back(tmp_path: Path) -> None:
    async def scenario(world: World, queue: Queue) -> None:
        actions = [world.program("echo", str(n), deadline_seconds=600.0) for n in range(3)]
        await world.submit(*actions)
        queue.down = True
        task = await publishing(world, queue)
        await asyncio.sleep(20)
        queue.down, queue.hangs = False, True
        await asyncio.sleep(20)
        queue.hangs = False
        queue.refuses = {actions[0].action_id}
        await asyncio.sleep(20)
        assert set(queue.ids) == {one.action_id for one in actions[1:]}, "one holds up no other"
        world.ledger.cut = True
        queue.refuses = set()
        await asyncio.sleep(5)
        world.ledger.cut = False
        await asyncio.sleep(5)
        assert set(queue.ids) == {one.action_id for one in actions}
        assert not task.done()
        task.cancel()

    play(tmp_path, scenario)


def test_a_slow_queue_is_not_flooded_with_what_it_has_already(tmp_path: Path) -> None:
    async def scenario(world: World, queue: Queue) -> None:
        actions = [
            world.program("echo", str(n), path=str(n), deadline_seconds=6000.0) for n in range(50)
        ]
        await world.submit(*actions)
        task = await publishing(world, queue, window=4)
        await asyncio.sleep(10 * AGAIN)
        assert set(queue.ids) == {one.action_id for one in actions[:4]}
        assert len(queue.ids) <= 4 * 11
        for one in actions[:2]:
            lease = LeaseRequest(worker_id=WorkerId("wrk_x"), action_ids=(one.action_id,))
            await world.ledger.lease(lease)
        await asyncio.sleep(1)
        assert set(queue.ids) == {one.action_id for one in actions[:6]}, "the head moves on"
        task.cancel()

    play(tmp_path, scenario)
