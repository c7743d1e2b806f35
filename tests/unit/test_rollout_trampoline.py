"""How programs are stepped: paths, order, joins, cancellation, timeouts, misuse."""

import contextlib
import contextvars
from typing import Any

import pytest

import stoker
from stoker.errors import Cancelled, WorkerLost
from stoker.model.events import Verb
from stoker.model.ids import CallPath, RolloutId
from stoker.model.task import Task
from stoker.model.tools import CallResult, RunResult
from stoker.model.value import canonical_bytes
from stoker.rollout.messages import Deliver, StartRollout
from stoker.rollout.program import Rollout
from stoker.rollout.trampoline import Trampoline
from stoker.testing.driver import FIRE, NEVER, Asked, drive, replay_every_prefix


def made(program: Rollout) -> Trampoline:
    start = StartRollout(
        rollout_id=RolloutId("rol_1"),
        task=Task(task_id="t"),
        epoch="e",
        index=0,
        group_id="g",
        at=5.0,
    )
    return Trampoline(program, start)


def called(asked: Asked) -> tuple[str, ...]:
    argv: tuple[str, ...] = asked.arguments.request.argv
    return argv


def never_for(*names: str) -> Any:
    def script(asked: Asked) -> Any:
        if asked.verb is Verb.TIMER or (asked.verb is Verb.CALL and called(asked)[0] in names):
            return NEVER
        return None

    return script


def test_paths_are_taken_when_awaited_not_when_called() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        first_made = ctx.call(["a"])
        second_made = ctx.call(["b"])
        await second_made
        await first_made
        return 1.0

    result = drive(program)
    assert [(call.path, called(call)) for call in result.calls] == [("0", ("b",)), ("1", ("a",))]


def test_children_have_paths_below_their_join() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        await ctx.sleep(1)

        async def child() -> None:
            await ctx.sleep(1)
            await ctx.gather(ctx.sleep(2), ctx.sleep(3))

        await ctx.gather(child(), ctx.sleep(4))
        assert ctx.new_id() != ctx.new_id()
        await ctx.sleep(5)
        return 1.0

    paths = [call.path for call in drive(program).calls]
    assert paths == ["0", "1.0.0", "1.1.0", "1.0.1.0.0", "1.0.1.1.0", "4"]


def test_one_result_then_quiescence_so_siblings_see_each_other_in_journal_order() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        seen: list[str] = []

        async def sibling(name: str) -> None:
            await ctx.call([name])
            seen.append(name)
            await ctx.call([name, *seen])

        await ctx.gather(sibling("a"), sibling("b"))
        return 1.0

    last_first = drive(program, choose=lambda paths: len(paths) - 1)
    assert [called(call) for call in last_first.calls] == [
        ("a",),
        ("b",),
        ("b", "b"),
        ("a", "b", "a"),
    ]
    replay_every_prefix(program, last_first)


def test_first_cancels_the_losers_and_waits_for_their_cleanup() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        async def loser() -> str:
            try:
                await ctx.call(["slow"])
            finally:
                await ctx.call(["cleanup"])
            return "loser"

        async def winner() -> str:
            await ctx.call(["fast"])
            return "winner"

        assert await ctx.first(loser(), winner()) == "winner"
        return 1.0

    result = drive(program, never_for("slow"))
    assert result.outcome is not None
    assert result.outcome.reward == 1.0
    assert [called(call)[0] for call in result.calls] == ["slow", "fast", "cleanup"]
    assert result.history[1].withdrawn == ("0.0.0",)
    replay_every_prefix(program, result)


def test_an_error_in_one_child_cancels_the_others_in_index_order_and_is_raised() -> None:
    ended: list[str] = []

    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        async def child(name: str) -> None:
            try:
                await ctx.call([name])
            except Cancelled:
                ended.append(name)
                raise

        async def failing() -> None:
            await ctx.call(["x"])
            raise KeyError("x")

        with pytest.raises(KeyError):
            await ctx.gather(child("a"), child("b"), failing(), child("c"))
        return 1.0

    result = drive(program, never_for("a", "b", "c"))
    assert ended == ["a", "b", "c"]
    assert result.outcome is not None
    assert result.outcome.reward == 1.0
    assert result.outstanding == ()


def test_children_that_end_without_awaiting_win_by_index() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        async def at_once(value: float) -> float:
            return value

        async def waits() -> float:
            await ctx.call(["never made"])
            return 9.0

        return await ctx.first(at_once(1.0), at_once(2.0), waits())

    result = drive(program)
    assert result.outcome is not None
    assert result.outcome.reward == 1.0
    assert result.calls == ()


def test_a_call_issued_and_withdrawn_in_one_turn_is_told_in_both_lists() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        async def at_once() -> float:
            return 1.0

        async def waits() -> float:
            await ctx.call(["made, then dropped"])
            return 9.0

        return await ctx.first(waits(), at_once())

    turn = made(program).begin()
    assert [call.path for call in turn.calls] == list(turn.withdrawn) == ["0.0.0"]
    assert turn.outcome is not None


def test_a_timeout_cuts_a_whole_gather_and_only_its_own_block() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        cut = "none"
        async with ctx.timeout("10s") as outer:
            try:
                async with ctx.timeout("1s") as inner:
                    await ctx.gather(ctx.call(["a"]), ctx.call(["b"]))
            except TimeoutError:
                cut = "inner"
            assert inner.fired
            await ctx.call(["after"])
        assert not outer.fired
        assert cut == "inner"
        return 1.0

    def script(asked: Asked) -> Any:
        if asked.verb is Verb.TIMER:
            return FIRE if asked.arguments.seconds == 1.0 else NEVER
        return NEVER if called(asked)[0] in "ab" else None

    result = drive(program, script)
    assert result.outcome is not None
    assert result.outcome.fault is None
    assert result.history[1].withdrawn == ("2.0.0", "2.1.0")
    assert result.history[-1].withdrawn == ("0",), "an unfired timer is withdrawn"
    replay_every_prefix(program, result)


def test_the_outer_timeout_wins_when_both_fire_during_one_cleanup() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        async def slow_cleanup() -> None:
            try:
                await ctx.call(["work"])
            finally:
                await ctx.call(["cleanup"])

        try:
            async with ctx.timeout(10):
                with contextlib.suppress(TimeoutError):
                    async with ctx.timeout(1):
                        await ctx.gather(slow_cleanup())
                await ctx.call(["must not be reached"])
        except TimeoutError:
            return 1.0
        return 0.0

    trampoline = made(program)
    turn = trampoline.begin()
    assert [call.path for call in turn.calls] == ["0", "1", "2.0.0"]
    for number, path in enumerate(["1", "0"]):  # inner first, then outer, while cleaning up
        turn = trampoline.deliver(_delivery(path, None, float(number)))
    turn = trampoline.deliver(_delivery("2.0.1", CallResult(), 3.0))
    assert turn.outcome is not None
    assert turn.outcome.reward == 1.0


def test_cancelled_passes_through_except_exception() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        async def stubborn() -> float:
            try:
                await ctx.call(["slow"])
            except Exception:
                return 0.0
            return 0.0

        return await ctx.first(stubborn(), _returning(ctx, 1.0))

    result = drive(program, never_for("slow"))
    assert result.outcome is not None
    assert result.outcome.reward == 1.0


async def _returning(ctx: stoker.Context, value: float) -> float:
    await ctx.call(["quick"])
    return value


def test_context_variables_stay_in_their_scope() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        assert variable.get() == "unset", "left over from another rollout"
        variable.set("parent")

        async def child(name: str) -> None:
            assert variable.get() == "parent"
            variable.set(name)
            await ctx.sleep(1)
            assert variable.get() == name

        await ctx.gather(child("a"), child("b"))
        assert variable.get() == "parent"
        return 1.0

    for _ in range(2):
        outcome = drive(program).outcome
        assert outcome is not None
        assert outcome.fault is None


def test_a_fault_is_raised_at_the_await_as_its_class() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        try:
            await ctx.call(["x"])
        except WorkerLost as fault:
            assert "wrk_9" in fault.message
            ctx.recovered(fault)
            return 0.5
        return 1.0

    result = drive(program, lambda _asked: WorkerLost("worker wrk_9 is gone"))
    assert result.outcome is not None
    assert result.outcome.reward == 0.5
    assert result.recovered == ("worker_lost",)


def test_a_timed_out_call_truncates_when_told_so_and_is_data_otherwise() -> None:
    @stoker.rollout
    async def cut(ctx: stoker.Context, task: stoker.Task) -> float:
        try:
            await ctx.call(["x"], timeout="1s", on_timeout="truncate")
        except Exception:
            return 0.0
        return 1.0

    @stoker.rollout
    async def observes(ctx: stoker.Context, task: stoker.Task) -> float:
        result = await ctx.call(["x"], timeout="1s", on_timeout=stoker.retry(2))
        assert result.run is not None
        return float(result.run.timed_out)

    def script(_asked: Asked) -> CallResult:
        return CallResult(run=RunResult(timed_out=True))

    outcome = drive(cut, script).outcome
    assert outcome is not None
    assert (outcome.truncated, outcome.reward) == ("a tool call timed out", None)
    second = drive(observes, script)
    assert second.outcome is not None
    assert second.outcome.reward == 1.0
    assert second.calls[0].arguments.on_timeout.times == 2


def test_now_is_the_recorded_time_of_the_last_result() -> None:
    times: list[float] = []

    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        times.append(ctx.now())
        await ctx.sleep(1)
        times.append(ctx.now())
        return 1.0

    trampoline = made(program)
    trampoline.begin()
    trampoline.deliver(_delivery("0", None, 77.25))
    assert times == [5.0, 77.25]


def test_a_result_nobody_asked_for_ends_the_rollout_and_a_withdrawn_one_changes_nothing() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        await ctx.first(ctx.sleep(1), ctx.sleep(2))
        await ctx.sleep(3)
        return 1.0

    trampoline = made(program)
    trampoline.begin()
    turn = trampoline.deliver(_delivery("0.0.0", None, 1.0))
    assert turn.withdrawn == ("0.1.0",)
    late = trampoline.deliver(_delivery("0.1.0", None, 2.0))
    assert (late.calls, late.outcome) == ((), None)
    stray = trampoline.deliver(_delivery("7", None, 3.0))
    assert stray.outcome is not None
    assert stray.outcome.fault is not None
    assert stray.outcome.fault.code == "internal"
    trampoline.close()


def _delivery(path: str, value: Any, at: float) -> Deliver:
    return Deliver(
        rollout_id=RolloutId("rol_1"),
        path=CallPath(path),
        value=canonical_bytes(value),
        fault=None,
        at=at,
    )
