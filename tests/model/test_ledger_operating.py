"""What operators do to a ledger: dead letters, copies of a living one, restoring, compaction."""

import asyncio
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import cast

import apsw
import pytest

from stoker.broker.base import (
    ActionsRequest,
    CompleteDisposition,
    DeadLettersRequest,
    Durability,
    HoldVerdict,
    Lease,
    LedgerEventKind,
    LedgerLimits,
)
from stoker.broker.checking import check_database
from stoker.broker.client import LedgerClient, connect, owner_pid
from stoker.broker.copying import copy_database, mark
from stoker.broker.operating import AuditRequest, CopyRequest, DeadLetterVerb, SettleDead
from stoker.broker.place import DATABASE
from stoker.broker.service import LedgerService
from stoker.broker.store_sqlite import SqliteStore
from stoker.broker.verbs import LedgerVerbs
from stoker.errors import LedgerFenced, LedgerRefused, RunDirectoryUnusable
from stoker.model.action import ActionState, Effect
from stoker.model.completion import CompletionStatus
from stoker.model.ids import ActionId, EnvironmentId, WorkerId
from support.ledger import ENGINES, RUN, WORKER, Harness, ManualClock, act, action, with_ledger
from support.ledger_golden import make

OTHER = WorkerId("wrk_2")
FRESH = WorkerId("wrk_9")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def verbs(h: Harness) -> LedgerVerbs:
    return cast("LedgerVerbs", h.ledger)


async def kill(h: Harness, number: int, turns: int) -> None:
    """Let one action end every worker that runs it until it is a dead letter."""
    await h.submit(action(number, attempts_max=turns))
    for turn in range(turns):
        worker = WorkerId(f"wrk_{number}_{turn}")
        await h.enroll(worker)
        [lease] = await h.lease(worker)
        await h.start(lease, worker=worker)
        await h.enroll(WorkerId(f"{worker}x"), replaces=worker)


async def settle(h: Harness, verb: DeadLetterVerb, *ids: ActionId) -> dict[ActionId, str]:
    request = SettleDead(run_id=RUN, verb=verb, action_ids=ids, who="ops", reason="why not")
    return (await verbs(h).settle_dead(request)).refused


async def dead(h: Harness) -> set[str]:
    reply = await h.ledger.dead_letters(DeadLettersRequest(run_id=RUN))
    return {view.action.action_id for view in reply.actions}


def test_a_dead_letter_that_nobody_applied_is_requeued_with_fresh_attempts(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await kill(h, 1, turns=2)
        assert (await h.completed())[act(1)].status is CompletionStatus.DEAD
        assert await settle(h, DeadLetterVerb.REQUEUE, act(1)) == {}
        with pytest.raises(LedgerFenced):  # whoever has heard of the dead result cannot apply it
            await h.acknowledge(act(1))
        await h.crash()
        await h.attach("coordinator-2")
        assert await h.completed() == {}, "its coordinator waits for another result"
        told = [e for e in await h.events() if e.kind is LedgerEventKind.REQUEUED]
        assert told[-1].detail == "requeued by ops: why not"
        assert await dead(h) == set()
        await h.enroll(FRESH)
        [lease] = await h.lease(FRESH)
        assert (lease.delivery, lease.attempt) == (1, 1)
        await h.start(lease, worker=FRESH)
        await h.complete(lease, worker=FRESH)
        assert (await h.completed())[act(1)].status is CompletionStatus.OK
        [entry] = (await verbs(h).audit(AuditRequest(run_id=RUN))).entries
        assert (entry.who, entry.what, entry.action_id) == ("ops", "requeued", act(1))

    with_ledger(engine, tmp_path, scenario)


def test_i2_an_applied_dead_letter_never_changes_and_can_only_be_dropped(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await kill(h, 1, turns=1)
        refused = await settle(h, DeadLetterVerb.DROP, act(1), act(7))
        assert "has not applied" in refused[act(1)]
        assert "no such action" in refused[act(7)]
        await h.acknowledge(act(1))
        refused = await settle(h, DeadLetterVerb.REQUEUE, act(1))
        assert "never changes" in refused[act(1)]
        assert "new run" in refused[act(1)], "what is right is offered"
        await h.acknowledge()  # refusing fences nobody
        assert await dead(h) == {act(1)}
        assert await settle(h, DeadLetterVerb.DROP, act(1)) == {}
        await h.crash()
        assert await dead(h) == set()
        assert "already" in (await settle(h, DeadLetterVerb.DROP, act(1)))[act(1)]
        [view] = (await h.ledger.actions(ActionsRequest(action_ids=(act(1),)))).actions
        assert view.state is ActionState.ACKNOWLEDGED
        assert await h.submit(action(1, attempts_max=1)) == ["duplicate"], "its id stays"
        [entry] = (await verbs(h).audit(AuditRequest(run_id=RUN))).entries
        assert entry.what == "dropped"

    with_ledger(engine, tmp_path, scenario)


def test_what_is_no_dead_letter_is_refused(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        [lease] = await h.lease(slots=1)
        await h.complete(lease)
        refused = await settle(h, DeadLetterVerb.REQUEUE, act(1), act(2))
        assert refused == {
            act(1): "it is no dead letter: it is ok",
            act(2): "it is no dead letter: it is accepted",
        }

    with_ledger(engine, tmp_path, scenario)


def test_a_requeued_dead_letter_keeps_to_the_caps(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await kill(h, 1, turns=1)
        await h.submit(action(2), action(3))
        await settle(h, DeadLetterVerb.REQUEUE, act(1))
        await h.attach("coordinator-2")
        assert (await h.ledger.stats()).classes["fast"].parked == 1
        done = []
        await h.enroll(FRESH)
        while leases := await h.lease(FRESH):
            await h.complete(*leases, worker=FRESH)
            done += [lease.action.action_id for lease in leases]
        assert sorted(done) == [act(1), act(2), act(3)]

    with_ledger(engine, tmp_path, scenario, LedgerLimits(queued_max=2))


@pytest.mark.parametrize("engine", ["sqlite", "owner"])
def test_a_living_ledger_is_copied_between_its_groups(engine: str, tmp_path: Path) -> None:
    place = tmp_path / "ledger"
    place.mkdir()
    target = tmp_path / "copy.db"

    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n, bytes(2000)) for n in range(500)))
        step = CopyRequest(path=str(target), pages=8)
        reply = await verbs(h).copy_some(step)
        assert 0 < reply.remaining < reply.total
        turns = 0
        while reply.remaining:
            reply = await verbs(h).copy_some(step)
            turns += 1
            if turns % 5 == 0:  # the ledger goes on: what is committed reaches the copy
                [lease] = await h.lease(slots=1)
                await h.complete(lease)
        assert turns > 5
        mark(target)
        checked = check_database(target)
        assert checked.problems == []
        assert (checked.actions, checked.unacknowledged) == (500, turns // 5)
        with pytest.raises(LedgerRefused, match="new file"):
            await verbs(h).copy_some(step)
        with pytest.raises(LedgerRefused, match="nothing was copied"):
            await verbs(h).copy_some(CopyRequest(path="/nowhere/at/all"))
        assert await h.submit(action(600)) == ["accepted"]

    limits = LedgerLimits(outstanding_per_rollout_max=1000)
    with_ledger(engine, place, scenario, limits)


def restored_in(place: Path, clock: ManualClock) -> LedgerService:
    service = LedgerService(SqliteStore(place / DATABASE), LedgerLimits(), Durability.POWER_SAFE)
    service.open(clock.now(), boot_id="boot", lineage="lin_restored")
    return service


async def copied(source: Path, place: Path) -> None:
    await copy_database(source, place / DATABASE)
    mark(place / DATABASE)


async def restored_from(h: Harness, place: Path) -> Harness:
    """Return the ledger made of the copy in ``place``, as the original's coordinator sees it."""
    mark(place / DATABASE)
    made = Harness("sqlite", place, h.limits)
    made.clock, made.fence, made.seqs = h.clock, h.fence, dict(h.seqs)
    await made.open()
    return made


async def refuses_the_original(made: Harness, leases: list[Lease]) -> None:
    for attempt in (made.submit(action(20)), made.events()):
        with pytest.raises(LedgerFenced):
            await attempt
    with pytest.raises(LedgerRefused, match="fresh id"):
        await made.lease()
    assert await made.start(*leases) == [HoldVerdict.LOST] * len(leases)
    assert set(await made.complete(*leases)) == {CompleteDisposition.STALE}


def test_i3_a_restored_ledger_has_another_identity_and_refuses_every_old_fence(
    tmp_path: Path,
) -> None:
    place, other = tmp_path / "one", tmp_path / "two"
    place.mkdir()
    other.mkdir()

    async def scenario(h: Harness) -> None:
        await h.submit(
            action(1, effect=Effect.EXTERNAL),
            action(2, effect=Effect.EXTERNAL, priority=-1),
            action(3),
            action(4),
            action(5, environment_id=EnvironmentId("env_1")),
            action(6),
            action(7, holder=WORKER, priority=-1),
            action(8, priority=-1),
        )
        running, plain, unstarted, boxed, done = await h.lease(slots=5)
        await h.start(running, plain, boxed, done)
        await h.complete(done)
        await verbs(h).copy_some(CopyRequest(path=str(other / DATABASE), pages=10**6))
        leases = [running, plain, unstarted, boxed, *await h.lease(slots=1)]
        made = await restored_from(h, other)
        await refuses_the_original(made, leases)
        fence = await made.attach("coordinator-1")
        assert fence >> 40 > 1 << 14, "far from any epoch the original will reach"
        results = await made.completed()
        assert {i: r.fault.code if r.fault else str(r.status) for i, r in results.items()} == {
            act(1): "effect_ambiguous",
            act(2): "effect_ambiguous",
            act(5): "environment_lost",
            act(6): "ok",
            act(7): "environment_lost",
        }, "an external action may have run since the copy, even one that was queued"
        assert all(results[act(n)].external_effect_possible for n in (1, 2))
        await made.enroll(FRESH)
        again = await made.lease(FRESH)
        assert [(one.action.action_id, one.attempt) for one in again] == [
            (act(number), 1) for number in (3, 4, 8)
        ], "a copy spends nobody's attempts"
        assert min(one.fence for one in again) > max(one.fence for one in leases)
        [entry] = (await verbs(made).audit(AuditRequest(run_id=RUN))).entries
        assert entry.what == "restored"
        await made.close()
        assert check_database(other / DATABASE).problems == []

    with_ledger("sqlite", place, scenario)


def test_a_copy_of_a_ledger_without_an_owner_is_whole_and_the_original_untouched(
    tmp_path: Path,
) -> None:
    source = tmp_path / "one"
    source.mkdir()
    make(source)
    before = (source / DATABASE).read_bytes()
    (tmp_path / "two").mkdir()
    asyncio.run(copied(source, tmp_path / "two"))
    assert (source / DATABASE).read_bytes() == before
    service = restored_in(tmp_path / "two", ManualClock())
    assert service.lineage == "lin_restored"
    service.close()
    again = restored_in(tmp_path / "two", ManualClock())
    again.close()
    checked = check_database(tmp_path / "two" / DATABASE)
    assert (checked.lineage, checked.problems) == ("lin_restored", [])
    with pytest.raises(RunDirectoryUnusable, match="no ledger"):
        asyncio.run(copy_database(tmp_path, tmp_path / "three"))


def test_peers_of_the_original_are_refused_by_a_ledger_restored_in_its_place(
    tmp_path: Path,
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        [lease] = await h.lease()
        (tmp_path / "copy").mkdir()
        await copied(h.place, tmp_path / "copy")
        pid = owner_pid(h.place)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while owner_pid(h.place) is not None:
            await asyncio.sleep(0.01)
        for name in (DATABASE, f"{DATABASE}-wal"):
            (h.place / name).unlink(missing_ok=True)
        (tmp_path / "copy" / DATABASE).rename(h.place / DATABASE)
        with pytest.raises(LedgerFenced, match="restored from a copy"):
            await h.complete(lease)
        with pytest.raises(LedgerFenced, match="restored from a copy"):
            await h.attach("coordinator-9")
        fresh = await connect(h.place, role="test", idle_exit_seconds=5.0)
        assert (await fresh.actions(ActionsRequest(action_ids=(act(1),)))).actions
        await fresh.close()

    place = tmp_path / "ledger"
    place.mkdir()
    with_ledger("owner", place, scenario)


def test_a_ledger_after_a_reboot_keeps_deadlines_by_the_wall_clock(tmp_path: Path) -> None:
    async def original(h: Harness) -> None:
        await h.submit(action(1, deadline_seconds=100.0), action(2, deadline_seconds=1000.0))
        [lease] = await h.lease(slots=1)
        await h.start(lease)

    with_ledger("sqlite", tmp_path, original)
    clock = ManualClock()
    clock.boot, clock.wall = 5.0, clock.wall + 400.0  # another boot, 400 s of wall time later
    service = LedgerService(SqliteStore(tmp_path / DATABASE), LedgerLimits(), Durability.POWER_SAFE)
    service.open(clock.now(), boot_id="another boot", lineage="")
    rows = {row.action_id: row for row in service._store.rows((act(1), act(2)))}
    assert rows[act(1)].deadline_boot == 5.0, "it passed while the machine was down"
    assert rows[act(2)].deadline_boot == 605.0
    assert rows[act(2)].accepted_boot == 5.0 - 400.0

    def pass_time(seconds: float) -> dict[ActionId, ActionState]:
        clock.boot += seconds
        clock.wall += seconds
        service.begin()
        service.settle(clock.now())
        service.commit()
        return {row.action_id: row.state for row in service._store.rows((act(1), act(2)))}

    assert pass_time(1.0)[act(1)] is ActionState.STARTED, "its worker has a lease to show itself"
    assert pass_time(10.0)[act(1)] is ActionState.COMPLETED
    assert pass_time(500.0)[act(2)] is not ActionState.COMPLETED
    assert pass_time(94.0)[act(2)] is ActionState.COMPLETED
    service.close()


@pytest.mark.parametrize("engine", ["sqlite", "owner"])
def test_compaction_gives_pages_back_and_is_refused_while_work_is_out(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n, bytes(8000)) for n in range(200)))
        leases = await h.lease(slots=200)
        with pytest.raises(LedgerRefused, match=r"in workers' hands \(actions: 200\)"):
            await verbs(h).compact()
        await h.complete(*leases)
        await h.acknowledge(*(lease.action.action_id for lease in leases))
        done = await verbs(h).compact()
        assert done.bytes_after < done.bytes_before / 3
        assert (tmp_path / DATABASE).stat().st_size < done.bytes_before / 3
        await h.submit(action(300))
        await h.crash()
        assert await h.submit(action(5, bytes(8000))) == ["duplicate"], "tombstones stay"
        [lease] = await h.lease()
        assert await h.complete(lease) == [CompleteDisposition.OK]

    with_ledger(engine, tmp_path, scenario)


def test_a_ledger_in_memory_has_no_file(tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        with pytest.raises(LedgerRefused, match="in memory"):
            await verbs(h).compact()
        with pytest.raises(LedgerRefused, match="in memory"):
            await verbs(h).copy_some(CopyRequest(path=str(tmp_path / "x")))

    with_ledger("memory", tmp_path, scenario)


DAMAGE = {
    "UPDATE action SET fence = 77 WHERE action_id = 'act_0006'": "I3: act_0006 has a live fence",
    "UPDATE action SET fence = (SELECT fence FROM action WHERE action_id = 'act_0003') "
    "WHERE action_id = 'act_0004'": "is live for 2 actions",
    "UPDATE action SET fence = 99 << 40 WHERE action_id = 'act_0003'": "epoch 99",
    "UPDATE owner SET fence = 99 << 40": "has a fence of epoch 99",
    "UPDATE action SET settled_status = 'ok' WHERE action_id = 'act_0003'": "I2: act_0003",
    "DELETE FROM result WHERE place = (SELECT place FROM action WHERE action_id = 'act_0002')": (
        "I1: act_0002 is completed and its result is gone"
    ),
    "DELETE FROM input WHERE place = (SELECT place FROM action WHERE action_id = 'act_0006')": (
        "I1: act_0006 is not acknowledged and its input is gone"
    ),
    "DELETE FROM event WHERE action_id = 'act_0002'": "I8: act_0002 is completed and 0 events",
    "UPDATE action SET state = 5 WHERE action_id = 'act_0002'": "not waiting to be acknowledged",
    "UPDATE action SET attempts = 9 WHERE action_id = 'act_0003'": "I5: act_0003 has 9 attempts",
    "UPDATE action SET parked_on = 'caps' WHERE action_id = 'act_0006'": "I6: act_0006",
    "DELETE FROM journal WHERE seq = 1": "I11: rollout rol_1 has 2 journal entries",
    "DELETE FROM rollout WHERE rollout_id = 'rol_2'": "I11: 2 journal entries belong to no rollout",
    "UPDATE rollout SET part = '9' WHERE rollout_id = 'rol_2'": "is in partition 0",
    "DELETE FROM action WHERE action_id = 'act_0006'": "belongs to no action",
    "UPDATE action SET digest = 'x' WHERE action_id = 'act_0003'": "content: the input of act_0003",
    "UPDATE action SET settled_fence = 1 WHERE action_id = 'act_0002'": "the result of act_0002",
    "UPDATE input SET action = x'c1'": "does not decode",
    "UPDATE action SET deliveries = 40 WHERE action_id = 'act_0001'": "counters: rows show",
    "UPDATE action SET settled_status = 'limit' WHERE state = 5": "results are limit",
}


@pytest.mark.parametrize("number", range(len(DAMAGE)), ids=[d[:60] for d in DAMAGE.values()])
def test_each_kind_of_damage_to_rows_is_found(number: int, tmp_path: Path) -> None:
    statement, said = list(DAMAGE.items())[number]
    make(tmp_path)
    path = tmp_path / DATABASE
    assert check_database(path).problems == []
    with closing(apsw.Connection(str(path))) as db:
        db.execute(statement)
    problems = check_database(path).problems
    assert any(said in problem for problem in problems), problems


def test_a_damaged_file_is_told_whatever_is_damaged(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / DATABASE
    sound = path.read_bytes()
    for at in range(4096, len(sound), 8192):
        path.write_bytes(sound[:at] + bytes(range(256)) * 4 + sound[at + 1024 :])
        assert check_database(path).problems, f"the page at {at} is damaged and nobody says so"
    path.write_bytes(b"this is no database at all" * 400)
    [problem] = check_database(path).problems
    assert problem.startswith("file: ")


def test_the_client_takes_the_identity_of_its_first_ledger(tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        assert isinstance(h.ledger, LedgerClient)
        assert h.ledger._lineage == (await h.ledger.capabilities()).lineage != ""

    with_ledger("owner", tmp_path, scenario)
