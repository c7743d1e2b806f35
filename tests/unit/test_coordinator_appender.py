"""The one writer of journals: what fails is final, what is queued is sent in frames that fit."""

import asyncio
import gc
from typing import Any, cast

import pytest

from stoker.broker.base import (
    Append,
    AppendBatch,
    AppendBatchReply,
    AppendDisposition,
    AppendReply,
)
from stoker.coordinator.appender import BATCH_BYTES_MAX, Appender
from stoker.errors import LedgerFenced, LedgerRefused, StokerError
from stoker.model.action import Action
from stoker.model.ids import ActionId, CallPath, Fence, RolloutId, RunId
from stoker.model.value import INLINE_BYTES_MAX, Value, inline_value


class Scripted:
    """A ledger that gives prepared answers to batches of appends."""

    def __init__(self, *answers: AppendReply | StokerError) -> None:
        self.answers = list(answers)
        self.batches: list[AppendBatch] = []

    async def append(self, batch: AppendBatch) -> AppendBatchReply:
        self.batches.append(batch)
        answer = self.answers.pop(0)
        if isinstance(answer, StokerError):
            raise answer
        return AppendBatchReply(replies=(answer,) * len(batch.appends))


def appending(ledger: Scripted) -> Appender:
    return Appender(cast("Any", ledger), RunId("run_1"), Fence(1), partition="0")


def an_action(name: str, content: Value) -> Action:
    return Action(
        action_id=ActionId(name),
        run_id=RunId("run_1"),
        rollout_id=RolloutId("rol_1"),
        path=CallPath("0"),
        step=0,
        worker_class="fast",
        tool="call",
        input=content,
        timeout_seconds=1.0,
        deadline_seconds=1.0,
    )


def an_append(*events: bytes, submits: tuple[Action, ...] = ()) -> Append:
    return Append(rollout_id=RolloutId("rol_1"), expected_seq=0, events=events, submits=submits)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (AppendReply(disposition=AppendDisposition.CONFLICT, seq=7), LedgerRefused),
        (LedgerFenced("another coordinator owns it"), LedgerFenced),
    ],
)
def test_the_first_append_that_fails_fails_all_that_wait_and_all_that_come(
    answer: AppendReply | StokerError, told: type[StokerError]
) -> None:
    async def scenario() -> None:
        ledger = Scripted(answer)
        appender = appending(ledger)
        first = appender.append(an_append(b"x" * BATCH_BYTES_MAX))
        second = appender.append(an_append(b"y"))
        given_up = appender.append(an_append(b"z"))
        given_up.cancel()
        flushing = asyncio.create_task(appender.flush())
        with pytest.raises(told):
            await flushing
        late = appender.append(an_append(b"late"))
        for one in (first, second, late):
            assert isinstance(one.exception(), told)
        assert len(ledger.batches) == 1, "nothing is sent after it"
        with pytest.raises(told):
            await appender.flush()
        assert appender.failure.result() is late.exception()
        await appender.close()

    asyncio.run(scenario())


def test_appends_that_fail_and_that_nobody_waits_for_are_no_noise() -> None:
    unseen: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unseen.append(what))
        appender = appending(Scripted(LedgerFenced("another coordinator owns it")))
        for number in range(3):
            appender.append(an_append(b"%d" % number))
        await asyncio.wait({appender.failure})
        await appender.close()
        del appender
        gc.collect()

    asyncio.run(scenario())
    assert unseen == []


def test_a_flush_waits_for_what_was_queued_before_it() -> None:
    applied = AppendReply(disposition=AppendDisposition.APPLIED, seq=1)

    async def scenario() -> None:
        appender = appending(Scripted(applied, applied))
        await appender.flush()
        queued = appender.append(an_append(b"e"))
        await appender.flush()
        assert queued.done()
        await appender.close()

    asyncio.run(scenario())


def test_inputs_of_actions_count_for_the_size_of_a_frame() -> None:
    applied = AppendReply(disposition=AppendDisposition.APPLIED, seq=1)
    large = (an_action("large", inline_value(b"x" * INLINE_BYTES_MAX)),) * (
        BATCH_BYTES_MAX // INLINE_BYTES_MAX // 2
    )
    stored = an_action("stored", Value(digest="0" * 64, size_bytes=10**9))

    async def scenario() -> list[int]:
        ledger = Scripted(applied, applied)
        appender = appending(ledger)
        appender.append(an_append(b"e", submits=(stored,)))
        appender.append(an_append(b"e", submits=large))
        await appender.append(an_append(b"e", submits=large))
        await appender.close()
        return [len(batch.appends) for batch in ledger.batches]

    assert asyncio.run(scenario()) == [2, 1]
