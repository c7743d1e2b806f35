"""Each case of the hand-off (CASES B) has a test that runs on SQLite, some of them here."""

from pathlib import Path

import pytest

from stoker.broker.base import CompleteDisposition, DeadLettersRequest, LedgerEventKind
from stoker.model.action import Effect
from stoker.model.completion import CompletionStatus
from stoker.model.ids import WorkerId
from stoker.testing.ledger_contract import CASES
from support.ledger import ENGINES, RUN, Harness, act, action, with_ledger

TESTS = Path(__file__).resolve().parents[1]
INDEX = {
    "B1": "test_b1_lost_after_started_is_decided_by_effect",
    "B2": "test_b2_a_stopped_worker_comes_back_to_a_stale_result_and_a_clean_state",
    "B3": "test_b3_work_that_holds_the_interpreter_for_ten_leases_keeps_its_lease",
    "B4": "test_b4_killed_run_equals_one_left_alone",
    "B5": "test_b5_results_wait_for_the_next_coordinator_and_are_applied_once",
    "B6": "test_b6_the_owner_killed_at_every_point_keeps_what_it_promised",
    "B7": "test_b7_the_newer_coordinator_fences_the_older",
    "B8": "test_b8_cancel_reaches_each_state_once",
    "B9": "test_b9_one_completion_three_times_and_an_older_one_is_applied_once",
    "B10": "test_b10_a_poison_ends_as_a_dead_letter_and_its_workers_class_recovers",
    "B11": "test_b11_wall_jumps_change_nothing",
    "B12": "test_b12_a_full_disk_rejects_the_group_and_the_owner_goes_on",
    "B13": "test_b13_depth_changes_neither_order_nor_counts",
    "B14": "test_b14_bad_frames_close_their_connection_with_a_typed_error_and_the_owner_lives",
    "B15": "test_b15_large_content_stays_out_of_the_row",
    "B16": "test_b16_the_start_of_an_external_action_is_synced_before_its_reply",
    "B18": "test_b18_one_poison_among_innocents_costs_them_no_attempt",
    "B19": "test_b19_cancel_release_and_acknowledge_pass_every_cap",
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_case_has_its_test() -> None:
    written = "\n".join(path.read_text("utf-8") for path in TESTS.rglob("test_*.py"))
    assert [case for case, name in INDEX.items() if f"def {name}" not in written] == []
    assert "sqlite" in ENGINES
    assert len(CASES) > 10, "the contract itself runs on every engine"


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
        assert [str(d) for d in said.dispositions.values()].count("cancelled") == 3
        assert str(said.dispositions[done.action.action_id]) == "too_late"
        assert await h.complete(running, leased) == [CompleteDisposition.STALE] * 2
        late = [e for e in await h.events() if e.kind is LedgerEventKind.LATE]
        assert len(late) == 2, "each recorded with its disposition"
        assert (await h.ledger.stats()).classes["fast"].queued == 0

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


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
def test_b16_an_external_start_is_synced_and_ambiguous_after_its_worker(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(h: Harness) -> None:
        assert h.store is not None
        await h.submit(action(1), action(2, effect=Effect.EXTERNAL))
        plain, external = await h.lease()
        before = h.store.syncs
        await h.start(plain)
        between = h.store.syncs
        await h.start(external)
        assert (between - before, h.store.syncs - between) == (0, 1)
        await h.crash()
        await h.enroll(WorkerId("wrk_2"), replaces=WorkerId("wrk_1"))
        [again] = await h.lease(WorkerId("wrk_2"))
        assert again.action.action_id == act(1)
        assert (await h.completed())[act(2)].status is CompletionStatus.AMBIGUOUS

    with_ledger(engine, tmp_path, scenario)
