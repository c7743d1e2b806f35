"""The shipped in-memory engine: the whole ledger in one asyncio process.

For tests and simulation: the same service, rows and decisions as the durable engine, without disk
or sockets. Waiting uses the running loop's clock, expiry the clock it is given, so that it runs
under a virtual-time loop whose clock is that same time.
"""

import asyncio

from stoker.broker.base import (
    Durability,
    Held,
    LeaseReply,
    LeaseRequest,
    LedgerLimits,
    Poll,
    ReleaseRequest,
    Request,
)
from stoker.broker.exchange import Answer, Exchange, Pending
from stoker.broker.service import LedgerService, Reply
from stoker.broker.store import Store
from stoker.broker.store_memory import MemoryStore
from stoker.broker.verbs import LedgerVerbs
from stoker.errors import LedgerUnavailable, StokerError
from stoker.seams.clock import Clock, SystemClock

_WAKE_SECONDS_MIN = 0.001


class MemoryLedger(LedgerVerbs):
    """A ledger in this process; nothing survives it.

    ``store`` lets a test reopen what an earlier one left behind; ``service`` puts another engine's
    verbs in this process.
    """

    def __init__(
        self,
        limits: LedgerLimits | None = None,
        clock: Clock | None = None,
        store: Store | None = None,
        durability: Durability = Durability.MEMORY,
        service: LedgerService | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._service = service or LedgerService(
            store or MemoryStore(), limits or LedgerLimits(), durability
        )
        self._service.open(self._clock.now(), boot_id="memory", lineage="lin_memory")
        self._exchange = Exchange(self._service)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def ask(self, request: Request) -> Reply:
        """Carry out one request; a poll waits on the loop's clock."""
        if self._closed:
            raise LedgerUnavailable("this ledger was closed; nothing was sent")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        pending = Pending(request, lambda answer: self._resolve(request, future, answer))
        self._run([pending])
        if isinstance(request, Poll) and not future.done():
            alarm = loop.call_later(request.wait_seconds, self._exchange.time_out, pending)
            future.add_done_callback(lambda _: alarm.cancel())
        try:
            answer = await future
        except asyncio.CancelledError:
            self._exchange.forget(pending)
            if future.done() and not future.cancelled():
                self._give_back(request, future.result())
            raise
        if isinstance(answer, StokerError):
            raise answer
        return answer

    def _resolve(self, request: Request, future: "asyncio.Future[Answer]", answer: Answer) -> None:
        if not future.done():
            future.set_result(answer)
        else:  # its caller was cancelled a moment ago and has not run since
            asyncio.get_running_loop().call_soon(self._give_back, request, answer)

    def _give_back(self, request: Request, answer: Answer) -> None:
        """Release leases that were granted to a caller who had just been cancelled."""
        if isinstance(request, LeaseRequest) and isinstance(answer, LeaseReply) and answer.leases:
            held = tuple(Held(one.action.action_id, one.fence) for one in answer.leases)
            release = ReleaseRequest(worker_id=request.worker_id, held=held)
            self._run([Pending(release, lambda _: None)])

    def tick(self) -> None:
        """Let time pass now: for callers whose clock does not move with the loop's."""
        self._run([])

    def _run(self, group: list[Pending]) -> None:
        now = self._clock.now()
        self._exchange.run(group, now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake = self._exchange.next_wake()
        if wake is not None and not self._closed:
            delay = max(_WAKE_SECONDS_MIN, wake - now.boot)
            self._timer = asyncio.get_running_loop().call_later(delay, self.tick)

    async def close(self) -> None:
        """Stop the ledger's timer; waiting polls stay unanswered."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
