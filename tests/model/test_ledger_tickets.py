"""Tickets, on every engine: a queue of the team's own carries ids, the ledger keeps everything."""

import asyncio
from pathlib import Path

import pytest

from stoker.broker.base import (
    CompleteDisposition,
    HoldVerdict,
    Lease,
    LeaseRequest,
    LedgerLimits,
    TicketsReply,
    TicketsRequest,
)
from stoker.model.ids import ActionId, RolloutId, WorkerId
from support.ledger import ENGINES, WORKER, Harness, act, action, with_ledger

OTHER = WorkerId("wrk_2")
LIMITS = LedgerLimits(ticket_classes=("queued",))
BOUND = 30.0


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ids(reply: TicketsReply) -> list[ActionId]:
    return [ticket.action_id for ticket in reply.tickets]


async def by_ticket(h: Harness, *wanted: ActionId, worker: WorkerId = WORKER) -> list[Lease]:
    request = LeaseRequest(worker_id=worker, action_ids=wanted)
    return list((await h.ledger.lease(request)).leases)


def test_a_poll_for_slots_never_leases_what_goes_by_ticket(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, worker_class="queued"), action(2))
        poll = LeaseRequest(worker_id=WORKER, slots={"fast": 8, "queued": 8})
        leases = (await h.ledger.lease(poll)).leases
        assert [one.action.action_id for one in leases] == [act(2)]
        wrong = LeaseRequest(worker_id=WORKER, slots={"fast": 1}, action_ids=(act(1),))
        assert (await h.ledger.lease(wrong)).leases == (), "not of a class this worker serves"
        [lease] = await by_ticket(h, act(1))
        assert await h.start(lease) == [HoldVerdict.OK]
        assert await h.complete(lease) == [CompleteDisposition.OK]
        assert await h.complete(*leases) == [CompleteDisposition.OK]
        assert set(await h.completed()) == {act(1), act(2)}

    with_ledger(engine, tmp_path, scenario, LIMITS)


def test_tickets_are_the_heads_of_their_queues_in_order_of_priority(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        other = RolloutId("rol_2")
        await h.submit(
            action(1, worker_class="queued"),
            action(2, worker_class="queued", priority=1),
            action(3, worker_class="queued"),
            action(4),
            action(5, worker_class="queued", holder=WORKER),
        )
        await h.append(action(6, worker_class="queued", rollout_id=other), rollout=other)
        everything = await h.ledger.tickets(TicketsRequest())
        assert ids(everything) == [act(2), act(1), act(3), act(6)], "neither polled nor held ones"
        first = everything.tickets[0]
        assert (first.worker_class, first.priority, first.delivery) == ("queued", 1, 1)
        assert ids(await h.ledger.tickets(TicketsRequest(limit=2))) == [act(2), act(1)]
        await h.crash()
        assert await h.ledger.tickets(TicketsRequest()) == everything, "a crash changes no ticket"

    with_ledger(engine, tmp_path, scenario, LIMITS)


def test_a_ticket_goes_with_its_lease_and_comes_back_as_the_next_delivery(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, worker_class="queued"))
        await h.enroll(OTHER)
        [lease] = await by_ticket(h, act(1))
        assert ids(await h.ledger.tickets(TicketsRequest())) == []
        assert await by_ticket(h, act(1), worker=OTHER) == [], "a doubled ticket is worth nothing"
        await h.enroll(WorkerId("wrk_1x"), replaces=WORKER)
        reply = await h.ledger.tickets(TicketsRequest())
        assert [(one.action_id, one.delivery) for one in reply.tickets] == [(act(1), 2)]
        [second] = await by_ticket(h, act(1), worker=OTHER)
        assert await h.start(lease) == [HoldVerdict.LOST]
        await h.start(second, worker=OTHER)
        await h.complete(second, worker=OTHER)
        assert ids(await h.ledger.tickets(TicketsRequest())) == []
        assert await by_ticket(h, act(1), worker=OTHER) == [], "nor is one that comes too late"
        assert await by_ticket(h, ActionId("act_never"), worker=OTHER) == []

    with_ledger(engine, tmp_path, scenario, LIMITS)


def test_tickets_wait_until_they_differ_from_what_is_known(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        empty = await h.ledger.tickets(TicketsRequest(mark="unknown", wait_seconds=BOUND))
        assert empty.tickets == ()
        again = TicketsRequest(mark=empty.mark, wait_seconds=BOUND)
        waiting = asyncio.create_task(h.ledger.tickets(again))
        await asyncio.sleep(0)
        await h.submit(action(1))  # of another class: no reason to wake
        await h.submit(action(2, worker_class="queued"))
        told = await waiting
        assert ids(told) == [act(2)]
        same = await h.ledger.tickets(TicketsRequest(mark=told.mark, wait_seconds=0.05))
        assert same == TicketsReply(tickets=(), mark=told.mark), "unchanged: left out"
        waiting = asyncio.create_task(
            h.ledger.tickets(TicketsRequest(mark=told.mark, wait_seconds=BOUND))
        )
        await asyncio.sleep(0)
        [lease] = await by_ticket(h, act(2))
        gone = await waiting
        assert gone.tickets == ()
        assert gone.mark != told.mark
        waiting = asyncio.create_task(
            h.ledger.tickets(TicketsRequest(mark=gone.mark, wait_seconds=BOUND))
        )
        await asyncio.sleep(0)
        await h.release(lease)
        assert ids(await waiting) == [act(2)]

    with_ledger(engine, tmp_path, scenario, LIMITS)
