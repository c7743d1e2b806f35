"""Each case of the hand-off (CASES B) has a test on SQLite and on PostgreSQL, some of them here."""

from itertools import pairwise
from pathlib import Path

import pytest

from stoker.broker.base import (
    CompleteDisposition,
    DeadLettersRequest,
    HoldVerdict,
    LedgerEventKind,
    LedgerLimits,
)
from stoker.model.action import Effect
from stoker.model.completion import CompletionStatus
from stoker.model.ids import WorkerId
from stoker.testing.ledger_contract import CASES
from support.ledger import ENGINES, RUN, Harness, act, action, with_ledger

TESTS = Path(__file__).resolve().parents[1]
Names = tuple[str, ...]
INDEX: dict[str, tuple[Names, Names]] = {
    # case: (what shows all of it on SQLite, what does so on PostgreSQL)
    "B1": (
        (
            "test_b1_lost_before_started_is_requeued_without_spending_an_attempt",
            "test_b1_lost_after_started_is_decided_by_effect",
            "test_b1_completed_but_the_reply_was_lost",
        ),
    )
    * 2,
    "B2": (
        ("test_b2_a_stopped_worker_comes_back_to_a_stale_result_and_a_clean_state",),
        ("test_b2_a_result_after_its_lease_is_stale_recorded_and_not_applied",),
    ),
    "B3": (
        ("test_b3_work_that_holds_the_interpreter_for_ten_leases_keeps_its_lease",),
        ("test_b3_heartbeats_of_ten_leases_keep_one_lease",),
    ),
    "B4": (
        ("test_b4_killed_run_equals_one_left_alone",),
        ("test_b4_a_run_on_postgres_whose_every_party_is_killed_goes_on",),
    ),
    "B5": (("test_b5_results_wait_for_the_next_coordinator_and_are_applied_once",),) * 2,
    "B6": (
        ("test_b6_the_owner_killed_at_every_point_keeps_what_it_promised",),
        ("test_a_gateway_killed_at_every_point_keeps_what_it_promised",),
    ),
    "B7": (("test_b7_the_newer_coordinator_fences_the_older",),) * 2,
    "B8": (("test_b8_cancel_reaches_each_state_once",),) * 2,
    "B9": (("test_b9_one_completion_three_times_and_an_older_one_is_applied_once",),) * 2,
    "B10": (("test_b10_a_poison_ends_as_a_dead_letter_and_its_workers_class_recovers",),) * 2,
    "B11": (("test_b11_wall_jumps_change_nothing",),) * 2,
    "B12": (
        ("test_b12_a_full_disk_rejects_the_group_and_the_owner_goes_on",),
        ("test_b12_a_full_disk_of_the_server_rejects_the_group_and_the_gateway_goes_on",),
    ),
    "B13": (
        (
            "test_b13_depth_changes_neither_order_nor_counts",
            "test_b13_admission_holds_while_work_is_parked_over_a_cap",  # whatever the engine
        ),
        ("test_b13_depth_changes_neither_order_nor_counts",),
    ),
    "B14": (
        (
            "test_b14_bad_frames_close_their_connection_with_a_typed_error_and_the_owner_lives",
            "test_b14_replayed_frames_are_answered_and_applied_once",
            "test_b14_a_foreign_user_is_refused",  # a gateway answers by the same server
            "test_whoever_has_no_key_is_not_let_in",  # over TCP, in front of either
        ),
        ("test_b14_bad_frames_close_their_connection_and_the_gateway_lives",),
    ),
    "B15": (("test_b15_large_content_stays_out_of_the_row",),) * 2,
    "B16": (
        (
            "test_b16_an_external_start_is_synced_and_ambiguous_after_its_worker",
            "test_every_image_of_a_cut_holds_what_was_replied_and_nothing_by_halves",
        ),
        (
            "test_b16_an_external_start_is_synced_and_ambiguous_after_its_worker",
            "test_promises_hold_on_postgres_under_crashes_of_the_server",
        ),
    ),
    "B18": (("test_b18_one_poison_among_innocents_costs_them_no_attempt",),) * 2,
    "B19": (
        (
            "test_b19_results_are_applied_one_by_one_while_the_lane_is_paused",
            "test_b19_cancel_release_and_acknowledge_pass_every_cap",
        ),
    )
    * 2,
}
LEASE = LedgerLimits().lease_seconds


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_case_has_its_test_on_both_engines() -> None:
    modules = [path.read_text("utf-8") for path in TESTS.rglob("test_*.py")]
    for case, (on_sqlite, on_postgres) in INDEX.items():
        for name in {*on_sqlite, *on_postgres}:
            [home] = [text for text in modules if f"def {name}(" in text]
            every_engine = f"def {name}(\n    engine: str" in home or f"def {name}(engine" in home
            if every_engine:
                assert "@pytest.fixture(params=ENGINES)" in home, f"{case}: {name}"
            elif name in on_postgres:
                assert "from support.postgres import" in home, f"{case}: {name} needs no server"
    assert {"sqlite", "postgres"} <= set(ENGINES)
    assert len(CASES) > 10, "the contract itself runs on every engine"


def test_b2_a_result_after_its_lease_is_stale_recorded_and_not_applied(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        [stopped] = await h.lease()
        await h.start(stopped)
        other = WorkerId("wrk_2")
        await h.enroll(other)
        await h.advance(LEASE * 2)
        [again] = await h.lease(other)
        assert again.fence > stopped.fence
        assert await h.complete(stopped) == [CompleteDisposition.STALE]
        assert await h.completed() == {}, "nothing is applied"
        assert await h.complete(again, worker=other) == [CompleteDisposition.OK]
        late = [e for e in await h.events() if e.kind is LedgerEventKind.LATE]
        assert [one.action_id for one in late] == [act(1)], "and it is recorded"
        assert list(await h.completed()) == [act(1)]

    with_ledger(engine, tmp_path, scenario)


def test_b3_heartbeats_of_ten_leases_keep_one_lease(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        [lease] = await h.lease()
        await h.start(lease)
        await h.enroll(WorkerId("wrk_2"))
        for _ in range(20):
            await h.advance(LEASE / 2)
            assert await h.heartbeat(lease) == [HoldVerdict.OK]
            assert await h.lease(WorkerId("wrk_2")) == []
        assert await h.complete(lease) == [CompleteDisposition.OK]
        [done] = (await h.completed()).values()
        assert done.attempt == 1

    with_ledger(engine, tmp_path, scenario)


def test_b5_results_wait_for_the_next_coordinator_and_are_applied_once(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        leases = await h.lease()
        await h.crash()
        await h.complete(*leases)
        await h.attach("coordinator-2")
        assert set(await h.completed()) == {act(1), act(2)}
        await h.acknowledge(act(1))
        await h.crash()
        await h.attach("coordinator-3")
        assert set(await h.completed()) == {act(2)}, "what was applied is not told again"

    with_ledger(engine, tmp_path, scenario)


def test_b8_cancel_reaches_each_state_once(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(*(action(n) for n in range(4)))
        leased, running, done = await h.lease(slots=3)
        await h.start(running, done)
        await h.complete(done)
        said = await h.cancel(*(act(n) for n in range(4)))
        told = await h.heartbeat(leased, running)
        assert told == [HoldVerdict.CANCEL] * 2, "whoever has it is told to stop"
        assert [str(d) for d in said.dispositions.values()].count("cancelled") == 3
        assert str(said.dispositions[done.action.action_id]) == "too_late"
        assert await h.complete(running, leased) == [CompleteDisposition.STALE] * 2
        late = [e for e in await h.events() if e.kind is LedgerEventKind.LATE]
        assert sorted(e.action_id for e in late) == [act(0), act(1)]
        assert all("discarded: ok" in e.detail for e in late), "recorded with its disposition"
        kept = {i: r.status for i, r in (await h.completed()).items()}
        assert kept.pop(done.action.action_id) is CompletionStatus.OK
        assert set(kept.values()) == {CompletionStatus.CANCELLED}, "and nothing was changed by it"
        fast = (await h.ledger.stats()).classes["fast"]
        assert (fast.queued, fast.leased, fast.started) == (0, 0, 0)

    with_ledger(engine, tmp_path, scenario)


def test_b9_one_completion_three_times_and_an_older_one_is_applied_once(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        [old] = await h.lease()
        await h.release(old)
        [lease] = await h.lease()
        said = [*await h.complete(lease), *await h.complete(old), *await h.complete(lease)]
        await h.crash()
        said += await h.complete(lease)
        assert [str(one) for one in said] == ["ok", "stale", "already", "already"]
        assert list(await h.completed()) == [act(1)]

    with_ledger(engine, tmp_path, scenario)


def test_b10_a_poison_ends_as_a_dead_letter_and_its_workers_class_recovers(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1, attempts_max=2), action(2))
        for turn in range(2):
            worker = WorkerId(f"wrk_p{turn}")
            await h.enroll(worker)
            [poison] = await h.lease(worker, slots=1)
            assert poison.action.action_id == act(1)
            await h.start(poison, worker=worker)
            await h.enroll(WorkerId(f"{worker}x"), replaces=worker)
        [dead] = (await h.ledger.dead_letters(DeadLettersRequest(run_id=RUN))).actions
        assert (dead.action.action_id, len(dead.causes)) == (act(1), 2)
        await h.complete(*await h.lease())
        statuses = {i: r.status for i, r in (await h.completed()).items()}
        assert statuses == {act(1): CompletionStatus.DEAD, act(2): CompletionStatus.OK}

    with_ledger(engine, tmp_path, scenario)


def test_b16_an_external_start_is_synced_and_ambiguous_after_its_worker(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2, effect=Effect.EXTERNAL))
        plain, external = await h.lease()
        syncs = [(await h.ledger.stats()).syncs_total]
        for lease in (plain, external):
            await h.start(lease)
            syncs.append((await h.ledger.stats()).syncs_total)
        assert [after - before for before, after in pairwise(syncs)] == [0, 1]
        await h.crash()
        await h.enroll(WorkerId("wrk_2"), replaces=WorkerId("wrk_1"))
        [again] = await h.lease(WorkerId("wrk_2"))
        assert again.action.action_id == act(1)
        assert (await h.completed())[act(2)].status is CompletionStatus.AMBIGUOUS

    with_ledger(engine, tmp_path, scenario)
