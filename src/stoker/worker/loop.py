"""The worker: enrols, polls for work per class, keeps its leases alive, and knows when to give up.

Invariants: a poll never asks for more than the free slots of its class; one class's jobs never use
another's slots (A24); heartbeats wait for nothing but the ledger; after two thirds of a lease
without contact every box is killed, every environment given up, and the worker goes on as another
incarnation (DESIGN §4). No poll is ever cancelled while the worker serves: a lease in a lost reply
would belong to nobody.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress

import msgspec
from structlog.typing import FilteringBoundLogger

from stoker.broker.base import (
    Enroll,
    HeartbeatRequest,
    HoldVerdict,
    Lease,
    LeaseRequest,
    Ledger,
)
from stoker.errors import LedgerRefused, LedgerUnavailable, StokerError
from stoker.model.ids import ActionId, WorkerId
from stoker.seams.clock import Clock
from stoker.seams.entropy import jittered
from stoker.seams.faultpoints import declare, reach

from .boxes import Boxes
from .contact import BEAT_SHARE, WATCH_SHARE, Contact
from .figures import Meters, WorkerFigures
from .hands import Hands
from .home import Home
from .jobs import Phase, StopReason
from .reports import RETRY_SECONDS, Reports

POLL_SECONDS = 5.0
"""Longest long poll; work and revocations end one at once."""
STATUS_SECONDS = 1.0
_ROOM_SECONDS = 0.25
"""Between two looks at the host's memory while it is short."""
_EMPTY_SECONDS = 0.05
"""Pause after a poll that was answered with nothing before its time: it must not spin."""
_FLUSH_SECONDS = 1.0
"""What a process that was stopped gives to work that ended meanwhile, to be read and handed in."""

BEAT_BEFORE = declare("worker.beat.before", "a sign of life is about to be sent")
ENROLLED = declare("worker.enrolled", "the ledger knows this incarnation; nothing is leased")
LEASED = declare("worker.leased", "leases have arrived and nothing of them has begun")


class Worker:
    """One worker process, over its incarnations."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        home: Home,
        boxes: Boxes,
        make_hands: Callable[[Reports, Contact], Hands],
        meters: Meters,
        clock: Clock,
        log: FilteringBoundLogger,
    ) -> None:
        self._ledger = ledger
        self._home = home
        self._boxes = boxes
        self._meters = meters
        self._clock = clock
        self._log = log
        self._contact = Contact(1.0, clock.monotonic())
        self._reports = Reports(ledger, clock, log)
        self._hands = make_hands(self._reports, self._contact)
        self._environments = self._hands.environments
        self._fencing = False
        self._draining = asyncio.Event()
        self._killing = asyncio.Event()
        self._serving = asyncio.Event()
        self._last_lease = clock.monotonic()
        self.state = "starting"

    @property
    def idle_seconds(self) -> float:
        """For how long nothing was leased and nothing is in hand."""
        return 0.0 if len(self._hands) else self._clock.monotonic() - self._last_lease

    @property
    def silent_seconds(self) -> float:
        """For how long the ledger has not answered."""
        return self._contact.silence(self._clock.monotonic())

    def drain(self) -> None:
        """Take nothing new, give back what has not begun, finish the rest, end."""
        self._draining.set()

    def kill(self) -> None:
        """Stop everything now and end."""
        self._draining.set()
        self._killing.set()

    def figures(self) -> WorkerFigures:
        """Return this worker, now."""
        now = self._clock.monotonic()
        meters = self._meters
        return WorkerFigures(
            worker_id=self._home.worker_id,
            name=self._home.name,
            pid=os.getpid(),
            state=self.state,
            classes={name: meter.figures(now) for name, meter in meters.classes.items()},
            boxes_alive=self._boxes.alive,
            boxes_leaked=self._boxes.leaked,
            boxes_ready=len(self._boxes.ready),
            boxes_taken=self._boxes.ready.taken,
            boxes_made=self._boxes.made,
            boxes_swept=meters.swept,
            environments=len(self._environments),
            faults=dict(meters.faults),
            memory_short=not self._boxes.has_room(),
            stale=meters.stale,
            fenced=meters.fenced,
        )

    async def run(self, *, polling: bool = True) -> None:
        """Serve until told to end; without ``polling`` only what is brought by ticket.

        **Cancellation:** every box is killed; leases are left to run out.
        """
        await self._enroll()
        loops = [self._beating(), self._watching(), self._revocations(), self._showing()]
        if polling:
            loops += [self._polling(name) for name in self._meters.classes]
        tasks = [asyncio.create_task(self._guarded(loop)) for loop in loops]
        ending = asyncio.create_task(self._ended())
        try:
            self.state = "working"
            self._serving.set()
            done, _ = await asyncio.wait({ending, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a loop that failed is a bug: say so instead of serving lamely
        finally:
            for task in (ending, *tasks):
                task.cancel()
            await asyncio.gather(ending, *tasks, return_exceptions=True)
            await self._finish()

    async def _guarded(self, loop: Coroutine[None, None, None]) -> None:
        """A loop ends only with the worker."""
        await loop
        await self._draining.wait()
        await asyncio.Event().wait()

    async def _ended(self) -> None:
        """Return when the worker was told to end and nothing is in hand."""
        await self._draining.wait()
        self.state = "draining"
        self._hands.changed.set()
        self._hands.stop(StopReason.RELEASE, Phase.WAITING)
        quiet = asyncio.create_task(self._hands.quiet())
        killing = asyncio.create_task(self._killing.wait())
        await asyncio.wait({quiet, killing}, return_when=asyncio.FIRST_COMPLETED)
        quiet.cancel()
        killing.cancel()

    async def _finish(self) -> None:
        """Leave nothing behind: no process, no box, no lease in a reply nobody read."""
        self._hands.stop(StopReason.KILLED)
        await self._hands.quiet(running_only=True)
        self._environments.drop_all()
        await self._boxes.close()
        try:
            async with asyncio.timeout(RETRY_SECONDS * 8):
                await self._hands.quiet()
                self._home.renew()
                await self._ledger.enroll(self._introduction({}))
                self._note(self._home.remember)
        except (StokerError, TimeoutError) as error:
            self._log.warning("leases_left_to_run_out", error=str(error))
        self.state = "ended"
        self._show()

    def _introduction(self, slots: Mapping[str, int]) -> Enroll:
        return Enroll(
            worker_id=self._home.worker_id,
            name=self._home.name,
            slots=dict(slots),
            replaces=self._home.previous,
        )

    async def _enroll(self) -> None:
        """Make this incarnation known, however long that takes."""
        slots = {name: meter.slots for name, meter in self._meters.classes.items()}
        while True:
            sent_at = self._clock.monotonic()
            try:
                enrolled = await self._ledger.enroll(self._introduction(slots))
            except LedgerUnavailable as error:
                self._log.warning("ledger_unavailable", error=error.message)
                await asyncio.sleep(jittered(RETRY_SECONDS))
                continue
            break
        self._note(self._home.remember)
        self._contact.lease_seconds = enrolled.lease_seconds
        self._contact.heard(sent_at)
        self._log.info("enrolled", worker_id=self._home.worker_id, replaces=self._home.previous)
        reach(ENROLLED)

    # --- polling ---------------------------------------------------------------------------

    async def _polling(self, name: str) -> None:
        """Keep one long poll open while the class has free slots."""
        meter = self._meters.classes[name]
        while not self._draining.is_set():
            if meter.free == 0 or self._fencing or self._hands.alone:
                await self._change()
            elif not self._boxes.has_room():
                await asyncio.sleep(_ROOM_SECONDS)
            else:
                await self._poll(self._asked({name: meter.free}))

    async def _revocations(self) -> None:
        """Keep a poll open that asks for nothing, so that a cancel arrives while slots are full."""
        while not self._draining.is_set():
            if self._fencing:
                await self._change()
                continue
            await self._poll(self._asked({}))

    async def bring(self, action_id: ActionId) -> bool:
        """Lease this one action and begin with it, or answer ``False``: it is not to be had.

        **Cancellation:** a lease that was on its way is given back.
        """
        await self._serving.wait()
        while self._fencing:
            await self._change()
        if self._draining.is_set() or not self._boxes.has_room():
            return False
        classes = dict.fromkeys(self._meters.classes, 1)
        leased = await self._poll(
            LeaseRequest(worker_id=self._home.worker_id, slots=classes, action_ids=(action_id,))
        )
        return any(one.action.action_id == action_id for one in leased)

    async def seen_out(self, action_id: ActionId) -> bool:
        """Wait until this worker has nothing more to do with an action it began with.

        Returns whether that was for good: reported, or the ledger gave it up; not when it was
        given back, or killed with its worker's other work.
        """
        return await self._hands.seen_out(action_id)

    async def quiet(self) -> None:
        """Wait until nothing is in hand."""
        await self._hands.quiet()

    async def _change(self) -> None:
        self._hands.changed.clear()
        await self._hands.changed.wait()

    def _asked(self, slots: dict[str, int]) -> LeaseRequest:
        worker_id, wait = self._home.worker_id, self._poll_seconds
        return LeaseRequest(worker_id=worker_id, slots=slots, wait_seconds=wait)

    async def _poll(self, request: LeaseRequest) -> tuple[Lease, ...]:
        """Ask once and take what comes; return it."""
        worker_id = request.worker_id
        sent_at = self._clock.monotonic()
        try:
            reply = await self._ledger.lease(request)
        except LedgerRefused as error:
            await self._disowned(worker_id, error)
            return ()
        except StokerError as error:
            self._log.warning("poll_failed", error=error.message)
            await asyncio.sleep(jittered(RETRY_SECONDS))
            return ()
        if worker_id != self._home.worker_id:
            return ()  # leased to an incarnation that is over; its leases ended with it
        self._contact.heard(sent_at)
        self._hands.revoke(reply.revoked)
        if reply.leases:
            reach(LEASED)
            self._take(reply.leases, worker_id)
        elif self._clock.monotonic() - sent_at < request.wait_seconds / 2 and not reply.revoked:
            await asyncio.sleep(_EMPTY_SECONDS)
        return reply.leases

    @property
    def _poll_seconds(self) -> float:
        return min(POLL_SECONDS, self._contact.lease_seconds / 2)

    def _take(self, leases: tuple[Lease, ...], worker_id: WorkerId) -> None:
        self._last_lease = self._clock.monotonic()
        unwanted = self._draining.is_set() or self._fencing or self._hands.alone
        # Suspects first, so that what came with one is given back instead of begun beside it.
        for lease in sorted(leases, key=lambda one: not one.alone):
            if unwanted or (self._hands.alone and not lease.alone):
                self._hands.give_back(lease, worker_id)
            else:
                self._hands.take(lease, worker_id)

    # --- proof of life ---------------------------------------------------------------------

    async def _beating(self) -> None:
        while True:
            if not self._fencing:
                await self._beat()
            await asyncio.sleep(self._contact.lease_seconds * BEAT_SHARE)

    async def _beat(self) -> None:
        worker_id = self._home.worker_id
        jobs = self._hands.of(worker_id)
        sent_at = self._clock.monotonic()
        request = HeartbeatRequest(worker_id=worker_id, held=tuple(job.held for job in jobs))
        reach(BEAT_BEFORE)
        try:
            reply = await self._ledger.heartbeat(request)
        except LedgerRefused as error:
            await self._disowned(worker_id, error)
            return
        except StokerError as error:
            self._log.warning("heartbeat_failed", error=error.message)
            return
        if worker_id != self._home.worker_id:
            return
        self._contact.heard(sent_at)
        for job, verdict in zip(jobs, reply.verdicts, strict=True):
            if verdict is HoldVerdict.LOST:
                job.stop(StopReason.LOST)
            elif verdict is HoldVerdict.CANCEL:
                job.stop(StopReason.CANCEL)

    async def _watching(self) -> None:
        """Look at the own clock: for silence of the ledger, and for having been stopped."""
        while True:
            await asyncio.sleep(self._contact.lease_seconds * WATCH_SHARE)
            now = self._clock.monotonic()
            gap = self._contact.look(now)
            if self._fencing or self._contact.trusted(now):
                continue
            stopped = gap > self._contact.lease_seconds * BEAT_SHARE
            await self._fence(f"no answer for {self._contact.silence(now):.1f} s", stopped=stopped)

    async def _disowned(self, worker_id: WorkerId, error: StokerError) -> None:
        """The ledger does not know this incarnation any more: neither do we."""
        if worker_id == self._home.worker_id and not self._fencing:
            await self._fence(f"disowned: {error.message}")
        else:
            await asyncio.sleep(jittered(RETRY_SECONDS))

    async def _fence(self, why: str, *, stopped: bool = False) -> None:
        """Kill every box, give up every environment, go on as somebody else.

        ``stopped``: this process was stopped for a while and its boxes were not. Nothing begins
        any more, but what they finished meanwhile is read first: the ledger decides what it is
        worth (B2).
        """
        self._fencing = True
        self._meters.fenced += 1
        self._log.error("fenced", worker_id=self._home.worker_id, why=why, jobs=len(self._hands))
        try:
            if stopped:
                self._hands.stop(StopReason.FENCED, Phase.WAITING, Phase.STARTING)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_FLUSH_SECONDS):
                        await self._hands.quiet(running_only=True)
            self._hands.stop(StopReason.FENCED)
            await self._hands.quiet(running_only=True)
            self._environments.drop_all()
            # Results earned so far go in under the old name, before it is declared over.
            await self._hands.quiet()
            self._home.renew()
            await self._enroll()
        finally:
            self._fencing = False
            self._hands.changed.set()

    # --- being seen ------------------------------------------------------------------------

    async def _showing(self) -> None:
        while True:
            self._boxes.ready.tend()
            self._adapt()
            self._show()
            await asyncio.sleep(STATUS_SECONDS)

    def _adapt(self) -> None:
        now, short = self._clock.monotonic(), not self._boxes.has_room()
        pressure = self._boxes.cpu_pressure()
        for name, meter in self._meters.classes.items():
            change = meter.adapt(now, memory_short=short, pressure=pressure)
            if change is not None:
                self._log.info("slots_changed", worker_class=name, **msgspec.structs.asdict(change))
                self._hands.changed.set()

    def _show(self) -> None:
        self._note(lambda: self._home.write_status(self.figures()))

    def _note(self, write: Callable[[], None]) -> None:
        """Write one of our small files; a full disk costs its readers, never the work."""
        try:
            write()
        except OSError as error:
            self._log.warning("file_not_written", error=str(error))
