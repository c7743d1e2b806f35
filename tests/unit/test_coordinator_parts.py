"""Parts of the coordinator on their own: starting model calls, sending turns."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from stoker.broker.base import (
    Append,
    AppendBatch,
    AppendBatchReply,
    AppendDisposition,
    AppendReply,
    SubmitDisposition,
)
from stoker.coordinator.appender import BATCH_BYTES_MAX, Appender
from stoker.coordinator.calls import Call
from stoker.coordinator.checking import Checker
from stoker.coordinator.dispatch import Dispatcher
from stoker.coordinator.hosts import HostPool
from stoker.coordinator.places import Places
from stoker.coordinator.rebuild import Standing
from stoker.coordinator.rollouts import ActiveRollout, Result
from stoker.errors import ArtifactDamaged, NonDeterministicRollout
from stoker.model.action import Action
from stoker.model.events import Finished, Verb
from stoker.model.generation import GenerateArguments, Generation
from stoker.model.ids import ActionId, CallPath, Fence, RolloutId, RunId
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.value import canonical_bytes, inline_value
from stoker.rollout.messages import Differed, Loaded, ProgramOutcome, Turn
from support.flows import Anything
from support.journals import ADMITTED


def test_an_answer_that_cannot_be_stored_is_told_as_a_fault() -> None:
    class Lane:
        async def generate(self, *_: object) -> Generation:
            return Generation(text="x" * 40_000)

    class FullDisk:
        def put(self, _content: bytes) -> None:
            raise OSError("no space left on device")

    async def scenario() -> list[Result]:
        told: list[Result] = []
        dispatcher = Dispatcher(
            cast("Any", Lane()),
            cast("Any", FullDisk()),
            lambda _, result: told.append(result),
            Places(1),
        )
        rollout = ActiveRollout(admitted=ADMITTED, seq=0)
        arguments = GenerateArguments(parent=None, suffix=())
        path = CallPath("0")
        rollout.history.issue(path, arguments)
        call = Call(
            path=path, verb=Verb.GENERATE, arguments=canonical_bytes(arguments), issued_at=0.0
        )
        dispatcher.start(rollout, call)
        assert call.task is not None
        await call.task
        return told

    (told,) = asyncio.run(scenario())
    assert told.fault is not None
    assert "no space left" in told.fault.message


def test_turns_that_waited_together_are_sent_in_frames_that_fit() -> None:
    batches: list[list[int]] = []

    class Ledger:
        async def append(self, batch: AppendBatch) -> AppendBatchReply:
            batches.append([sum(map(len, one.events)) for one in batch.appends])
            applied = AppendReply(disposition=AppendDisposition.APPLIED, seq=1)
            return AppendBatchReply(replies=(applied,) * len(batch.appends))

    async def scenario() -> None:
        appender = Appender(cast("Any", Ledger()), RunId("run_1"), Fence(1), partition="0")
        event = b"x" * (BATCH_BYTES_MAX // 4)
        for number in range(9):
            rollout = RolloutId(f"rol_{number}")
            appender.append(Append(rollout_id=rollout, expected_seq=0, events=(event,)))
        large = Append(rollout_id=RolloutId("rol_9"), expected_seq=0, events=(event,) * 5)
        await appender.append(large)
        await appender.close()

    asyncio.run(scenario())
    assert [len(batch) for batch in batches] == [4, 4, 1, 1]


@pytest.mark.parametrize(
    ("raised", "told"),
    [(KeyError("a bug"), "internal"), (OSError("no space left on device"), "host_lost")],
)
def test_what_the_coordinator_raises_over_a_turn_ends_the_run_and_is_not_tried_again(
    raised: Exception, told: str
) -> None:
    class Link(Anything):
        async def messages(self) -> AsyncIterator[object]:
            yield Loaded(
                name="p",
                version="1",
                source_digest="d",
                python="3.11",
                hash_seed=0,
                boxes=0,
                timeout_seconds=1.0,
                pid=1,
            )
            await asyncio.sleep(0)
            yield Turn(rollout_id=ADMITTED.rollout_id)
            await asyncio.Event().wait()

        async def end(self) -> None:
            pass

    async def scenario() -> None:
        broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

        class Listener(Anything):
            def turned(self, *_: object) -> None:
                raise raised

            def broke(self, error: Exception) -> None:
                if not broken.done():
                    broken.set_result(error)

        async def spawn(_number: int) -> Any:
            return Link()

        pool = HostPool(spawn, 1)
        pool.listener = cast("Any", Listener())
        await pool.start()
        pool.place(ActiveRollout(admitted=ADMITTED, seq=0), ())
        error = await asyncio.wait_for(broken, 10)
        await pool.close()
        assert getattr(error, "code", "") == told
        assert str(raised) in str(error)

    asyncio.run(scenario())


def checked_against(message: object, outcome: Outcome) -> tuple[list[str], list[dict[str, Any]]]:
    """Return codes counted and lines logged by a check of a rollout that ended as ``outcome``."""
    counted: list[str] = []
    logged: list[dict[str, Any]] = []

    class Link(Anything):
        async def messages(self) -> AsyncIterator[object]:
            yield message

        async def end(self) -> None:
            pass

    class Told(Anything):
        def fault(self, code: str) -> None:
            counted.append(code)

        def event(self, name: str, **fields: object) -> None:
            logged.append({"name": name, **fields})

        async def standing(self, *_: object) -> Standing:
            return Standing(admitted=ADMITTED, finished=Finished(outcome=outcome, at=1.0))

    async def scenario() -> None:
        async def spawn(_number: int) -> Any:
            return Link()

        told = cast("Any", Told())
        checker = Checker(spawn, told, ADMITTED.run_id, 1.0, told, told)
        checker.finished(ADMITTED.rollout_id)
        running = asyncio.create_task(checker.run())
        while not checker.checked:
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(scenario())
    return counted, logged


def test_a_check_replay_that_cannot_be_made_is_logged_and_the_next_one_is_made() -> None:
    logged: list[dict[str, object]] = []

    class Told(Anything):
        def event(self, name: str, **fields: object) -> None:
            logged.append({"name": name, **fields})

        async def standing(self, *_: object) -> Standing:
            raise ArtifactDamaged("artifact 1 is gone")

    class Link(Anything):
        def messages(self) -> None:
            return None

        async def end(self) -> None:
            pass

    async def scenario() -> None:
        starts = 0

        async def spawn(_number: int) -> Any:
            nonlocal starts
            starts += 1
            if starts == 1:
                raise OSError("no more processes")
            return Link()

        told = cast("Any", Told())
        checker = Checker(spawn, told, ADMITTED.run_id, 1.0, told, told)
        running = asyncio.create_task(checker.run())
        for _ in range(2):
            checker.finished(ADMITTED.rollout_id)
            await checker.settle(60.0)
        assert not running.done(), "the checker goes on"
        running.cancel()

    asyncio.run(scenario())
    assert [line["why"] for line in logged] == ["no more processes", "artifact 1 is gone"]


COMPLETED = Outcome(kind=OutcomeKind.COMPLETED, reward=0.5, metrics={"tries": 2.0})


def test_a_check_replay_that_differs_is_counted_and_logged() -> None:
    differs = NonDeterministicRollout("call number 3 differs").record()
    message = Differed(rollout_id=ADMITTED.rollout_id, fault=differs)
    counted, (line,) = checked_against(message, COMPLETED)
    assert counted == ["non_deterministic"]
    assert (line["rollout"], line["message"]) == (ADMITTED.rollout_id, differs.message)


@pytest.mark.parametrize(
    ("ended", "says"),
    [
        (ProgramOutcome(reward=0.25, metrics={"tries": 2.0}), "ended completed, reward 0.25"),
        (ProgramOutcome(reward=0.5, metrics={"tries": 3.0}), "metrics {'tries': 3.0}"),
        (ProgramOutcome(truncated="tired"), "ended truncated, reward None"),
        (None, "goes on where it had completed"),
    ],
)
def test_a_check_replay_that_ends_otherwise_is_found(
    ended: ProgramOutcome | None, says: str
) -> None:
    counted, (line,) = checked_against(
        Turn(rollout_id=ADMITTED.rollout_id, outcome=ended), COMPLETED
    )
    assert counted == ["non_deterministic"]
    assert says in line["message"]
    assert "the recorded outcome stands" in line["message"]


def test_a_check_replay_that_ends_the_same_or_was_cut_from_outside_is_no_finding() -> None:
    same = ProgramOutcome(reward=0.5, metrics={"tries": 2.0})
    turn = Turn(rollout_id=ADMITTED.rollout_id, outcome=same)
    assert checked_against(turn, COMPLETED) == ([], [])
    cut = Outcome(kind=OutcomeKind.TRUNCATED, reason="rollout timeout (5 s)")
    assert checked_against(turn, cut) == ([], [])


def test_a_submit_under_a_key_that_is_taken_is_told() -> None:
    class Ledger:
        async def append(self, batch: AppendBatch) -> AppendBatchReply:
            reply = AppendReply(
                disposition=AppendDisposition.APPLIED,
                seq=1,
                submits=(SubmitDisposition.ACCEPTED, SubmitDisposition.CONFLICT),
            )
            return AppendBatchReply(replies=(reply,) * len(batch.appends))

    async def scenario() -> list[tuple[str, str]]:
        told: list[tuple[str, str]] = []
        appender = Appender(cast("Any", Ledger()), RunId("run_1"), Fence(1), partition="0")
        appender.refused = lambda rollout, action: told.append((rollout, action))
        submits = tuple(make_action(name) for name in ("taken_not", "taken"))
        await appender.append(
            Append(rollout_id=RolloutId("rol_1"), expected_seq=0, events=(b"e",), submits=submits)
        )
        await appender.close()
        return told

    assert asyncio.run(scenario()) == [("rol_1", "taken")]


def make_action(name: str) -> Action:
    return Action(
        action_id=ActionId(name),
        run_id=RunId("run_1"),
        rollout_id=RolloutId("rol_1"),
        path=CallPath("0"),
        step=0,
        worker_class="fast",
        tool="call",
        input=inline_value(b""),
        timeout_seconds=1.0,
        deadline_seconds=1.0,
    )


def test_a_bug_met_while_an_answer_is_taken_is_not_lost_in_its_task() -> None:
    class Lane:
        async def generate(self, *_: object) -> Generation:
            return Generation(text="x")

    def arrived(_rollout: ActiveRollout, _result: Result) -> None:
        raise KeyError("a bug")

    async def scenario() -> BaseException | None:
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        dispatcher = Dispatcher(cast("Any", Lane()), cast("Any", Anything()), arrived, Places(1))
        dispatcher.ended = lambda task: ended.set_result(task.exception())
        rollout = ActiveRollout(admitted=ADMITTED, seq=0)
        arguments = GenerateArguments(parent=None, suffix=())
        rollout.history.issue(CallPath("0"), arguments)
        encoded = canonical_bytes(arguments)
        call = Call(path=CallPath("0"), verb=Verb.GENERATE, arguments=encoded, issued_at=0.0)
        dispatcher.start(rollout, call)
        return await ended

    assert isinstance(asyncio.run(scenario()), KeyError)
