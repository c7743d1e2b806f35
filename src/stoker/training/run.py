"""``start_run``: a run inside its trainer, for as long as a ``with`` block lasts.

The trainer reads complete groups, commits them, publishes policies, and keeps ``run.state()`` in
its checkpoint. Everything belongs to one event loop. What is not committed comes again: over a
crash of the trainer (which is the coordinator's process) and over a restore of an older state.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from stoker.broker.base import JournalRequest
from stoker.coordinator.execute import execute
from stoker.coordinator.feed import TrainingState
from stoker.coordinator.groups import LengthBias
from stoker.coordinator.publishing import Mode, publish
from stoker.coordinator.request import Observer, RunReport, RunRequest, StopSignal
from stoker.coordinator.trainer import Serving, TrainerSeat
from stoker.errors import DeliveryUnknown, GroupMixed, StateRefused
from stoker.export.rows import RunFacts
from stoker.inference.base import Model, Weights
from stoker.model.events import JournalEvent, decode_event
from stoker.model.ids import GroupId, RolloutId, RunId
from stoker.training.groups import Group, GroupReader


class Run:
    """A run as its trainer has it; made by ``start_run``."""

    def __init__(self, serving: Serving, seat: TrainerSeat) -> None:
        record = serving.run.record
        self._serving = serving
        self._publishing = asyncio.Lock()
        self._parts = serving.coordinator.parts
        self._keeper = serving.coordinator.keeper
        self._feed = seat.feed
        self._reader = GroupReader(
            self._parts.plan.group_size,
            serving.coordinator.flow.parts.artifacts.get,
            RunFacts(
                run_id=record.run_id,
                model=record.model,
                model_digest=record.model_digest,
                settings_digest=record.settings_digest,
                stoker_version=record.stoker_version,
            ),
        )
        self.report: RunReport | None = None
        """How it ended; set when the block was left."""

    @property
    def run_id(self) -> RunId:
        """Its id; ``RunRequest(resume=…)`` goes on with it."""
        return self._parts.plan.run_id

    async def groups(self, *, mixed: bool = False) -> AsyncIterator[Group]:
        """Yield complete groups until every one was handed out; one reader at a time.

        First those handed out before and not committed, in that order, then the others as they
        were completed. A group that was not committed comes again after a crash, after ``restore``
        and from the next call of ``groups``. While the trainer does not read, at most
        ``training.unread_max`` groups and those that are active wait, and no new one begins.

        Raises:
            GroupMixed: rollouts of a group were made with different programs, baselines or
                execution policies; ``mixed=True`` takes it and says what differs.
            StokerError: what ended the run; it can be resumed.

        **Durability:** outcomes and the hand-out are on disk before a group is yielded.
        **Cancellation:** nothing is lost; the group comes again.
        """
        self._feed.again()
        while (taken := await self._feed.take()) is not None:
            group = await self._read(*taken)
            if group.mixed and not mixed:
                raise GroupMixed(
                    f"group {group.group_id} (task {group.task.task_id}) is mixed: "
                    f"{'; '.join(group.mixed)}; it was not delivered; take it with "
                    "groups(mixed=True) and commit it unused, or train on it"
                )
            yield group

    async def commit(self, delivery: Group | str) -> None:
        """Let the group of this hand-out never come again. Doing so twice is harmless.

        Raises:
            DeliveryUnknown: it is not the latest hand-out of a group that is open.

        **Durability:** on disk when this returns. **Cancellation:** it is committed all the same.
        """
        name = delivery if isinstance(delivery, str) else delivery.delivery
        group, dot, number = name.rpartition(".")
        if not dot or not number.isdecimal():
            raise DeliveryUnknown(
                f"{name!r} is no delivery; nothing was changed; see Group.delivery"
            )
        await self._feed.commit(GroupId(group), int(number))

    def state(self) -> dict[str, Any]:
        """Return where training stands, a few JSON values: keep it in the trainer's checkpoint."""
        state: dict[str, Any] = msgspec.to_builtins(self._feed.state())
        return state

    async def restore(self, state: dict[str, Any]) -> None:
        """Stand where ``state`` was taken: what was committed after it comes again.

        Versions published after it are abandoned; groups with their tokens say so. Deliveries that
        are open now can no longer be committed. Restoring the newest state changes nothing.

        Raises:
            StateRefused: it is another run's, or this ledger has another past.

        **Durability:** on disk when this returns.
        """
        try:
            known = msgspec.convert(state, TrainingState)
        except msgspec.ValidationError as error:
            raise StateRefused(
                f"this is no state of a run ({error}); nothing was changed"
            ) from error
        await self._feed.restore(known, await self._keeper.count_again(self._parts.ledger))

    @property
    def policy_version(self) -> int | None:
        """The version published last on the line that holds; ``None``: none was."""
        return self._feed.policy_version

    @property
    def next_policy_version(self) -> int:
        """The smallest number that no policy of this run has had."""
        return self._feed.next_policy_version

    async def publish_policy(
        self, version: int, mode: Mode = "keep", *, weights: Weights | None = None
    ) -> None:
        """Make ``version`` the policy: tokens sampled from now on carry it.

        ``weights``: a folder (on the servers' disks; ``torch:`` on this one), or a function that
        loads them while the servers are held; ``None``: whoever owns the engine has loaded them,
        or another run of the same servers. ``mode`` is what happens to calls in flight: ``keep``
        lets them finish under the new weights, their first tokens kept; ``drain`` answers them
        first; ``abort`` ends them, and they go on under the new weights from what they had, or
        anew where the model cannot give that. Rollouts with tokens more than
        ``training.staleness_max`` publications old are truncated, with that reason.

        Raises:
            BadInput: the number was used before, or the mode is none.
            ConfigInvalid: the model cannot take weights so.
            ModelUnavailable: a server cannot be reached; publish the same version again.

        **Durability:** the publication is on disk before any weight changes.
        **Cancellation:** calls go on; publish the same version again.
        """
        coordinator, model = self._serving.coordinator, self._serving.model
        async with self._publishing:
            await publish(coordinator, self._feed, model, version, mode=mode, weights=weights)

    def length_bias(self) -> LengthBias:
        """Return what cutting stragglers off has cost, since this coordinator began."""
        return self._feed.bias

    async def _read(self, group: GroupId, number: int) -> Group:
        await self._parts.appender.flush()  # what a trainer sees is on disk (I13)
        journals = [await self._journal(one) for one in self._feed.members(group)]
        read = self._reader.read(group, number, journals)
        abandoned = self._feed.abandoned(read.policy_versions)
        return msgspec.structs.replace(read, abandoned=abandoned)

    async def _journal(self, rollout_id: RolloutId) -> list[JournalEvent]:
        request = JournalRequest(run_id=self.run_id, rollout_id=rollout_id)
        return [decode_event(one) for one in (await self._parts.ledger.journal(request)).events]


@asynccontextmanager
async def start_run(
    request: RunRequest, *, model: Model | None = None, observer: Observer | None = None
) -> AsyncIterator[Run]:
    """Execute or resume ``request`` while the block lasts; ``model`` as in ``execute``.

    Leaving the block stops the run where it is; what is unfinished or not committed is there for
    ``RunRequest(resume=run.run_id)``.

    Raises:
        BadInput: program, tasks, model, settings or run directory cannot be used.
        StokerError: a part broke under way; the run can be resumed.

    **Cancellation:** as leaving the block.
    """
    seat, stop = TrainerSeat(request.settings.training), StopSignal()
    work = execute(request, observer=observer, stop=stop, model=model, trainer=seat)
    running = asyncio.create_task(work)
    running.add_done_callback(lambda done: _ended(seat, done))
    try:
        ready = asyncio.create_task(seat.feed.ready.wait())
        await asyncio.wait({ready, running}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if running.done():
            await running
        run = Run(seat.serving.result(), seat)
        yield run
    finally:
        stop.stop()
        seat.feed.left.set()
        await _until_ended(running)
    run.report = running.result()


async def _until_ended(running: "asyncio.Task[RunReport]") -> None:
    """Wait for the run, which ends by itself and must not be left behind by a cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _ended(seat: TrainerSeat, done: "asyncio.Task[RunReport]") -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        seat.feed.failed(error)
    else:
        seat.feed.no_more()
