"""Groups of a whole run inside its trainer: delivery, commit, back-pressure, restore."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker
from stoker.coordinator.group_keeper import GroupKeeper
from stoker.coordinator.groups import STRAGGLER
from stoker.coordinator.request import Changed
from stoker.errors import DeliveryUnknown, GroupMixed, StateRefused
from stoker.training.groups import Group
from support.command import wait_until_quiet
from support.postgres import drop_schema, fresh_schema, server
from support.training import Engine, Looks, lay_out, model_of, request

SECONDS = 60


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    wait_until_quiet(tmp_path)


async def next_of(groups: object) -> Group:
    async with asyncio.timeout(SECONDS):
        return await anext(groups)  # type: ignore[call-overload,no-any-return]


async def rest(run: stoker.Run, *, commit: bool = False) -> list[Group]:
    """Read to the end."""
    found = []
    async with asyncio.timeout(SECONDS):
        async for group in run.groups():
            found.append(group)
            if commit:
                await run.commit(group)
    return found


def test_groups_come_whole_with_typed_outcomes_and_rows(place: Path) -> None:
    lay_out(place, ["a", "b", "c"])
    engine = Engine()
    engine.says = {("b", 1): "fault"}

    async def trainer() -> None:
        asked = request(place, "run.group_size=3")
        async with stoker.start_run(asked, model=model_of(engine)) as run:
            groups = await rest(run, commit=True)
        assert run.report is not None
        assert not run.report.resumable
        assert sorted(group.task.task_id for group in groups) == ["a", "b", "c"]
        for group in groups:
            assert [one.index for one in group.rollouts] == [0, 1, 2]
            assert (group.redelivered, group.abandoned, group.left_over) == (0, (), ())
            for one in group.rollouts:
                (row,) = one.rows
                assert row.token_ids.tolist() == [1, 2, 3, 4]
                assert list(row.mask) == [0, 0, 1, 1]
                assert (row.reward is not None) == (row.outcome == "completed")
        kinds = {
            group.task.task_id: sorted(one.outcome.kind for one in group.rollouts)
            for group in groups
        }
        assert kinds["a"] == ["completed"] * 3
        assert kinds["b"] == ["completed", "completed", "failed"]
        rewards = [one.reward for group in groups for one in group.rollouts]
        assert sorted(map(str, rewards)) == ["2.0"] * 8 + ["None"], "a fault has no reward"

    asyncio.run(trainer())


def test_what_is_not_committed_comes_again_in_the_order_it_was_handed_out(place: Path) -> None:
    lay_out(place, ["a", "b", "c", "d"])

    async def first() -> list[str]:
        async with stoker.start_run(request(place, run="r"), model=model_of(Engine())) as run:
            taken = await rest(run)
            assert len(taken) == 4
            await run.commit(taken[1])
            await run.commit(taken[1].delivery)  # twice is harmless
            again = await rest(run)
            assert [one.group_id for one in again] == [
                one.group_id for one in taken if one is not taken[1]
            ]
            assert [one.redelivered for one in again] == [1, 1, 1]
            with pytest.raises(DeliveryUnknown, match="handed out again"):
                await run.commit(taken[0])
            for bad in ("grp_x.1", "nothing"):
                with pytest.raises(DeliveryUnknown):
                    await run.commit(bad)
            return [one.group_id for one in again]

    async def second(left: list[str]) -> None:
        async with stoker.start_run(request(place, run="r"), model=model_of(Engine())) as run:
            again = await rest(run, commit=True)
            assert [one.group_id for one in again] == left
            assert [one.redelivered for one in again] == [2, 2, 2]
            assert await rest(run) == []

    left = asyncio.run(first())
    asyncio.run(second(left))


def test_a_trainer_that_pauses_bounds_what_is_begun_and_goes_on_when_it_reads(place: Path) -> None:
    count, unread, active = 30, 3, 4
    lay_out(place, [f"t{number:02}" for number in range(count)])
    looks = Looks()

    async def trainer() -> None:
        asked = request(
            place,
            "run.group_size=2",
            f"training.unread_max={unread}",
            "admission.mode=fixed",
            f"admission.active_max={active}",
        )
        async with stoker.start_run(asked, model=model_of(Engine()), observer=looks) as run:
            paused = await looks.until(lambda one: bool(one.outcomes), looks=4)
            assert paused.rollouts_active == 0, "whatever was begun has ended"
            assert paused.state == "running"
            assert "trainer" in paused.held
            # The last group begun with room for it; each other active rollout may be another's.
            most = 2 * (unread - 1 + active)
            assert 2 * unread <= sum(paused.outcomes.values()) <= most
            groups = run.groups()
            seen = [await next_of(groups) for _ in range(active)]
            more = await looks.until(lambda one: bool(one.outcomes), looks=4)
            assert sum(paused.outcomes.values()) < sum(more.outcomes.values()) <= most + 2 * active
            seen += [one async for one in groups]
            assert len({one.group_id for one in seen}) == len(seen) == count

    asyncio.run(trainer())


def test_c9_a_group_is_complete_without_its_stragglers_and_says_what_that_costs(
    place: Path,
) -> None:
    lay_out(place, ["a"], turns=2)

    async def first() -> None:
        engine = Engine(gated=True)
        looks = Looks()
        asked = request(place, "run.group_size=2", "run.spare=2", run="r")
        async with stoker.start_run(asked, model=model_of(engine), observer=looks) as run:
            waiting = await engine.until(4)
            hangs, never = waiting[2].split("/")[0], waiting[3].split("/")[0]
            for call in waiting[:3]:  # one hangs in its second turn, one in its first
                engine.gates[call].set()
            await engine.until_turns(3 + 1)
            for call in list(engine.gates):
                if call.split("/")[0] not in {hangs, never}:
                    engine.gates[call].set()
            (group,) = await rest(run)
            assert {one.outcome.kind for one in group.rollouts} == {"completed"}
            assert len(group.rollouts) == 2
            assert {one.rollout_id for one in group.left_over} == {hangs, never}
            for one in group.left_over:
                assert (one.outcome.kind, one.reward, one.rows) == ("cancelled", None, ())
                assert one.outcome.reason == STRAGGLER
            assert not engine.gates, "their calls are taken back"
            bias = run.length_bias()
            assert (bias.groups, bias.kept, bias.kept_tokens) == (1, 2, 8)
            assert (bias.cut, bias.cut_tokens) == (2, 2)
        assert run.report is not None
        assert not run.report.resumable
        assert run.report.snapshot.stragglers == bias
        assert run.report.snapshot.outcomes == {"completed": 2, "cancelled": 2}

    async def second() -> None:
        asked = request(place, "run.group_size=2", "run.spare=2", run="r")
        async with stoker.start_run(asked, model=model_of(Engine())) as run:
            (group,) = await rest(run, commit=True)
            assert (len(group.rollouts), len(group.left_over)) == (2, 2)

    asyncio.run(first())
    asyncio.run(second())


def test_stragglers_left_by_a_killed_coordinator_are_cut_off_by_the_next(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(place, ["a"])
    sets = ("run.group_size=2", "run.spare=1")

    async def first() -> None:
        engine, looks = Engine(gated=True), Looks()
        asked = request(place, *sets, run="r")
        async with stoker.start_run(asked, model=model_of(engine), observer=looks):
            for call in (await engine.until(3))[:2]:
                engine.gates[call].set()
            await looks.until(lambda one: one.outcomes == {"completed": 2})

    async def second() -> None:
        engine = Engine(gated=True)
        asked = request(place, *sets, run="r")
        async with stoker.start_run(asked, model=model_of(engine)) as run:
            (group,) = await rest(run)
            assert [one.outcome.kind for one in group.rollouts] == ["completed"] * 2
            assert [one.outcome.reason for one in group.left_over] == [STRAGGLER]
        assert run.report is not None
        assert not run.report.resumable

    with monkeypatch.context() as killed:  # as it dies before the turn of the loop that cuts
        killed.setattr(GroupKeeper, "_cut_stragglers", lambda _: None)
        asyncio.run(first())
    asyncio.run(second())


def test_spares_that_were_not_begun_never_are_once_their_group_is_complete(place: Path) -> None:
    lay_out(place, ["a", "b"])

    async def trainer() -> None:
        engine = Engine()
        sets = ("run.group_size=2", "run.spare=1", "admission.mode=fixed", "admission.active_max=1")
        async with stoker.start_run(request(place, *sets), model=model_of(engine)) as run:
            groups = await rest(run, commit=True)
            assert [len(group.rollouts) for group in groups] == [2, 2]
            assert [len(group.left_over) for group in groups] == [0, 0]
        assert len(engine.asked) == 4
        assert run.report is not None
        assert run.report.snapshot.state == "finished"

    asyncio.run(trainer())


def test_a_mixed_group_is_refused_until_told(place: Path) -> None:
    lay_out(place, ["a"])

    async def first() -> None:
        engine = Engine(gated=True)
        asked = request(place, "run.group_size=2", run="r")
        looks = Looks()
        async with stoker.start_run(asked, model=model_of(engine), observer=looks):
            one, _ = await engine.until(2)
            engine.gates[one].set()
            await looks.until(lambda one: sum(one.outcomes.values()) == 1)

    async def second() -> None:
        program = place / "program.py"
        program.write_text(program.read_text() + "# changed\n")
        asked = request(place, "run.group_size=2", run="r", changed=Changed.RESTART)
        async with stoker.start_run(asked, model=model_of(Engine())) as run:
            with pytest.raises(GroupMixed, match="program short is"):
                await rest(run)
            (group,) = [one async for one in run.groups(mixed=True)]
            assert len(group.mixed) == 1
            digests = {one.rows[0].program_digest for one in group.rollouts}
            assert len(digests) == 2
            await run.commit(group)

    asyncio.run(first())
    asyncio.run(second())


def test_a_restored_state_brings_back_what_was_committed_after_it(place: Path) -> None:
    lay_out(place, ["a", "b", "c"])

    async def first() -> tuple[dict[str, object], list[Group]]:
        async with stoker.start_run(request(place, run="r"), model=model_of(Engine())) as run:
            taken = await rest(run)
            await run.commit(taken[0])
            state = run.state()
            await run.commit(taken[1])
            return json.loads(json.dumps(state)), taken

    async def second(state: dict[str, object], taken: list[Group]) -> None:
        async with stoker.start_run(request(place, run="r"), model=model_of(Engine())) as run:
            newest = run.state()
            await run.restore(state)
            again = await rest(run)
            assert [one.group_id for one in again] == [one.group_id for one in taken[1:]]
            assert [one.redelivered for one in again] == [1, 1]
            with pytest.raises(DeliveryUnknown):
                await run.commit(taken[1])
            await run.commit(again[0])
            await run.restore(newest)  # of the line that was left: its commits hold again
            assert [one.group_id for one in await rest(run)] == [taken[2].group_id]
            for changed, why in (
                ({"run": "another"}, "another"),
                ({"position": 99}, "covers 99 events"),
                ({"digest": "0"}, "or others"),
                ({"position": "x"}, "no state"),
            ):
                with pytest.raises(StateRefused, match=why):
                    await run.restore({**state, **changed})

    state, taken = asyncio.run(first())
    assert len(json.dumps(state)) < 200, "it does not grow with the run"
    asyncio.run(second(state, taken))


@pytest.mark.slow
def test_deliveries_on_postgres_are_kept_as_on_sqlite(place: Path) -> None:
    lay_out(place, ["a", "b"])
    schema, at = fresh_schema(), server("on")
    ledger = [f"ledger.url={at.url().reveal()}", f"ledger.db_schema={schema}"]

    async def first() -> dict[str, object]:
        asked = request(place, *ledger, run="r")
        async with stoker.start_run(asked, model=model_of(Engine())) as run:
            state = run.state()
            one, _ = await rest(run)
            await run.commit(one)
            await run.publish_policy(1)
            return state

    async def second(state: dict[str, object]) -> None:
        asked = request(place, *ledger, run="r")
        async with stoker.start_run(asked, model=model_of(Engine())) as run:
            assert run.policy_version == 1
            assert [one.redelivered for one in await rest(run)] == [1]
            await run.restore(state)
            assert [one.redelivered for one in await rest(run, commit=True)] == [1, 2]
            assert run.policy_version is None

    try:
        asyncio.run(second(asyncio.run(first())))
    finally:
        wait_until_quiet(place)
        drop_schema(at, schema)
