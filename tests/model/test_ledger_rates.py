"""Rates of remote services on every engine: one bucket for all workers, lowered by refusals."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.broker import rates
from stoker.broker.base import (
    Capabilities,
    CompleteDisposition,
    CompleteRequest,
    Durability,
    Lease,
    LeaseRequest,
    LedgerEventKind,
    LedgerLimits,
    ServiceRate,
)
from stoker.broker.copying import mark
from stoker.broker.limits import refuse_other
from stoker.broker.memory import MemoryLedger
from stoker.broker.postgres.wire import Answer
from stoker.broker.service import LedgerService
from stoker.broker.store_sqlite import SqliteStore
from stoker.errors import ConfigInvalid
from stoker.model.action import Effect
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import WorkerId
from support.ledger import ENGINES, WORKER, Harness, act, action, with_ledger
from support.postgres import server

LIMIT = ServiceRate(rate=1.0, burst=3)
LIMITS = LedgerLimits(services={"web": LIMIT}, class_services={"fast": "web", "slow": "web"})
OTHER = WorkerId("wrk_2")
NEARLY = 1e-3


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def refuse(h: Harness, lease: Lease, wait: float = 0.0) -> CompleteDisposition:
    """Report that the service said "too many requests"."""
    result = Completion(
        action_id=lease.action.action_id,
        fence=lease.fence,
        status=CompletionStatus.OK,
        throttled_seconds=wait,
    )
    request = CompleteRequest(worker_id=WORKER, completions=(result,))
    [disposition] = (await h.ledger.complete(request)).dispositions
    return disposition


def test_all_workers_share_one_burst_and_then_one_rate(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.enroll(OTHER)
        await h.submit(*(action(n) for n in range(20)))
        assert len(await h.lease(slots=2)) == 2
        assert len(await h.lease(OTHER, slots=9)) == 1, "the burst is everybody's"
        assert await h.lease(OTHER, slots=9) == []
        await h.advance(2.0)
        assert len(await h.lease(slots=9)) == 2
        await h.crash()
        await h.ledger.stats()
        assert await h.lease(OTHER, slots=9) == [], "a restart is no second burst"
        await h.advance(100.0)
        await h.enroll(OTHER)
        assert len(await h.lease(OTHER, slots=9)) == 3, "a pause saves up no more than the burst"

    with_ledger(engine, tmp_path, scenario, LIMITS)


def test_two_classes_share_their_service_and_a_third_is_free(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(
            *(action(n) for n in range(5)),
            *(action(10 + n, worker_class="slow") for n in range(5)),
            *(action(20 + n, worker_class="free") for n in range(5)),
        )
        request = LeaseRequest(worker_id=WORKER, slots={"fast": 2, "slow": 4, "free": 4})
        got = [one.action.worker_class for one in (await h.ledger.lease(request)).leases]
        assert sorted(got) == ["fast"] * 2 + ["free"] * 4 + ["slow"]

    with_ledger(engine, tmp_path, scenario, LIMITS)


def test_a_waiting_lease_wakes_when_its_token_is_due(engine: str, tmp_path: Path) -> None:
    """Nothing else happens meanwhile: no request, no poll of the worker's own."""
    limits = LedgerLimits(
        services={"web": ServiceRate(rate=5.0, burst=1)}, class_services={"fast": "web"}
    )

    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        assert len(await h.lease()) == 1
        request = LeaseRequest(worker_id=WORKER, slots={"fast": 1}, wait_seconds=50.0)
        waiting = asyncio.create_task(h.ledger.lease(request))
        if isinstance(h.ledger, MemoryLedger) and engine != "owner":
            while not h.ledger._exchange.waiting:
                await asyncio.sleep(0)
            due = h.ledger._exchange.next_wake()
            assert due is not None
            assert due <= h.clock.boot + 0.2 + NEARLY
            assert not waiting.done()
            await h.advance(0.2)
        [lease] = (await waiting).leases
        assert lease.action.action_id == act(2)

    with_ledger(engine, tmp_path, scenario, limits)


def test_a_refusal_lowers_the_rate_once_for_what_was_out_and_it_rises_again(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(9)))
        first = await h.lease()
        await h.start(*first)
        await h.advance(1.0)
        for lease in first:
            assert await refuse(h, lease) is CompleteDisposition.OK
        stats = (await h.ledger.stats()).services["web"]
        assert stats.lowered == 1, "one flood of refusals is one piece of news"
        assert stats.rate == pytest.approx(0.7)
        assert await h.lease() == [], "what was saved up is gone"
        await h.advance(1.0)
        assert await h.lease() == []
        await h.advance(1.0)
        [again] = await h.lease()
        assert again.action.action_id == act(0), "what was refused goes first, as it was accepted"
        assert (again.delivery, again.attempt) == (2, 1), "a refusal costs no attempt"
        await h.advance(30.0)
        assert (await h.ledger.stats()).services["web"].rate == pytest.approx(1.0)
        await h.heartbeat(again)

    with_ledger(engine, tmp_path, scenario, LIMITS)


def test_the_wait_a_service_asks_for_is_kept_by_everybody(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(9)))
        [lease] = await h.lease(slots=1)
        await h.start(lease)
        assert await refuse(h, lease, wait=7.0) is CompleteDisposition.OK
        assert await refuse(h, lease, wait=9.0) is CompleteDisposition.ALREADY, "repeated (B9)"
        waits = (await h.ledger.stats()).services["web"].waits_seconds
        assert 7.0 <= waits <= 7.0 + 2.0
        await h.advance(6.9)
        await h.enroll(OTHER)
        assert await h.lease(OTHER) == []
        await h.advance(2.0)
        assert len(await h.lease(OTHER)) == 1
        late = [e for e in await h.events() if e.kind is LedgerEventKind.LATE]
        assert late == []

    with_ledger(engine, tmp_path, scenario, LIMITS)


def test_refused_to_the_end_is_a_fault_and_no_observation(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, deliveries_max=2), action(2, effect=Effect.EXTERNAL))
        for lease in await h.lease():
            await h.start(lease)
            assert await refuse(h, lease) is CompleteDisposition.OK
        found = await h.completed()
        assert set(found) == {act(2)}, "an external one may have done something before"
        await h.advance(5.0)
        [lease] = await h.lease()
        await h.start(lease)
        assert await refuse(h, lease) is CompleteDisposition.OK
        found = await h.completed()
        assert set(found) == {act(1), act(2)}
        for result in found.values():
            assert result.status is CompletionStatus.ERROR
            assert result.fault is not None
            assert result.fault.code == "service_busy"
            assert result.observation is None

    with_ledger(engine, tmp_path, scenario, LIMITS)


def test_a_refusal_of_cancelled_work_lets_go_of_it(engine: str, tmp_path: Path) -> None:
    """Otherwise its worker's hands would not be empty for a lease's time."""

    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        [lease] = await h.lease(slots=1)
        await h.start(lease)
        await h.cancel(act(1))
        assert await refuse(h, lease) is CompleteDisposition.STALE
        told = [event.kind for event in await h.events() if event.action_id == act(1)]
        assert told == [LedgerEventKind.COMPLETED, LedgerEventKind.RECLAIMED]
        assert (await h.ledger.stats()).services["web"].lowered == 0

    with_ledger(engine, tmp_path, scenario, LIMITS)


def test_a_refusal_before_the_start_gives_back_no_earlier_attempt(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, effect=Effect.PURE))
        [lease] = await h.lease()
        await h.start(lease)
        await h.release(lease)
        [lease] = await h.lease()
        assert lease.attempt == 2
        assert await refuse(h, lease) is CompleteDisposition.OK
        await h.advance(3.0)
        [lease] = await h.lease()
        assert lease.attempt == 2

    with_ledger(engine, tmp_path, scenario, LIMITS)


def test_without_a_service_a_refusal_is_what_the_tool_said(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        [lease] = await h.lease()
        await h.start(lease)
        assert await refuse(h, lease) is CompleteDisposition.OK
        assert (await h.completed())[act(1)].status is CompletionStatus.OK

    with_ledger(engine, tmp_path, scenario, LedgerLimits())


def test_two_gateways_share_a_bucket(tmp_path: Path) -> None:
    """What one gateway hands out, the other cannot: the bucket lies in a row."""

    async def scenario(h: Harness) -> None:
        second = Harness("postgres", tmp_path, LIMITS)
        second.schema, second.clock = h.schema, h.clock
        await second.open()
        try:
            await h.submit(*(action(n) for n in range(9)))
            assert len(await h.lease(slots=2)) == 2
            assert len(await second.lease(slots=9)) == 1
            assert await h.lease(slots=9) == []
            h.clock.boot += 1.0
            assert len(await second.lease(slots=9)) == 1
        finally:
            await second._close()

    with_ledger("postgres", tmp_path, scenario, LIMITS)


def test_buckets_are_locked_after_partitions(tmp_path: Path) -> None:
    """The other way round two gateways would wait for each other until the server ends one."""

    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(9)))
        [lease] = await h.lease(slots=1)
        await h.start(lease)
        service = h.service
        assert service is not None
        sent: list[str] = []
        names = {text: name for name, text in service.store._sql.items()}
        send = service.store._wire.send

        def record(statement: str, parameters: Sequence[object] = ()) -> Answer:
            sent.append(names.get(statement, statement))
            return send(statement, parameters)

        service.store._wire.send = record  # type: ignore[method-assign]
        done = CompleteRequest(
            worker_id=WORKER,
            completions=(
                Completion(action_id=act(0), fence=lease.fence, status=CompletionStatus.OK),
            ),
        )
        poll = LeaseRequest(worker_id=WORKER, slots={"fast": 1})
        now = h.clock.now()
        service.begin([done, poll], now)
        service.handle(done, now)
        service.settle(now)
        service.expect([poll])
        service.handle(poll, now)
        service.commit()
        assert sent.index("lock_partitions") < sent.index("lock_buckets")
        assert sent.count("lock_partitions") == 1

    with_ledger("postgres", tmp_path, scenario, LIMITS)


def test_after_a_crash_of_the_server_buckets_are_empty(tmp_path: Path) -> None:
    """It may have taken back leases, and what they took, with commits that it had not flushed."""

    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(9)))
        assert len(await h.lease(slots=1)) == 1
        with psycopg.connect(server().url().reveal(), autocommit=True) as db:
            db.execute(f'TRUNCATE "{h.schema}".opened, "{h.schema}".heartbeat'.encode())
        await h.crash()
        assert await h.lease() == []
        await h.advance(1.0)
        assert len(await h.lease()) == 1
        await h.crash()
        await h.advance(2.0)
        assert len(await h.lease()) == 2, "a gateway's own death takes nothing back"

    with_ledger("postgres", tmp_path, scenario, LIMITS)


def test_a_restored_copy_hands_out_no_second_burst(tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(9)))
        assert len(await h.lease(slots=1)) == 1
        store = h.store
        assert store is not None
        copy = tmp_path / "copy.db"
        while store.copy_to(str(copy), 1000)[0]:
            pass
        assert len(await h.lease()) == 2
        mark(copy)
        service = LedgerService(SqliteStore(copy), LIMITS, Durability.POWER_SAFE)
        service.open(h.clock.now(), boot_id="memory", lineage="lin_copy")
        assert service._books.meta.buckets["web"].tokens == 0.0
        service.close()

    with_ledger("sqlite", tmp_path, scenario, LIMITS)


def test_a_clock_that_is_set_back_shuts_no_service_for_good(tmp_path: Path) -> None:
    """Gateways count on the server's wall clock."""

    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(9)))
        assert len(await h.lease()) == 3
        h.clock.boot -= 3600.0
        assert await h.lease() == []
        await h.advance(rates.WAIT_SECONDS_MAX - 1.0)
        assert await h.lease() == [], "an unknown time has passed: rather too long than too short"
        await h.advance(2.0)
        assert len(await h.lease()) == 1

    with_ledger("postgres", tmp_path, scenario, LIMITS)


@pytest.mark.parametrize(
    ("services", "classes", "said"),
    [
        ({"web": LIMIT}, {"fast": "web", "slow": "web"}, None),
        ({"web": LIMIT, "db": LIMIT}, {"fast": "web", "slow": "web", "free": "db"}, None),
        ({}, {}, "there it uses None"),
        ({"web": ServiceRate(rate=9.0, burst=3)}, dict(LIMITS.class_services), "at 9 a second"),
    ],
)
def test_a_shared_ledger_with_other_rates_is_refused_and_not_silently_used(
    services: dict[str, ServiceRate], classes: dict[str, str], said: str | None
) -> None:
    offered = Capabilities(
        engine="sqlite",
        durability=Durability.POWER_SAFE,
        value_bytes_max=1,
        limits=LedgerLimits(services=services, class_services=classes),
        lineage="lin_1",
    )
    if said is None:
        refuse_other(offered, LIMITS, Durability.POWER_SAFE, Path("pool"))
        return
    with pytest.raises(ConfigInvalid, match="other rates of remote services") as caught:
        refuse_other(offered, LIMITS, Durability.POWER_SAFE, Path("pool"))
    assert said in caught.value.message


moves = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.sampled_from([0.01, 0.4, 1.0, 3.0, 9.0])),
        st.tuples(st.just("lease"), st.integers(1, 5)),
        st.tuples(st.just("refuse"), st.sampled_from([0.0, 2.0, 10**9])),
        st.tuples(st.just("crash"), st.just(0)),
    ),
    max_size=40,
)


@given(moves=moves)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_span_of_time_sees_more_than_burst_plus_rate(
    moves: list[tuple[str, float]],
) -> None:
    """Whatever is refused, or crashes: and after a refusal with a wait nobody asks before it ends.

    What the bucket is believed to hold is never looked at: only when actions went out.
    """

    async def scenario(h: Harness) -> None:
        went: list[float] = []
        until = 0.0
        out: list[Lease] = []
        await h.submit(*(action(n, deliveries_max=10**6) for n in range(100)))
        for move, amount in moves:
            if move == "pass":
                await h.advance(amount)
                await h.heartbeat(*out)
            elif move == "crash":
                await h.crash()
            elif move == "refuse" and out:
                if await refuse(h, out.pop(), wait=amount) is CompleteDisposition.OK:
                    until = max(until, h.clock.boot + min(amount, rates.WAIT_SECONDS_MAX))
            elif move == "lease":
                got = await h.lease(slots=int(amount))
                assert not got or h.clock.boot >= until - NEARLY
                await h.start(*got)
                out += got
                went += [h.clock.boot] * len(got)
        for n, begin in enumerate(went):
            for m, end in enumerate(went[n:], 1):
                assert m <= LIMIT.burst + LIMIT.rate * (end - begin) + NEARLY

    with TemporaryDirectory() as place:
        with_ledger("memory", Path(place), scenario, LIMITS)


@given(
    rate=st.floats(0.01, 500.0),
    share=st.floats(0.01, 1.0),
    tokens=st.floats(0.0, 3.0),
    later=st.floats(0.0, 200.0),
)
def test_a_token_is_there_when_it_is_said_to_be_due_and_not_much_sooner(
    rate: float, share: float, tokens: float, later: float
) -> None:
    limit = ServiceRate(rate=rate, burst=3)
    bucket = rates.Bucket(at=100.0, tokens=tokens, rate=rate * share)
    now = 100.0 + later
    at = rates.due(bucket, limit, now)
    assert at >= now or rates.room(bucket, limit, now) >= 1
    assert rates.room(bucket, limit, at + 1e-5 / rate + 1e-9) >= 1
    if at > now:
        assert rates.room(bucket, limit, now) == 0
        assert rates.room(bucket, limit, at - (at - now) * 0.01) == 0
    # The way there makes no difference: one step or two.
    once, twice = (
        rates.moved(bucket, limit, now),
        rates.moved(rates.moved(bucket, limit, 100.0 + later / 3), limit, now),
    )
    assert once.rate == pytest.approx(twice.rate)
    assert once.tokens == pytest.approx(twice.tokens, abs=1e-6 * max(1.0, rate))
