"""Parts of the coordinator on their own: starting model calls, sending turns."""

import asyncio
from typing import Any, cast

from stoker.broker.base import (
    Append,
    AppendBatch,
    AppendBatchReply,
    AppendDisposition,
    AppendReply,
)
from stoker.coordinator.appender import BATCH_BYTES_MAX, Appender
from stoker.coordinator.calls import Call
from stoker.coordinator.dispatch import Dispatcher
from stoker.coordinator.rollouts import ActiveRollout, Result
from stoker.model.events import Verb
from stoker.model.generation import GenerateArguments, Generation
from stoker.model.ids import CallPath, Fence, RolloutId, RunId
from stoker.model.value import canonical_bytes
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
            cast("Any", Lane()), cast("Any", FullDisk()), lambda _, result: told.append(result)
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
        appender = Appender(cast("Any", Ledger()), RunId("run_1"), Fence(1))
        event = b"x" * (BATCH_BYTES_MAX // 4)
        for number in range(9):
            rollout = RolloutId(f"rol_{number}")
            appender.append(Append(rollout_id=rollout, expected_seq=0, events=(event,)))
        large = Append(rollout_id=RolloutId("rol_9"), expected_seq=0, events=(event,) * 5)
        await appender.append(large)
        await appender.close()

    asyncio.run(scenario())
    assert [len(batch) for batch in batches] == [4, 4, 1, 1]
