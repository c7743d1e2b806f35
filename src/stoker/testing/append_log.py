"""A bare append-only log behind the ledger's own socket: the floor of ``stoker bench ledger``.

Same wire, same loop, same groups, the same rows written and the same syncs as the ledger, and
nothing else: no tables, no fences, no checks, no way to read it back. What a real ledger costs
beyond this is what its promises cost. Serves the verbs of a cycle only, to one coordinator and one
worker; ``python -m stoker.testing.append_log DIRECTORY``.
"""

import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.broker.base import (
    Append,
    AppendBatch,
    AppendBatchReply,
    AppendDisposition,
    AppendReply,
    Attach,
    Attached,
    Capabilities,
    CapabilitiesRequest,
    CompleteDisposition,
    CompleteReply,
    CompleteRequest,
    Durability,
    Enroll,
    Enrolled,
    EventsReply,
    EventsRequest,
    HeartbeatRequest,
    HoldReply,
    HoldVerdict,
    Lease,
    LeaseReply,
    LeaseRequest,
    LedgerEvent,
    LedgerEventKind,
    LedgerLimits,
    StartRequest,
    SubmitDisposition,
)
from stoker.broker.exchange import Exchange
from stoker.broker.owner import collect_seldom, keep_memory
from stoker.broker.place import SOCKET_PATH
from stoker.broker.server import Server
from stoker.broker.service import NotYet
from stoker.model.action import Action
from stoker.model.ids import Fence
from stoker.seams.clock import Instant, SystemClock

_IDLE_SECONDS = 5.0
_encode = msgspec.msgpack.encode


class AppendLog:
    """Stands in for ``LedgerService`` behind an ``Exchange``; one file, one queue in memory."""

    def __init__(self, file: Path) -> None:
        self.limits = LedgerLimits()
        self.work_seq = self.events_seq = self.tickets_seq = 0
        self.lineage = "lin_log"
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._rows: list[bytes] = []
        self._sync = False
        self._queued: deque[Action] = deque()
        self._told: deque[LedgerEvent] = deque()
        self._rollouts: dict[int, Action] = {}
        self._next = 0
        self._verbs: dict[type, Any] = {
            Attach: lambda _r: Attached(fence=Fence(1), capabilities=self.capabilities()),
            Enroll: lambda _r: Enrolled(lease_seconds=10.0, capabilities=self.capabilities()),
            CapabilitiesRequest: lambda _r: self.capabilities(),
            AppendBatch: self._append,
            EventsRequest: self._events,
            LeaseRequest: self._lease,
            StartRequest: self._start,
            HeartbeatRequest: lambda r: HoldReply(verdicts=(HoldVerdict.OK,) * len(r.held)),
            CompleteRequest: self._complete,
        }

    def capabilities(self) -> Capabilities:
        """Return what is said of it."""
        return Capabilities(
            engine="append-log",
            durability=Durability.POWER_SAFE,
            value_bytes_max=0,
            limits=self.limits,
            lineage=self.lineage,
        )

    def begin(self, requests: Sequence[Any], now: Instant, waiting: Iterable[Any]) -> None:
        """Open a group."""

    def expect(self, polls: Sequence[Any]) -> None:
        """There is nothing to read ahead."""

    def handle(self, request: Any, _now: Instant) -> Any:  # noqa: ANN401 - any verb, any reply
        """Carry out one request."""
        return self._verbs[type(request)](request)

    poll = handle

    def settle(self, now: Instant) -> None:
        """Nothing happens by itself."""

    def commit(self, _meanwhile: Callable[[], None]) -> None:
        """Write the group's rows; sync where the ledger would."""
        if self._rows:
            os.write(self._descriptor, b"".join(self._rows))
            self._rows.clear()
        if self._sync:
            os.fdatasync(self._descriptor)
            self._sync = False

    def next_wake(self) -> float | None:
        """Nothing happens by itself."""
        return None

    def forgive(self, now: Instant) -> None:
        """There are no leases."""

    def _append(self, batch: AppendBatch) -> AppendBatchReply:
        return AppendBatchReply(replies=tuple(self._appended(one) for one in batch.appends))

    def _appended(self, one: Append) -> AppendReply:
        self._rows += one.events
        self._rows += map(str.encode, one.acknowledges)
        for action in one.submits:
            self._rows.append(_encode(action))
            self._queued.append(action)
            self.work_seq += 1
            self._sync = True
        return AppendReply(
            disposition=AppendDisposition.APPLIED,
            seq=one.expected_seq + len(one.events),
            submits=(SubmitDisposition.ACCEPTED,) * len(one.submits),
        )

    def _lease(self, request: LeaseRequest) -> LeaseReply | NotYet:
        count = min(len(self._queued), sum(request.slots.values()))
        leases = [self._leased(self._queued.popleft()) for _ in range(count)]
        return LeaseReply(leases=tuple(leases)) if leases else NotYet()

    def _leased(self, action: Action) -> Lease:
        self._next += 1
        fence = Fence(self._next)
        self._rollouts[fence] = action
        self._rows.append(_encode((action.action_id, fence)))
        return Lease(
            action=action,
            fence=fence,
            delivery=1,
            attempt=1,
            deadline_seconds=action.deadline_seconds,
        )

    def _start(self, request: StartRequest) -> HoldReply:
        self._rows += [_encode((held.action_id, held.fence)) for held in request.held]
        return HoldReply(verdicts=(HoldVerdict.OK,) * len(request.held))

    def _complete(self, request: CompleteRequest) -> CompleteReply:
        for completion in request.completions:
            self._rows.append(_encode(completion))
            self._next += 1
            action = self._rollouts.pop(completion.fence)
            self._told.append(
                LedgerEvent(
                    event_id=self._next,
                    kind=LedgerEventKind.COMPLETED,
                    action_id=action.action_id,
                    rollout_id=action.rollout_id,
                    completion=completion,
                )
            )
        self.events_seq += 1
        self._sync = True
        return CompleteReply(dispositions=(CompleteDisposition.OK,) * len(request.completions))

    def _events(self, request: EventsRequest) -> EventsReply | NotYet:
        if not self._told:
            return NotYet()
        count = min(len(self._told), request.limit)
        return EventsReply(events=tuple(self._told.popleft() for _ in range(count)))


def main(directory: Path) -> int:
    """Serve until nobody has been connected for a while."""
    path = directory / "log.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    listener.setblocking(False)
    log: Any = AppendLog(directory / "append.log")
    server = Server(Exchange(log), listener, SystemClock(), _IDLE_SECONDS)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    (directory / SOCKET_PATH).write_bytes(os.fsencode(path))
    collect_seldom()
    keep_memory()
    server.serve()
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
