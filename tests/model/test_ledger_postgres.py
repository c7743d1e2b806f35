"""What only an engine of several gateways can get wrong."""

import asyncio
import select
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import psycopg
import pytest

from stoker.broker.base import (
    Append,
    AppendBatch,
    AppendDisposition,
    Attach,
    Cancel,
    Claim,
    ClaimRequest,
    CompleteDisposition,
    CompleteRequest,
    Enroll,
    EventsRequest,
    Held,
    HoldReply,
    HoldVerdict,
    LeaseRequest,
    LedgerEventKind,
    LedgerLimits,
    StartRequest,
)
from stoker.broker.exchange import Exchange, Pending
from stoker.broker.memory import MemoryLedger
from stoker.broker.postgres import books, connection, service
from stoker.broker.postgres.connection import connect, migrate
from stoker.broker.postgres.service import GatewayService
from stoker.broker.postgres.sweeper import Sweeper
from stoker.broker.postgres.time import FORGET_SECONDS, TICK_SECONDS
from stoker.broker.store import StorageConflict
from stoker.errors import ConfigInvalid, LedgerUnavailable
from stoker.model.action import Action
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, Fence, RunId
from support.ledger import ROLLOUT, RUN, WORKER, ManualClock, action, gateway_service, held
from support.postgres import drop_schema, fresh_schema, server

CLOCK = ManualClock()


@pytest.fixture
def schema() -> Iterator[str]:
    name = fresh_schema()
    yield name
    drop_schema(server(), name)


@pytest.fixture
def pair(schema: str) -> Iterator[tuple[GatewayService, GatewayService]]:
    both = tuple(gateway_service(schema, LedgerLimits()) for _ in range(2))
    for gateway in both:
        gateway.open(CLOCK.now(), boot_id="", lineage="lin_test")
    yield both[0], both[1]
    for gateway in both:
        gateway.close()


def ask(gateway: GatewayService, request: Any) -> Any:
    try:
        return tried(gateway, request)
    except StorageConflict:
        gateway.rollback(CLOCK.now())
        return tried(gateway, request)


def tried(gateway: GatewayService, request: Any) -> Any:
    gateway.begin([request], CLOCK.now())
    gateway.expect([request] if isinstance(request, LeaseRequest | EventsRequest) else [])
    reply = gateway.handle(request, CLOCK.now())
    gateway.commit()
    return reply


def begun(pair: tuple[GatewayService, GatewayService]) -> tuple[Fence, list[CompleteRequest]]:
    """Return the coordinator's fence and two results that are ready to be handed in."""
    first, _ = pair
    fence = ask(first, Attach(run_id=RUN, incarnation="c")).fence
    ask(first, Enroll(worker_id=WORKER, name="w", slots={"fast": 2}))
    one = Append(rollout_id=ROLLOUT, expected_seq=0, submits=(action(1), action(2)))
    ask(first, AppendBatch(run_id=RUN, fence=fence, appends=(one,)))
    leases = ask(first, LeaseRequest(worker_id=WORKER, slots={"fast": 2})).leases
    results = [
        Completion(action_id=o.action.action_id, fence=o.fence, status=CompletionStatus.OK)
        for o in leases
    ]
    return fence, [CompleteRequest(worker_id=WORKER, completions=(one,)) for one in results]


def test_an_event_that_commits_late_has_the_higher_number(
    pair: tuple[GatewayService, GatewayService],
) -> None:
    first, second = pair
    fence, (mine, others) = begun(pair)
    second_request = CompleteRequest(
        worker_id=second_worker(second), completions=others.completions
    )
    first.begin([mine], CLOCK.now())
    first.handle(mine, CLOCK.now())
    first._books.flush()  # numbered and not committed: the dangerous moment
    late = Thread(target=ask, args=(second, second_request))
    late.start()
    reading = EventsRequest(run_id=RUN, fence=fence)
    first.commit()
    late.join(60)
    assert not late.is_alive()
    told = ask(second, reading).events
    assert [e.action_id for e in told] == [mine.completions[0].action_id, *ids(others)]
    assert ask(first, EventsRequest(run_id=RUN, fence=fence, after=told[0].event_id)).events


def second_worker(gateway: GatewayService) -> Any:
    """Another worker's name: a worker's own requests would wait for each other."""
    other = type(WORKER)("wrk_other")
    ask(gateway, Enroll(worker_id=other, name="w", slots={}))
    return other


def ids(request: CompleteRequest) -> list[ActionId]:
    return [one.action_id for one in request.completions]


def test_two_gateways_never_give_one_action_twice(
    pair: tuple[GatewayService, GatewayService],
) -> None:
    first, second = pair
    fence = ask(first, Attach(run_id=RUN, incarnation="c")).fence
    submits = tuple(action(n) for n in range(8))
    one = Append(rollout_id=ROLLOUT, expected_seq=0, submits=submits)
    ask(first, AppendBatch(run_id=RUN, fence=fence, appends=(one,)))
    request = LeaseRequest(worker_id=WORKER, slots={"fast": 4})
    other = LeaseRequest(worker_id=second_worker(second), slots={"fast": 8})
    first.begin([request], CLOCK.now())
    first.expect([request])
    mine: Any = first.handle(request, CLOCK.now())
    theirs = ask(second, other)  # while the first group is open: what it holds is skipped
    first.commit()
    given = [lease.action.action_id for lease in (*mine.leases, *theirs.leases)]
    assert len(given) == len(set(given)) == 8
    assert len({lease.fence for lease in (*mine.leases, *theirs.leases)}) == 8


def test_polls_that_a_full_group_left_out_are_asked_in_the_next(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside other gateways a group gives a bounded number of leases, so that caps hold."""
    monkeypatch.setattr(books, "GROUP_MAX", 2)
    beside = gateway_service(schema, LedgerLimits())
    beside.open(CLOCK.now(), boot_id="", lineage="lin_test")

    gateway = gateway_service(schema, LedgerLimits())

    async def scenario() -> None:
        ledger = MemoryLedger(None, CLOCK, service=gateway)
        fence = (await ledger.attach(Attach(run_id=RUN, incarnation="c"))).fence
        names = [type(WORKER)(f"wrk_{n}") for n in range(3)]
        for name in names:
            await ledger.enroll(Enroll(worker_id=name, name=name, slots={"fast": 1}))
        polls = [
            asyncio.create_task(
                ledger.lease(LeaseRequest(worker_id=name, slots={"fast": 1}, wait_seconds=50.0))
            )
            for name in names
        ]
        while ledger._exchange.waiting < len(polls):
            await asyncio.sleep(0)
        one = Append(rollout_id=ROLLOUT, expected_seq=0, submits=tuple(map(action, range(3))))
        await ledger.append(AppendBatch(run_id=RUN, fence=fence, appends=(one,)))
        ledger.tick()  # no time has passed
        await asyncio.sleep(0)
        assert [poll.done() for poll in polls] == [True] * 3
        await ledger.close()

    try:
        asyncio.run(scenario())
    finally:
        gateway.close()
        beside.close()


def test_a_gateway_that_takes_over_time_knows_what_it_gave_away_meanwhile(
    pair: tuple[GatewayService, GatewayService],
) -> None:
    first, second = pair
    fence = ask(second, Attach(run_id=RUN, incarnation="c")).fence
    ask(second, Enroll(worker_id=WORKER, name="w", slots={"fast": 2}))
    submits = [
        AppendBatch(
            run_id=RUN,
            fence=fence,
            appends=(Append(rollout_id=ROLLOUT, expected_seq=0, submits=(action(n),)),),
        )
        for n in range(2)
    ]
    ask(second, submits[0])
    first.close()
    now = CLOCK.now()
    later = type(now)(now.boot + TICK_SECONDS, now.wall + TICK_SECONDS)
    wanted = LeaseRequest(worker_id=WORKER, slots={"fast": 2})
    second.begin([submits[1], wanted], later)
    second.handle(submits[1], later)
    second.settle(later)  # it keeps time from here on: rows are changed by a rule
    second.expect([wanted])
    reply: Any = second.handle(wanted, later)
    second.commit()
    for lease in reply.leases:  # one lay there, one came with this group
        begin = StartRequest(worker_id=WORKER, held=held(lease))
        assert ask(second, begin).verdicts == (HoldVerdict.OK,)
    assert len(reply.leases) == len(submits)


def test_a_schema_of_a_newer_stoker_is_refused_and_untouched(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the version of Stoker that it needs, where that was kept."""
    with connect(server().url(), schema) as db:
        steps = connection._migrations()
        with monkeypatch.context() as newer:
            newer.setattr(connection, "_migrations", lambda: [*steps, b"CREATE TABLE later ()"])
            newer.setattr("stoker.__version__", "7.2.0")
            migrate(db, schema)
        has = f"has version {len(steps) + 1} and this is stoker .*, which knows {len(steps)};"
        with pytest.raises(ConfigInvalid, match=f"{has} .* use stoker 7.2.0 or newer"):
            migrate(db, schema)
        db.execute("ALTER TABLE schema_version DROP COLUMN stoker")
        with pytest.raises(ConfigInvalid, match="use the newer stoker that made it"):
            migrate(db, schema)
        asked = db.execute("SELECT max(number) FROM schema_version")
        assert asked.fetchone() == (len(steps) + 1,)


def test_a_schema_is_not_changed_under_a_gateway_that_knows_the_older_one(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on without what the newer one looks for: its actions would never be found."""
    older = gateway_service(schema, LedgerLimits())
    older.open(CLOCK.now(), boot_id="", lineage="lin_test")
    steps = connection._migrations()
    newer = [*steps, b"CREATE TABLE looked_for (place bigint)"]
    monkeypatch.setattr(connection, "_migrations", lambda: newer)
    with connect(server().url(), schema) as db:
        with pytest.raises(LedgerUnavailable, match=f"has version {len(steps)} and needs version"):
            migrate(db, schema)
        assert ask(older, Attach(run_id=RUN, incarnation="c")).fence
        older.close()
        ends = time.monotonic() + 30
        while True:  # the server lets go of its lock when it notices, not when we have closed
            try:
                migrate(db, schema)
                break
            except LedgerUnavailable:
                assert time.monotonic() < ends, "a closed gateway still serves"
        assert db.execute("SELECT max(number) FROM schema_version").fetchone() == (len(newer),)


def test_two_processes_that_migrate_at_once_make_one_schema(schema: str) -> None:
    def made() -> None:
        with connect(server().url(), schema) as db:
            migrate(db, schema)

    threads = [Thread(target=made) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with psycopg.connect(server().url().reveal()) as db:
        asked = f'SELECT count(*), max(number) FROM "{schema}".schema_version'
        assert db.execute(asked.encode()).fetchone() == (5, 5)


def test_dead_incarnations_are_forgotten_a_day_later(
    pair: tuple[GatewayService, GatewayService],
) -> None:
    keeper, _ = pair
    ask(keeper, Enroll(worker_id=WORKER, name="w", slots={"fast": 1}))
    found: list[set[str]] = []
    for seconds in (3 * keeper.limits.lease_seconds, FORGET_SECONDS):
        CLOCK.boot += seconds
        keeper.begin([], CLOCK.now())
        keeper.settle(CLOCK.now())
        keeper.commit()
        found.append(known_workers(keeper))
    assert found == [{WORKER}, set()]


def test_a_clock_that_is_set_back_keeps_no_dead_worker_alive(
    pair: tuple[GatewayService, GatewayService], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = pair
    fence, _ = begun(pair)
    monkeypatch.setattr(CLOCK, "boot", CLOCK.boot - 3600.0)
    first.forgive(CLOCK.now())  # as its loop does when it sees the jump
    lease_seconds = LedgerLimits().lease_seconds
    ends = CLOCK.boot + 2 * lease_seconds + 2 * TICK_SECONDS
    told: list[Any] = []
    while not told and CLOCK.boot < ends:
        monkeypatch.setattr(CLOCK, "boot", CLOCK.boot + TICK_SECONDS)
        first.begin((), CLOCK.now())
        first.settle(CLOCK.now())
        first.commit()
        told = ask(first, EventsRequest(run_id=RUN, fence=fence)).events
    assert [one.kind for one in told] == [LedgerEventKind.REQUEUED] * 2


def test_a_clock_that_is_set_back_keeps_no_claim_of_the_dead(
    pair: tuple[GatewayService, GatewayService], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    dead, mine = (
        ClaimRequest(claim=Claim(run_id=RunId(f"run_{n}"), servers=("s",), window=1, wanted=1))
        for n in range(2)
    )
    ask(first, dead)
    assert ask(second, mine).claims == (dead.claim, mine.claim)
    monkeypatch.setattr(CLOCK, "boot", CLOCK.boot - 3600.0)
    assert ask(second, mine).claims == (mine.claim,)


def known_workers(gateway: GatewayService) -> set[str]:
    return {found[0] for name in ("workers", "heartbeats") for found in gateway.store.all(name)}


def test_a_row_that_another_gateway_changed_is_read_again(
    pair: tuple[GatewayService, GatewayService],
) -> None:
    first, second = pair
    fence, (mine, others) = begun(pair)
    assert ask(second, mine).dispositions == (CompleteDisposition.OK,)
    assert ask(first, mine).dispositions == (CompleteDisposition.ALREADY,)
    assert ask(first, others).dispositions == (CompleteDisposition.OK,)
    told = ask(second, EventsRequest(run_id=RUN, fence=fence)).events
    assert [e.action_id for e in told] == [*ids(mine), *ids(others)]


def test_nothing_is_answered_from_what_another_gateway_has_changed(
    pair: tuple[GatewayService, GatewayService],
) -> None:
    """Each request is decided from memory first: that group fails, and holds when repeated."""
    first, second = pair
    fence, results = begun(pair)
    begin, again = (
        StartRequest(worker_id=WORKER, held=(Held(one.action_id, one.fence),))
        for (one,) in (result.completions for result in results)
    )
    assert ask(first, again).verdicts == (HoldVerdict.OK,)
    ask(first, entry(fence, 0))
    ask(second, entry(fence, 1))
    ask(
        second,
        Cancel(run_id=RUN, fence=fence, action_ids=tuple(i for one in results for i in ids(one))),
    )
    cancelled = HoldReply(verdicts=(HoldVerdict.CANCEL,))
    for request, answer in (
        (begin, cancelled),
        (again, cancelled),  # it had started: nothing would be written, so it is looked at
        (entry(fence, 1), AppendDisposition.ALREADY),
    ):
        with pytest.raises(StorageConflict):
            tried(first, request)
        first.rollback(CLOCK.now())
        found = tried(first, request)
        assert answer in (found, *(one.disposition for one in getattr(found, "replies", ())))


def test_what_is_sent_unawaited_fails_at_the_next_question_and_leaves_nothing(
    pair: tuple[GatewayService, GatewayService],
) -> None:
    store = pair[0].store
    store.begin()
    with store.streamed():
        store.forget_late([1])
        assert store.advice() == ()  # asked for by another way than what is under way
        store.run("put_owner", (RUN, "streamed", 1, "c"))
        store.run("SELECT 1 / 0")
        store.forget_late([1])
    with pytest.raises(StorageConflict):
        store.all("meta")
    store.rollback()
    store.begin()
    assert store.owner(RUN, "streamed") is None
    with store.streamed():
        store.run("SELECT 1 / 0")
    store.rollback()  # whatever is under way: it is undone
    store.begin()
    store.commit(sync=False)


def test_a_reply_that_was_made_before_a_commit_that_failed_is_thrown_away(
    pair: tuple[GatewayService, GatewayService],
) -> None:
    first, second = pair
    fence, [result, _] = begun(pair)
    start = StartRequest(
        worker_id=WORKER, held=tuple(Held(one.action_id, one.fence) for one in result.completions)
    )
    ask(second, Cancel(run_id=RUN, fence=fence, action_ids=tuple(ids(result))))
    prepared: list[Any] = []
    given: list[Any] = []
    Exchange(first).run([Pending(start, given.append, prepare=prepared.append)], CLOCK.now())
    assert [one.verdicts for one in prepared] == [(HoldVerdict.OK,), (HoldVerdict.CANCEL,)]
    assert given == prepared[1:]


def test_a_worker_whose_poll_waits_is_not_dead_because_another_gateway_hears_it(
    pair: tuple[GatewayService, GatewayService],
) -> None:
    first, second = pair
    submit = entry(begun(pair)[0], 0, action(3))
    poll = LeaseRequest(worker_id=WORKER, slots={"fast": 1}, wait_seconds=9.0)
    second.begin([StartRequest(worker_id=WORKER, held=())], CLOCK.now())
    first.begin([submit], CLOCK.now(), [poll])
    first.handle(submit, CLOCK.now())
    second.rollback(CLOCK.now())
    assert not first._books.worker(WORKER, CLOCK.now().boot).dead, "its environments stand"
    first.expect([poll])
    given: Any = first.poll(poll, CLOCK.now())
    first.commit()
    assert [lease.action.action_id for lease in given.leases] == [action(3).action_id]


def entry(fence: Fence, seq: int, *submits: Action) -> AppendBatch:
    one = Append(rollout_id=ROLLOUT, expected_seq=seq, events=(b"entry",), submits=submits)
    return AppendBatch(run_id=RUN, fence=fence, appends=(one,))


def test_what_ended_is_vacuumed_without_waiting_for_it(
    schema: str, pair: tuple[GatewayService, GatewayService], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = pair
    fence, results = begun(pair)
    for one in results:
        ask(first, one)
    sweeper = Sweeper(connect(server().url(), schema))
    first.sweeps(sweeper.sweep)
    monkeypatch.setattr(service, "SWEEP_ROWS", 2)
    seen = []
    for done in results:
        seen.append(sweeper.busy)
        applied = tuple(result.action_id for result in done.completions)
        append = Append(rollout_id=ROLLOUT, expected_seq=0, acknowledges=applied)
        ask(first, AppendBatch(run_id=RUN, fence=fence, appends=(append,)))
    assert [*seen, sweeper.busy] == [False, False, True], "when two have ended, not before"
    while sweeper.busy:
        assert select.select([sweeper], [], [], 60)[0], "the vacuum ends"
        sweeper.listen()
    sweeper.close()
    with psycopg.connect(server().url().reveal()) as db:
        swept = db.execute(
            "SELECT relname, vacuum_count FROM pg_stat_user_tables WHERE schemaname = %s", (schema,)
        ).fetchall()
    assert {name for name, count in swept if count} >= {"input", "result", "event"}
