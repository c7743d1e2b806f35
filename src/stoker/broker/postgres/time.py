"""Time in a ledger that several gateways serve: the server's clock, and one keeper of it.

All instants are the database server's. A gateway goes on counting with its own monotonic clock
from the last time the server told it the time, so a group costs no question. Silence and deadlines
are watched by one gateway at a time, the one that holds an advisory lock; a new keeper gives every
worker a fresh lease's time, as a restarted owner does: it cannot know who was cut off from whom.
"""

from stoker.broker.base import HeartbeatRequest, Held, HoldReply, HoldVerdict
from stoker.broker.core import expire
from stoker.broker.expiry import Expiry
from stoker.broker.postgres.books import Beat, GroupBooks
from stoker.model.ids import ActionId, Fence
from stoker.seams.clock import Clock, Instant, SystemClock

TICK_SECONDS = 1.0
"""How often the keeper looks, and how long a wake-up that was lost with a gateway can delay."""
FORGET_SECONDS = 86_400.0
"""How long a lost incarnation is kept; one that comes back by then is told that it ended."""
_FORGET_BATCH = 1000
_DUE_BATCH = 1000


class ServerClock:
    """The database server's clock, as this gateway knows it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._ahead = 0.0

    def monotonic(self) -> float:
        """Return our own monotonic clock, seconds."""
        return self._clock.monotonic()

    def now(self) -> Instant:
        """Return the server's time; the two clocks of an instant are one here."""
        moment = self._clock.monotonic() + self._ahead
        return Instant(moment, moment)

    def told(self, seconds: float) -> None:
        """Take the server's word."""
        self._ahead = seconds - self._clock.monotonic()


class KeptTime(Expiry):
    """``Expiry`` over rows: what time does to the ledger, by whoever keeps it."""

    def __init__(self, books: GroupBooks, calm_until: float) -> None:
        super().__init__(books, calm_until)
        self._rows = books

    def tick(self, now: Instant) -> None:
        """End and lose whatever is due at ``now`` and in nobody else's transaction."""
        books = self._rows
        lease_seconds = books.limits.lease_seconds
        if now.boot >= self._calm_until:
            for found in books.store.all("lock_silent", now.boot - lease_seconds):
                record = books.worker(found[0], now.boot)
                record.read(found)
                self.lose_worker(
                    record, f"its worker was silent for {now.boot - record.seen:.1f} s"
                )
        books.flush()
        books.store.run("forget_workers", (now.boot - FORGET_SECONDS, _FORGET_BATCH))
        while due := books.store.due(now.boot, _DUE_BATCH):
            for row in books.current(due):
                books.apply(row, expire(row))
            books.flush()
        if books.parked_rollouts:  # an action that ended beside the parking one relieved nobody
            books.relieved |= {rollout for (rollout,) in books.store.all("parked_rollouts")}

    def heartbeat(self, request: HeartbeatRequest, now: Instant) -> HoldReply:
        """Answer a heartbeat: rows are only looked at, and locked where one is to be lost."""
        record = self._rows.worker(request.worker_id, now.boot)
        worker_id = request.worker_id
        found = self._rows.store.all("held_now", worker_id, worker_id)
        named = {one.action_id: one.fence for one in request.held}
        missing: dict[ActionId, float] = {}
        for action_id, fence, reclaim_fence, handed in found:
            if named.get(action_id) != (fence or reclaim_fence):
                since = record.missing.get(action_id, max(handed, record.beat))
                missing[action_id] = min(since, now.boot)  # the clock may have been set back
        patience = self._rows.limits.lease_seconds
        if now.boot >= self._calm_until:
            overdue = [i for i, since in missing.items() if now.boot - since >= patience]
            for row in self._rows.rows(overdue).values():
                if row.bearer == worker_id and named.get(row.action_id) != row.fence:
                    why = "its worker no longer names it"
                    self._let_go(row, why, crowd=False, worker_gone=False)
                    del missing[row.action_id]
        record.beat, record.missing = now.boot, missing
        fences = {i: (Fence(fence), Fence(reclaim)) for i, fence, reclaim, _ in found}
        return HoldReply(verdicts=tuple(self._verdict(fences, one) for one in request.held))

    def _verdict(self, fences: dict[ActionId, tuple[Fence, Fence]], held: Held) -> HoldVerdict:
        fence, reclaim_fence = fences.get(held.action_id, (Fence(0), Fence(0)))
        if not held.fence or held.action_id not in fences:
            return HoldVerdict.LOST
        if fence == held.fence:
            return HoldVerdict.OK
        return HoldVerdict.CANCEL if reclaim_fence == held.fence else HoldVerdict.LOST


__all__ = ["TICK_SECONDS", "Beat", "KeptTime", "ServerClock"]
