"""Requests that share a group see what the earlier ones did, whatever is kept in memory."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stoker.broker import lineup
from stoker.broker.base import (
    ActionsRequest,
    Append,
    AppendBatch,
    AppendBatchReply,
    Attach,
    Durability,
    Enroll,
    EventsRequest,
    LeaseRequest,
    LedgerEventKind,
    LedgerLimits,
    ReleaseRequest,
    Request,
)
from stoker.broker.client import owner_pid
from stoker.broker.operating import DeadLetterVerb, SettleDead
from stoker.broker.service import LedgerService
from stoker.broker.store import Head
from stoker.broker.store_memory import MemoryStore
from stoker.model.action import Action
from stoker.model.ids import Fence, RolloutId, RunId, WorkerId
from support.ledger import (
    BOUND_SECONDS,
    ROLLOUT,
    RUN,
    WORKER,
    Harness,
    ManualClock,
    act,
    action,
    held,
)
from support.ledger_books import check_books

OTHER = WorkerId("wrk_2")


class Groups:
    """An open ledger that is asked group by group."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.limits = LedgerLimits()
        self.store = MemoryStore()
        self.service = LedgerService(self.store, self.limits, Durability.POWER_SAFE)
        self.service.open(self.clock.now(), boot_id="boot", lineage="lin")
        self.seq = 0
        self.fence = Fence(0)
        self.fence = self.ask(Attach(run_id=RUN, incarnation="c"))[0].fence

    def ask(self, *requests: Request) -> list[Any]:
        """Carry out one group, its polls last."""
        now = self.clock.now()
        polls = [one for one in requests if isinstance(one, LeaseRequest | EventsRequest)]
        self.service.begin(requests, now)
        replies = [self.service.handle(one, now) for one in requests if one not in polls]
        self.service.settle(now)
        self.service.expect(polls)
        replies += [self.service.handle(one, now) for one in polls]
        self.service.commit()
        check_books(self.service)
        return replies

    def submitting(self, *submits: Action) -> AppendBatch:
        one = Append(rollout_id=ROLLOUT, expected_seq=self.seq, events=(b"e",), submits=submits)
        self.seq += 1
        return AppendBatch(run_id=RUN, fence=self.fence, appends=(one,))


def enroll(worker: WorkerId, replaces: WorkerId | None = None) -> Enroll:
    return Enroll(worker_id=worker, name=str(worker), slots={"fast": 4}, replaces=replaces)


def poll(worker: WorkerId, slots: int = 2) -> LeaseRequest:
    return LeaseRequest(worker_id=worker, slots={"fast": slots})


@pytest.mark.parametrize("kept", [0, 4096])
def test_polls_of_one_group_share_what_is_queued_and_what_just_came(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineup, "KEPT_MAX", kept)
    groups = Groups()
    groups.ask(enroll(WORKER), enroll(OTHER), groups.submitting(action(0), action(1), action(2)))
    _, *replies = groups.ask(groups.submitting(action(3)), poll(WORKER), poll(OTHER))
    given = [[lease.action.action_id for lease in reply.leases] for reply in replies]
    assert given == [[act(0), act(1)], [act(2), act(3)]]


def test_a_batch_asks_once_for_all_of_its_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups()
    store, rollouts = groups.store, [RolloutId(f"rol_{n}") for n in range(3)]

    def batch(seq: int) -> AppendBatch:
        appends = tuple(
            Append(
                rollout_id=rollout,
                expected_seq=seq,
                events=(b"e",),
                submits=(replace(action(10 * seq + n), rollout_id=rollout),),
            )
            for n, rollout in enumerate(rollouts)
        )
        return AppendBatch(run_id=RUN, fence=groups.fence, appends=appends)

    groups.ask(batch(0))
    groups.service._books._recent.heads.clear()
    groups.service._books._recent.outstanding.clear()
    asked: list[tuple[str, int]] = []
    ends, outstanding = store.ends, store.outstanding

    def seen_ends(run_id: RunId, of: Sequence[RolloutId]) -> list[Head]:
        asked.append(("ends", len(of)))
        return ends(run_id, of)

    def seen_outstanding(of: Sequence[RolloutId]) -> dict[RolloutId, int]:
        asked.append(("outstanding", len(of)))
        return outstanding(of)

    with monkeypatch.context() as patched:
        patched.setattr(store, "ends", seen_ends)
        patched.setattr(store, "outstanding", seen_outstanding)
        now = groups.clock.now()
        groups.service.begin((batch(1),), now)
        [reply] = [groups.service.handle(batch(1), now)]
        groups.service.commit()
    assert isinstance(reply, AppendBatchReply)
    assert [one.seq for one in reply.replies] == [2, 2, 2]
    assert asked == [("ends", 3), ("outstanding", 3)]


def test_only_rows_of_short_queues_are_kept_for_later_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lineup, "KEPT_MAX", 2)
    groups = Groups()
    groups.ask(groups.submitting(action(0), action(1), action(2), action(3)))
    assert list(groups.service._books._recent.rows) == [act(0), act(1)]
    [reply] = groups.ask(enroll(WORKER), poll(WORKER, 4))[-1:]
    assert len(reply.leases) == 4, "the rest is read when it is wanted"


def test_what_was_submitted_for_a_worker_ends_with_it_in_the_same_group() -> None:
    groups = Groups()
    groups.ask(enroll(WORKER))
    groups.ask(groups.submitting(action(1, holder=WORKER)), enroll(OTHER, replaces=WORKER))
    [told] = groups.ask(EventsRequest(run_id=RUN, fence=groups.fence))[0].events
    assert (told.action_id, told.completion.fault.code) == (act(1), "environment_lost")


def test_the_alarm_is_set_for_a_lost_worker_that_was_given_work_again() -> None:
    groups = Groups()
    groups.ask(enroll(WORKER), groups.submitting(action(1)))
    groups.clock.boot += groups.limits.lease_seconds
    groups.ask()
    assert groups.service._books.workers[WORKER].lost, "after exactly one lease of silence"
    assert groups.ask(poll(WORKER))[0].leases, "heard again, and given work in one go"
    wake = groups.service.next_wake()
    assert wake == groups.clock.boot + groups.limits.lease_seconds
    groups.clock.boot = wake
    groups.ask()
    [view] = groups.ask(ActionsRequest(rollout_id=ROLLOUT))[0].actions
    assert str(view.state) == "accepted", "silent once more, so its lease is over"


@pytest.mark.parametrize(
    ("asked", "repeated"),
    [
        ({"slots": {"fast": 4}}, [1, 2]),
        ({"slots": {"slow": 4}}, [3]),
        ({"action_ids": (act(2),)}, [2]),
        ({"slots": {"other": 4}}, []),
    ],
    ids=["fast", "slow", "ticket", "other"],
)
def test_a_lease_request_sent_again_is_told_its_unstarted_leases(
    asked: dict[str, Any], repeated: list[int]
) -> None:
    groups = Groups()
    actions = [action(1), action(2), action(3, worker_class="slow")]
    groups.ask(enroll(WORKER), groups.submitting(*actions))
    request = LeaseRequest(worker_id=WORKER, slots={"fast": 4, "slow": 4})
    [reply] = groups.ask(request)
    again = LeaseRequest(worker_id=WORKER, **asked)
    found = groups.service.undelivered(again, groups.clock.now()).leases
    assert found == tuple(one for one in reply.leases if int(one.action.path) in repeated)
    assert groups.service.undelivered(poll(OTHER), groups.clock.now()).leases == ()


def test_a_dead_letter_that_was_requeued_is_told_of_no_more() -> None:
    groups = Groups()
    groups.ask(enroll(WORKER), groups.submitting(action(1, deliveries_max=1), action(2)))
    for lease in groups.ask(poll(WORKER, 4))[0].leases:
        groups.ask(ReleaseRequest(worker_id=WORKER, held=held(lease)))
    hearing = EventsRequest(run_id=RUN, fence=groups.fence)
    requeued = groups.ask(hearing)[0].events[-1]
    assert (requeued.kind, requeued.action_id) == (LedgerEventKind.REQUEUED, act(2))
    position = replace(hearing, after=requeued.event_id)
    assert groups.ask(position)[0].events == ()
    groups.ask(groups.submitting(action(3, deliveries_max=1)))
    for lease in groups.ask(poll(WORKER, 4))[0].leases:
        groups.ask(ReleaseRequest(worker_id=WORKER, held=held(lease)))
    revive = SettleDead(run_id=RUN, verb=DeadLetterVerb.REQUEUE, action_ids=(act(3),), who="ops")
    assert groups.ask(revive)[0].refused == {}
    [attached] = groups.ask(Attach(run_id=RUN, incarnation="c2"))
    told = groups.ask(replace(position, fence=attached.fence))[0].events
    assert {(event.kind, event.action_id) for event in told} == {
        (LedgerEventKind.REQUEUED, act(2)),
        (LedgerEventKind.REQUEUED, act(3)),
    }


def test_what_is_due_in_a_year_ends_no_owner(tmp_path: Path) -> None:
    """A select takes no time-out of more than 24 days: each owner would end, one after another."""

    async def scenario() -> None:
        h = Harness("owner", tmp_path, LedgerLimits())
        await h.open()
        try:
            await h.attach()  # and no worker, whose silence would be looked at before
            pid = owner_pid(tmp_path)
            request = EventsRequest(run_id=RUN, fence=h.fence, wait_seconds=1e12)
            waiting = asyncio.create_task(h.ledger.events(request))
            await h.submit(action(1, deadline_seconds=1e12))
            await h.cancel(act(1))
            assert len((await waiting).events) == 1
            assert owner_pid(tmp_path) == pid
        finally:
            await h.close()

    asyncio.run(asyncio.wait_for(scenario(), BOUND_SECONDS))
