"""The jobs a worker has in hand: from a lease to a report, each in a task of its own.

Order of a job: its environment's turn → the gate (suspects run alone) → ``start`` answered *ok* →
the work → slot and turn given back → the result handed in. A job that is stopped before it reports
leaves no process behind; what the ledger is then told depends on the reason.
"""

import asyncio
from collections.abc import Iterable

from structlog.typing import FilteringBoundLogger

from stoker.broker.base import CompleteDisposition, HoldVerdict, Lease
from stoker.errors import LedgerUnavailable, StokerError
from stoker.model.completion import Completion
from stoker.model.ids import ActionId, WorkerId
from stoker.seams.clock import Clock
from stoker.seams.entropy import jittered
from stoker.seams.faultpoints import declare, reach

from .attempt import Attempt
from .contact import Contact
from .environments import Environments
from .executor import Executor
from .figures import Meters
from .jobs import Gate, Job, Phase, StopReason
from .reports import RETRY_SECONDS, Hold, Reports

EXECUTED = declare("worker.executed", "the work is over and nothing has been reported")
RELEASED = declare("worker.released", "a lease is about to be given back")


class Hands:
    """All jobs of one worker process."""

    def __init__(
        self,
        *,
        reports: Reports,
        executor: Executor,
        environments: Environments,
        contact: Contact,
        meters: Meters,
        clock: Clock,
        log: FilteringBoundLogger,
    ) -> None:
        self._reports = reports
        self._executor = executor
        self.environments = environments
        self._contact = contact
        self._meters = meters
        self._clock = clock
        self._log = log
        self._gate = Gate()
        self._jobs: dict[tuple[ActionId, int], Job] = {}
        self.changed = asyncio.Event()
        """Set whenever a slot was given back or a job ended."""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def alone(self) -> bool:
        """Whether a suspect is in hand: nothing else may be taken on."""
        return self._gate.closed or any(job.lease.alone for job in self._jobs.values())

    def of(self, worker_id: WorkerId) -> list[Job]:
        """Return the jobs leased by that incarnation."""
        return [job for job in self._jobs.values() if job.worker_id == worker_id]

    def take(self, lease: Lease, worker_id: WorkerId) -> None:
        """Begin with a lease; its slot is in use from now on."""
        job = Job(lease=lease, worker_id=worker_id, received_at=self._clock.monotonic())
        key = (lease.action.action_id, lease.fence)
        if key in self._jobs:
            return  # the ledger repeats itself; we have it already
        self._jobs[key] = job
        meter = self._meters.classes.get(lease.action.worker_class)
        if meter is not None:
            meter.take(self._clock.monotonic())
        job.task = asyncio.create_task(self._carry(job), name=f"job {lease.action.action_id}")
        job.task.add_done_callback(lambda _: self._over(key))
        if lease.alone:
            self._make_room(job)

    def give_back(self, lease: Lease, worker_id: WorkerId) -> None:
        """Return a lease at once, without beginning."""
        key = (lease.action.action_id, lease.fence)
        if key not in self._jobs:  # else the ledger repeats itself, and the job goes on
            self.take(lease, worker_id)
            self._jobs[key].stop(StopReason.RELEASE)

    def revoke(self, action_ids: Iterable[ActionId]) -> None:
        """Stop what the ledger has taken away; it is told when each has been let go."""
        wanted = set(action_ids)
        for job in list(self._jobs.values()):
            if job.lease.action.action_id in wanted:
                job.stop(StopReason.CANCEL)

    def stop(self, reason: StopReason, *phases: Phase) -> None:
        """Stop every job that does not report yet (and is in one of ``phases``, when given).

        One that is *starting* may have been counted: it is never simply given back.
        """
        for job in self._all():
            if not phases or job.phase in phases:
                job.stop(reason)

    async def quiet(self, *, running_only: bool = False) -> None:
        """Wait until no job is left (or none that still works)."""
        while any(not running_only or job.phase is not Phase.REPORTING for job in self._all()):
            self.changed.clear()
            await self.changed.wait()

    async def seen_out(self, action_id: ActionId) -> bool:
        """Wait for the end of the job; return whether it leaves nothing to be done again.

        **Cancellation:** the job goes on.
        """
        jobs = [job for (i, _), job in self._jobs.items() if i == action_id]
        tasks = [job.task for job in jobs if job.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        undone = (StopReason.RELEASE, StopReason.FENCED, StopReason.KILLED)
        return not any(job.stopped in undone for job in jobs)

    def _all(self) -> list[Job]:
        return list(self._jobs.values())

    def _make_room(self, suspect: Job) -> None:
        """Give back what has not begun: it must not die with a suspect (B18)."""
        for job in self._all():
            if job is not suspect and job.phase is Phase.WAITING and not job.lease.alone:
                job.stop(StopReason.RELEASE)

    def _over(self, key: tuple[ActionId, int]) -> None:
        self._jobs.pop(key, None)
        self.changed.set()

    async def _carry(self, job: Job) -> None:
        job.entered = True
        completion = None
        try:
            try:
                if job.stopped is None:
                    completion = await self._perform(job)
            finally:
                self._free_slot(job)
        except asyncio.CancelledError:
            if job.stopped is None:
                raise
        if completion is not None:
            await self._report(job, completion)
        elif job.stopped is not None:
            await self._let_go(job)

    async def _perform(self, job: Job) -> Completion | None:
        lease = job.lease
        async with (
            self.environments.turn(lease.action.environment_id),
            self._gate.passing(alone=lease.alone),
        ):
            if not await self._begin(job):
                return None
            job.phase = Phase.RUNNING
            left = job.left_seconds(self._clock.monotonic())
            completion = await self._executor.execute(
                Attempt(
                    action=lease.action,
                    fence=lease.fence,
                    attempt=lease.attempt,
                    worker_id=job.worker_id,
                    queue_seconds=lease.queue_seconds,
                    clock=self._clock,
                    trusted=lambda: self._contact.trusted(self._clock.monotonic()),
                    limit_seconds=max(0.0, min(lease.action.timeout_seconds, left)),
                )
            )
            # Set before any other await: from here on nothing may take the result away.
            job.phase = Phase.REPORTING
            reach(EXECUTED)
            return completion

    async def _begin(self, job: Job) -> bool:
        """Return whether effects may begin now: a fresh *ok* that was read in time."""
        job.phase = Phase.STARTING
        while True:
            try:
                verdict, asked_at = await self._reports.start(Hold(job.worker_id, job.held))
            except LedgerUnavailable:
                # Asked again for as long as we live: the first asking may have counted.
                await asyncio.sleep(jittered(RETRY_SECONDS))
                continue
            except StokerError as error:
                self._log.error("start_refused", action=job.held.action_id, error=error.message)
                verdict, asked_at = HoldVerdict.CANCEL, self._clock.monotonic()
            if verdict is HoldVerdict.CANCEL:
                await self._reports.release(Hold(job.worker_id, job.held))
            if verdict is not HoldVerdict.OK:
                return False
            if self._contact.verdict_holds(asked_at, self._clock.monotonic()):
                return True
            self._log.warning("verdict_too_old", action=job.lease.action.action_id)

    async def _let_go(self, job: Job) -> None:
        """Tell the ledger what it should know of a stopped job."""
        self._log.info(
            "stopped", action=job.lease.action.action_id, reason=job.stopped, fence=job.lease.fence
        )
        if job.stopped in (StopReason.CANCEL, StopReason.RELEASE):
            reach(RELEASED)
            await self._reports.release(Hold(job.worker_id, job.held))

    async def _report(self, job: Job, completion: Completion) -> None:
        disposition = await self._reports.complete(completion)
        self._meters.completed(job.lease.action.worker_class, completion)
        if disposition is CompleteDisposition.STALE:
            self._meters.stale += 1
            self._log.warning("stale_result", action=completion.action_id, fence=completion.fence)
            environment_id = job.lease.action.environment_id
            if environment_id is not None:
                self.environments.disown(environment_id, completion.fence)
        self._log.info(
            "finished",
            action=completion.action_id,
            tool=job.lease.action.tool,
            status=completion.status,
            attempt=completion.attempt,
            disposition=disposition,
            run_seconds=round(completion.timings.run_seconds, 6),
            fault=completion.fault.code if completion.fault else None,
        )

    def _free_slot(self, job: Job) -> None:
        meter = self._meters.classes.get(job.lease.action.worker_class)
        if meter is not None:
            meter.give(self._clock.monotonic())
        # One turn later: the result goes on the wire before the poll for the next lease, and the
        # ledger takes both in one group.
        asyncio.get_running_loop().call_soon(self.changed.set)
