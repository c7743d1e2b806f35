import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from stoker.broker.base import LedgerEventKind
from stoker.errors import (
    LedgerRefused,
    LedgerStorageFailed,
    LedgerUnavailable,
    RunOwned,
    StokerError,
)
from stoker.model.action import ActionState, Effect
from stoker.model.completion import CompletionStatus, EnvironmentState
from stoker.model.tools import CallResult, RunRequest, RunResult
from stoker.testing.boxes import MemoryBox
from stoker.testing.virtual_clock import run_virtual
from stoker.worker.figures import WorkerFigures
from stoker.worker.home import WorkerHome
from support.worker_world import LEASE, World


def play(
    directory: Path,
    scenario: Callable[[World], Awaitable[None]],
    slots: dict[str, int] | None = None,
) -> None:
    async def whole() -> None:
        async with World(directory, slots) as world:
            await scenario(world)

    run_virtual(whole())


async def until(condition: Callable[[], bool], *, within: float = 120.0) -> None:
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.01)


def test_an_action_is_leased_run_and_reported(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        action = world.program("echo", "hi")
        await world.submit(action)
        done = await world.completion(action)
        assert done.status is CompletionStatus.OK
        assert done.attempt == 1
        assert done.worker_id == world.home.worker_id
        assert done.observation is not None
        assert done.observation.inline is not None
        result = msgspec.msgpack.decode(done.observation.inline, type=CallResult)
        assert result.run is not None
        assert result.run.stdout.kept == b"hi\n"

    play(tmp_path, scenario)


def test_a24_polls_never_ask_for_more_than_the_free_slots(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        actions = [world.program("sleep", "1", path=str(n)) for n in range(128)]
        await world.submit(*actions)
        busy = 0
        for action in actions:
            await world.completion(action)
            busy = max(busy, world.worker.figures().classes["fast"].busy)
        assert max(sum(request.slots.values()) for request in world.ledger.leases) <= 4
        assert len(world.backend.made) == 128
        await until(lambda: world.worker.figures().classes["fast"].finished == 128)
        figures = world.worker.figures()
        assert figures.classes["fast"].busy_share > 0.5
        # 128 seconds of work on four slots: nearly no slot ever stood empty.
        assert world.clock.monotonic() < 128 / 4 * 1.2

    play(tmp_path, scenario, {"fast": 4})


def test_a24_a_class_whose_jobs_all_hang_takes_no_slot_of_another(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        hanging = [
            world.program("hang", path=f"h{n}", worker_class="slow", timeout_seconds=1000.0,
                          deadline_seconds=2000.0)
            for n in range(20)
        ]  # fmt: skip
        await world.submit(*hanging)
        quick = [world.program("sleep", "0.1", path=f"q{n}") for n in range(100)]
        await world.submit(*quick)
        for action in quick:
            assert (await world.completion(action)).status is CompletionStatus.OK
        assert world.clock.monotonic() < 100 * 0.1 / 2 * 1.2
        assert world.worker.figures().classes["slow"].busy == 3

    play(tmp_path, scenario, {"fast": 2, "slow": 3})


def test_actions_of_one_environment_are_serial_and_in_order(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        opening = world.opening()
        await world.submit(opening)
        await world.completion(opening)
        steps = [world.running("write", "f", str(n), path=f"w{n}") for n in range(5)]
        slow = world.running("sleep", "3")
        last = world.running("cat", "f")
        await world.submit(slow, *steps, last)
        done = await world.completion(last)  # MemoryBox asserts that no two overlap
        assert done.observation is not None
        assert done.observation.inline is not None
        seen = msgspec.msgpack.decode(done.observation.inline, type=RunResult)
        assert seen.stdout.kept == b"4"
        assert done.environment is EnvironmentState.CLEAN

    play(tmp_path, scenario, {"fast": 8})


def test_b8_cancel_kills_the_box_at_once_and_is_reported_as_reclaimed(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        action = world.program("hang", timeout_seconds=500.0, deadline_seconds=900.0)
        # Both slots are taken: the cancel must arrive although no poll asks for work.
        other = world.program("hang", path="o", timeout_seconds=500.0, deadline_seconds=900.0)
        await world.submit(action, other)
        await until(lambda: len(world.backend.made) == 2)
        at = world.clock.monotonic()
        await world.cancel(action)
        done = await world.completion(action)
        assert done.status is CompletionStatus.CANCELLED
        await world.event(
            lambda e: e.kind is LedgerEventKind.RECLAIMED and e.action_id == action.action_id
        )
        assert world.clock.monotonic() - at < 0.5, "pushed, not found by the next heartbeat"
        await until(lambda: sum(box.killed for box in world.backend.made) == 1)
        await until(lambda: len(world.backend.boxes) == 1)

    play(tmp_path, scenario)


def test_b3_work_of_ten_leases_keeps_its_lease(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        action = world.program(
            "sleep", str(10 * LEASE), timeout_seconds=500.0, deadline_seconds=900.0
        )
        await world.submit(action)
        done = await world.completion(action)
        assert (done.status, done.attempt) == (CompletionStatus.OK, 1)
        assert (await world.view(action)).deliveries == 1
        gaps = [b - a for a, b in zip(world.ledger.beats, world.ledger.beats[1:], strict=False)]
        assert max(gaps) <= LEASE / 3 + 0.01

    play(tmp_path, scenario)


def test_out_of_contact_for_two_thirds_of_a_lease_kills_own_boxes_first(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        opening = world.opening()
        await world.submit(opening)
        await world.completion(opening)
        action = world.program("hang", timeout_seconds=500.0, deadline_seconds=900.0)
        await world.submit(action)
        await until(lambda: len(world.backend.made) == 2)
        first = world.home.worker_id
        at = world.clock.monotonic()
        world.ledger.cut = True
        await until(lambda: not world.backend.boxes)
        silent = world.clock.monotonic() - at
        assert silent < LEASE, "dead before anybody else may begin"
        assert silent > LEASE / 3
        assert world.backend.made[1].killed == 1
        assert len(world.environments) == 0
        assert world.worker.figures().fenced == 1
        world.ledger.cut = False
        await until(lambda: len(world.ledger.enrolled) == 2)
        assert world.ledger.enrolled[1].replaces == first
        assert world.ledger.enrolled[1].worker_id != first
        lost = world.running("echo", "x", path="after")
        await world.submit(msgspec.structs.replace(lost, holder=first))
        ended = await world.completion(lost)
        assert ended.environment is EnvironmentState.LOST

    play(tmp_path, scenario)


def test_a_short_cut_costs_nothing(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        action = world.program("sleep", "30", timeout_seconds=500.0, deadline_seconds=900.0)
        await world.submit(action)
        await until(lambda: len(world.backend.made) == 1)
        world.ledger.cut = True
        await asyncio.sleep(LEASE / 4)
        world.ledger.cut = False
        done = await world.completion(action)
        assert (done.status, done.attempt) == (CompletionStatus.OK, 1)
        assert world.worker.figures().fenced == 0

    play(tmp_path, scenario)


def test_b5_a_result_earned_while_the_ledger_was_away_is_handed_in(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        action = world.program(
            "sleep", "1", effect=Effect.EXTERNAL, timeout_seconds=50.0, deadline_seconds=90.0
        )
        await world.submit(action)
        await until(lambda: len(world.backend.made) == 1)
        world.ledger.cut = True
        await asyncio.sleep(LEASE * 0.9)  # fenced by now, and its lease not yet over
        world.ledger.cut = False
        done = await world.completion(action)
        assert done.status is CompletionStatus.OK, "not ambiguous: the result was never lost"

    play(tmp_path, scenario)


def test_b2_a_result_after_the_lease_is_stale_and_the_work_is_somebody_elses(
    tmp_path: Path,
) -> None:
    async def scenario(world: World) -> None:
        action = world.program("sleep", "1", effect=Effect.PURE)
        await world.submit(action)
        await until(lambda: len(world.backend.made) == 1)
        world.ledger.cut = True
        await asyncio.sleep(LEASE * 2)
        world.ledger.cut = False
        done = await world.completion(action)
        assert (done.status, done.attempt) == (CompletionStatus.OK, 2)
        assert done.worker_id == world.home.worker_id
        late = await world.event(lambda e: e.kind is LedgerEventKind.LATE)
        assert late.action_id == action.action_id
        await until(lambda: world.worker.figures().stale == 1)

    play(tmp_path, scenario)


def test_b2_an_old_ok_does_not_begin_work(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        delays = [LEASE * 0.9, 0.0]

        async def slowly() -> None:
            await asyncio.sleep(delays.pop(0) if delays else 0.0)

        world.ledger.on_start = slowly
        action = world.program("echo", "x", effect=Effect.EXTERNAL)
        await world.submit(action)
        done = await world.completion(action)
        assert done.status is CompletionStatus.OK
        assert not delays, "the first ok was too old: it was asked again"

    play(tmp_path, scenario)


def test_b18_a_suspect_runs_alone_and_innocents_are_given_back_unspent(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        """Two actions on a lost worker become suspects; the next worker runs them one by one."""
        first = world.program("sleep", "9", path="a", effect=Effect.PURE)
        second = world.program("sleep", "9", path="b", effect=Effect.PURE)
        await world.submit(first, second)
        await until(lambda: len(world.backend.made) == 2)
        world.ledger.cut = True
        await until(lambda: world.worker.figures().fenced == 1)
        innocents = [
            world.program("sleep", "1", path=f"i{n}", effect=Effect.PURE) for n in range(6)
        ]
        await world.submit(*innocents)
        world.ledger.cut = False
        script, running, beside = world.backend.script, set[str](), []

        async def watched(box: MemoryBox, request: RunRequest) -> RunResult:
            key = request.environment["STOKER_ACTION_KEY"]
            running.add(key)
            if running & world.ledger.alone and len(running) > 1:
                beside.append(set(running))
            try:
                return await script(box, request)
            finally:
                running.discard(key)

        world.backend.script = watched
        for action in (first, second, *innocents):
            done = await world.completion(action)
            assert done.status is CompletionStatus.OK
            assert done.attempt == 1, "an innocent lost an attempt"
        assert world.ledger.alone == {first.action_id, second.action_id}
        assert not beside, "something ran beside a suspect"

    play(tmp_path, scenario, {"fast": 4})


def test_a_drain_finishes_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        running = world.program("sleep", "5", path="r")
        opening = world.opening()
        await world.submit(running, opening)
        await world.completion(opening)
        world.worker.drain()
        waiting = world.program("echo", "x")
        await world.submit(waiting)
        await asyncio.wait_for(world.task, 60)
        assert (await world.completion(running)).status is CompletionStatus.OK
        view = await world.view(waiting)
        assert (view.state, view.attempts) == (ActionState.ACCEPTED, 0)
        assert not world.backend.boxes
        assert world.backend.closed
        assert world.ledger.enrolled[-1].slots == {}, "its last word: whatever it held is over"
        status = msgspec.json.decode(
            (world.home.directory / "status.json").read_bytes(), type=WorkerFigures
        )
        assert (status.state, status.boxes_alive, status.boxes_leaked) == ("ended", 0, 0)

    play(tmp_path, scenario)


def test_a_kill_ends_running_boxes_and_their_leases(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        action = world.program(
            "hang", effect=Effect.PURE, timeout_seconds=500.0, deadline_seconds=900.0
        )
        await world.submit(action)
        await until(lambda: len(world.backend.made) == 1)
        at = world.clock.monotonic()
        world.worker.kill()
        await asyncio.wait_for(world.task, 60)
        assert world.clock.monotonic() - at < 1.0
        assert world.backend.made[0].killed == 1
        assert (await world.view(action)).state is ActionState.ACCEPTED, "at once, not by expiry"

    play(tmp_path, scenario)


def test_a25_a_result_the_ledger_cannot_take_ends_the_action_typed(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        refusals = [1]

        def refuse() -> None:
            if refusals[0]:
                refusals[0] -= 1
                raise LedgerRefused("too large, says the test")

        world.ledger.on_complete = refuse
        action = world.program("echo", "x")
        await world.submit(action)
        done = await world.completion(action)
        assert done.status is CompletionStatus.ERROR
        assert done.fault is not None
        assert done.fault.code == "internal"
        after = world.program("echo", "on")
        await world.submit(after)
        assert (await world.completion(after)).status is CompletionStatus.OK

    play(tmp_path, scenario)


@pytest.mark.parametrize("error", [LedgerStorageFailed, LedgerUnavailable])
def test_b5_a_result_the_ledger_has_no_room_for_now_is_handed_in_later(
    tmp_path: Path, error: type[StokerError]
) -> None:
    async def scenario(world: World) -> None:
        refusals = [error("for a while, says the test")] * 3

        def refuse() -> None:
            if refusals:
                raise refusals.pop()

        world.ledger.on_complete = refuse
        action = world.program("echo", "x", effect=Effect.EXTERNAL)
        await world.submit(action)
        done = await world.completion(action)
        assert (done.status, done.attempt) == (CompletionStatus.OK, 1)

    play(tmp_path, scenario)


def test_one_living_worker_has_a_name(tmp_path: Path) -> None:
    home = WorkerHome(tmp_path, "w0")
    home.remember()
    with pytest.raises(RunOwned, match="w0"):
        WorkerHome(tmp_path, "w0")
    home.close()
    again = WorkerHome(tmp_path, "w0")
    assert again.previous == home.worker_id
    assert again.worker_id != home.worker_id
    again.close()


def test_b12_a_disk_too_full_for_status_files_costs_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: WorkerHome, name: str, content: bytes) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(WorkerHome, "_replace", full)

    async def scenario(world: World) -> None:
        action = world.program("echo", "hi")
        await world.submit(action)
        assert (await world.completion(action)).status is CompletionStatus.OK
        world.worker.drain()
        await asyncio.wait_for(world.task, 60)

    play(tmp_path, scenario)
