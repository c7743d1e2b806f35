import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stoker.errors import ConfigInvalid, LedgerUnavailable
from stoker.model.action import ActionState
from stoker.model.completion import CompletionStatus
from stoker.model.ids import ActionId
from stoker.testing.virtual_clock import run_virtual
from stoker.worker.desk import TicketDesk
from support.worker_world import LEASE, World

SLOTS = 2


def play(directory: Path, scenario: Callable[[World, TicketDesk], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with World(directory, {"fast": SLOTS}, ticket_classes=("fast", "other")) as world:
            await scenario(world, TicketDesk(world.worker, world.ledger, "fast", SLOTS))

    run_virtual(whole())


def test_a_ticket_runs_its_action_and_only_once(tmp_path: Path) -> None:
    async def scenario(world: World, desk: TicketDesk) -> None:
        action = world.program("sleep", "1")
        await world.submit(action)
        await asyncio.sleep(3 * LEASE)
        assert world.backend.made == [], "without a ticket nothing is leased"
        spent = await asyncio.gather(desk.run(action.action_id), desk.run(action.action_id))
        assert list(spent) == [True, True], "a doubled ticket has nothing to do"
        assert (await world.completion(action)).status is CompletionStatus.OK
        assert await desk.run(action.action_id), "nor has a late one"
        assert await desk.run(ActionId("act_unheard_of"))
        assert len(world.backend.made) == 1

    play(tmp_path, scenario)


def test_tickets_wait_for_a_slot_before_anything_is_leased(tmp_path: Path) -> None:
    async def scenario(world: World, desk: TicketDesk) -> None:
        actions = [world.program("sleep", "1", path=str(n)) for n in range(8)]
        await world.submit(*actions)
        running = [asyncio.create_task(desk.run(one.action_id)) for one in actions]
        await asyncio.sleep(0.5)
        states = [(await world.view(one)).state for one in actions]
        assert states.count(ActionState.STARTED) == SLOTS
        assert states.count(ActionState.ACCEPTED) == 8 - SLOTS
        assert await asyncio.gather(*running) == [True] * 8
        assert len(world.backend.made) == 8

    play(tmp_path, scenario)


def test_a_ticket_of_another_class_is_refused_and_its_action_waits_on(tmp_path: Path) -> None:
    async def scenario(world: World, desk: TicketDesk) -> None:
        action = world.program("echo", "x", worker_class="other")
        await world.submit(action)
        with pytest.raises(ConfigInvalid, match="worker class 'other'"):
            await desk.run(action.action_id)
        view = await world.view(action)
        assert (view.state, view.deliveries) == (ActionState.ACCEPTED, 0)

    play(tmp_path, scenario)


def test_a_worker_out_of_contact_gives_up_and_the_ticket_is_to_come_again(tmp_path: Path) -> None:
    async def scenario(world: World, desk: TicketDesk) -> None:
        action = world.program("sleep", "15")
        await world.submit(action)
        running = asyncio.create_task(desk.run(action.action_id))
        await asyncio.sleep(1)
        world.ledger.cut = True
        await asyncio.sleep(LEASE)
        assert world.boxes.alive == 0, "killed by its own clock before anybody else may begin"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(desk.run(action.action_id), 1)  # until the ledger is back
        world.ledger.cut = False
        assert await running is False
        while not await desk.run(action.action_id):  # the ledger has yet to end the lost lease
            await asyncio.sleep(1)
        done = await world.completion(action)
        assert (done.status, done.attempt) == (CompletionStatus.OK, 2)

    play(tmp_path, scenario)


def test_nobody_answering_is_told_as_such(tmp_path: Path) -> None:
    async def scenario(world: World, desk: TicketDesk) -> None:
        await asyncio.sleep(1)
        world.ledger.cut = True
        world.ledger.actions = refuse  # type: ignore[assignment]
        with pytest.raises(LedgerUnavailable):
            await desk.run(ActionId("act_1"))

    async def refuse(_: object) -> object:
        raise LedgerUnavailable("the line is cut")

    play(tmp_path, scenario)


def test_b18_a_suspect_of_a_poison_gets_its_turn_alone(tmp_path: Path) -> None:
    async def scenario(world: World, desk: TicketDesk) -> None:
        actions = [world.program("sleep", "4", path=str(n)) for n in range(6)]
        await world.submit(*actions)
        first = [asyncio.create_task(desk.run(one.action_id)) for one in actions[:SLOTS]]
        await asyncio.sleep(1)
        world.ledger.cut = True  # what runs together when its worker is lost becomes suspect
        await asyncio.sleep(LEASE + 1)
        world.ledger.cut = False
        await asyncio.gather(*first)
        left = [one.action_id for one in actions]
        while left:  # as a queue that delivers again what was not acknowledged
            spent = await asyncio.gather(*(desk.run(one) for one in left))
            left = [one for one, over in zip(left, spent, strict=True) if not over]
        for one in actions:
            assert (await world.completion(one)).status is CompletionStatus.OK
        assert world.ledger.alone == {one.action_id for one in actions[:SLOTS]}

    play(tmp_path, scenario)
