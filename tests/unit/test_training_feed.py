"""Between the journal of deliveries and a trainer that commits when it likes."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stoker.broker.memory import MemoryLedger
from stoker.config.tree import TrainingSettings
from stoker.coordinator import delivery_log
from stoker.coordinator.delivery_log import DeliveryLog
from stoker.coordinator.feed import GroupFeed
from stoker.coordinator.groups import Groups
from stoker.errors import DeliveryUnknown
from stoker.model.deliveries import HandedOut
from stoker.model.events import Admitted
from stoker.model.ids import GroupId, RolloutId, RunId
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.task import Task
from stoker.testing.engines import ManualClock

RUN = RunId("r")
A, B, C = GroupId("grp_a"), GroupId("grp_b"), GroupId("grp_c")


def groups_of(*names: GroupId) -> Groups:
    """Return complete groups of one rollout each."""
    groups = Groups(1, 0, listening=True)
    for at, name in enumerate(names):
        admitted = Admitted(
            run_id=RUN, rollout_id=RolloutId(f"rol_{name}"), group_id=name, index=0,
            task=Task(task_id=name), program="p", program_version="1", program_digest="d",
            python="3.11", hash_seed=0, epoch="e", at=0.0, timeout_seconds=1.0,
        )  # fmt: skip
        groups.ended(admitted, Outcome(kind=OutcomeKind.COMPLETED, reward=1.0), at=float(at))
    return groups


def with_ledger(work: Callable[[MemoryLedger], Awaitable[None]]) -> None:
    async def whole() -> None:
        ledger = MemoryLedger(clock=ManualClock())
        try:
            async with asyncio.timeout(60):
                await work(ledger)
        finally:
            await ledger.close()

    asyncio.run(whole())


async def feed_of(ledger: MemoryLedger, *names: GroupId) -> GroupFeed:
    feed = GroupFeed(TrainingSettings())
    await feed.begin(ledger, RUN, "0", groups_of(*names))
    feed.no_more()
    return feed


def test_a_group_that_was_queued_again_and_committed_meanwhile_does_not_come() -> None:
    async def main(ledger: MemoryLedger) -> None:
        feed = await feed_of(ledger, A, B, C)
        taken = [await feed.take() for _ in range(3)]
        assert taken == [(A, 1), (B, 1), (C, 1)]
        feed.again()  # a reader begins anew …
        assert await feed.take() == (A, 2)
        await feed.commit(B, 1)  # … while what it read before is still being learnt from
        assert await feed.take() == (C, 2)
        assert await feed.take() is None
        with pytest.raises(DeliveryUnknown, match="handed out again"):
            await feed.commit(A, 1)

    with_ledger(main)


@pytest.mark.parametrize("commit_first", [True, False])
def test_a_group_is_committed_or_comes_again_never_both(commit_first: bool) -> None:  # noqa: FBT001 - a case
    async def main(ledger: MemoryLedger) -> None:
        feed = await feed_of(ledger, A)
        assert await feed.take() == (A, 1)
        feed.again()
        work = [feed.commit(A, 1), feed.take()]
        order = work if commit_first else work[::-1]
        done = await asyncio.gather(*order, return_exceptions=True)
        committed, taken = done if commit_first else done[::-1]
        if commit_first:
            assert (committed, taken) == (None, None)
        else:
            assert isinstance(committed, DeliveryUnknown)
            assert taken == (A, 2)
            assert feed.members(A)
            await feed.commit(A, 2)

    with_ledger(main)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_group_that_is_being_committed_does_not_come_again(cancelled: bool) -> None:  # noqa: FBT001 - a case
    async def main(ledger: MemoryLedger) -> None:
        feed = await feed_of(ledger, A, B)
        assert [await feed.take() for _ in range(2)] == [(A, 1), (B, 1)]
        committing = asyncio.create_task(feed.commit(A, 1))
        await asyncio.sleep(0)  # it is on its way to the ledger …
        if cancelled:
            committing.cancel()
        feed.again()  # … as a reader begins anew
        assert await feed.take() == (B, 2)
        assert await feed.take() is None
        await asyncio.wait({committing})
        assert committing.cancelled() is cancelled
        await feed.commit(A, 1)  # told once more: it was done
        feed.again()
        assert await feed.take() == (B, 3)
        assert await feed.take() is None
        with pytest.raises(KeyError):
            feed.members(A)  # nothing of it is kept any more

    with_ledger(main)


def test_a_journal_longer_than_one_read_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_log, "_READ_MAX", 3)

    async def main(ledger: MemoryLedger) -> None:
        log = await DeliveryLog.open(ledger, RUN, "0")
        for number in range(1, 8):
            await log.append(HandedOut(group_id=A, number=number))
        again = await DeliveryLog.open(ledger, RUN, "0")
        assert again.book.position == 7
        await again.append(HandedOut(group_id=A, number=8))

    with_ledger(main)
