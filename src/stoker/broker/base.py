"""The ledger's contract: verbs, requests, replies. One suite holds every engine to it.

All verbs are batched and idempotent. *Synced before reply* (power-safe mode): ``append`` with
submits or an outcome, ``complete``, ``cancel``, ``start`` of external actions. Every reply follows
the commit of what it tells. Invariants I1-I13 are in DESIGN §4; tests cite them by number.

Times in requests are durations in seconds; only the ledger's owner reads a clock.
"""

from enum import StrEnum
from typing import Protocol

import msgspec

from stoker.broker.claims import Claim, ClaimReply, ClaimRequest
from stoker.broker.leasing import (
    CompleteDisposition,
    CompleteReply,
    CompleteRequest,
    HeartbeatRequest,
    Held,
    HoldReply,
    HoldVerdict,
    Lease,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    StartRequest,
    Ticket,
    TicketsReply,
    TicketsRequest,
)
from stoker.broker.operating import OperatorRequest
from stoker.broker.rates import ServiceRate
from stoker.broker.reading import (
    ActionsReply,
    ActionsRequest,
    ActionView,
    CapabilitiesRequest,
    ClassStats,
    DeadLettersRequest,
    JournalReply,
    JournalRequest,
    RolloutsReply,
    RolloutsRequest,
    RolloutSummary,
    RunStats,
    ServiceStats,
    StatsReply,
    StatsRequest,
    WorkerStats,
)
from stoker.model.action import Action
from stoker.model.completion import Completion
from stoker.model.ids import ActionId, Fence, RolloutId, RunId, WorkerId

__all__ = [
    "ActionView",
    "ActionsReply",
    "ActionsRequest",
    "Append",
    "AppendBatch",
    "AppendBatchReply",
    "AppendDisposition",
    "AppendReply",
    "Attach",
    "Attached",
    "Cancel",
    "CancelDisposition",
    "CancelReply",
    "Capabilities",
    "CapabilitiesRequest",
    "Claim",
    "ClaimReply",
    "ClaimRequest",
    "ClassStats",
    "CompleteDisposition",
    "CompleteReply",
    "CompleteRequest",
    "DeadLettersRequest",
    "Durability",
    "Enroll",
    "Enrolled",
    "EventsReply",
    "EventsRequest",
    "HeartbeatRequest",
    "Held",
    "HoldReply",
    "HoldVerdict",
    "JournalReply",
    "JournalRequest",
    "Lease",
    "LeaseReply",
    "LeaseRequest",
    "Ledger",
    "LedgerEvent",
    "LedgerEventKind",
    "LedgerLimits",
    "Poll",
    "ReleaseRequest",
    "Request",
    "RolloutSummary",
    "RolloutsReply",
    "RolloutsRequest",
    "RunStats",
    "ServiceRate",
    "ServiceStats",
    "StartRequest",
    "StatsReply",
    "StatsRequest",
    "SubmitDisposition",
    "Ticket",
    "TicketsReply",
    "TicketsRequest",
    "WorkerStats",
]


class Durability(StrEnum):
    """What survives what, from the weakest to the strongest."""

    MEMORY = "memory"
    """Nothing survives the process: tests and simulation."""
    PROCESS_SAFE = "process-safe"
    """Survives the death of any process; a power cut may lose the last moments."""
    POWER_SAFE = "power-safe"
    """What was replied survives a power cut."""
    REPLICATED = "replicated"
    """It survives the loss of the machine too: a standby has it before the reply."""

    def keeps(self, asked: "Durability") -> bool:
        """Whether this is at least as much as ``asked``."""
        strength = list(Durability)
        return strength.index(self) >= strength.index(asked)


class LedgerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Caps (I6) and lease lengths of one ledger."""

    queued_max: int = 100_000
    """Queued and leased actions together; more are parked."""
    queued_per_class_max: int = 50_000
    results_max: int = 10_000
    """Unacknowledged results plus leases (each lease reserves its result's slot)."""
    outstanding_per_rollout_max: int = 256
    ticket_classes: tuple[str, ...] = ()
    """Worker classes that a queue of the team's own hands out: leased by id only, never by a poll
    for slots."""
    queued_per_run_max: int | None = None
    """Quota of each run: queued and leased; more are parked. ``None``: no quota."""
    leased_per_run_max: int | None = None
    """Quota of each run: in workers' hands at once. ``None``: no quota."""
    services: dict[str, ServiceRate] = {}
    """Remote services by name, and the most that all workers together ask of each."""
    class_services: dict[str, str] = {}
    """Worker class → the service that its actions use."""
    lease_seconds: float = 10.0
    """A worker silent for this long loses its leases."""
    grace_seconds: float = 10.0
    """After a restart nothing expires for this long."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, tag="capabilities_reply"):
    """What an engine can promise; a coordinator refuses one weaker than its configuration."""

    engine: str
    durability: Durability
    value_bytes_max: int
    limits: LedgerLimits
    lineage: str
    """Identity of this ledger; renewed when it is restored without certainty (I3)."""
    advice: tuple[str, ...] = ()
    """What would make it safer or faster, a sentence each."""


# --- coordinator's verbs -------------------------------------------------------------------


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """Become the coordinator of a partition; fences whoever was before (B7)."""

    run_id: RunId
    partition: str = "0"
    incarnation: str
    """Fresh id of this coordinator process; attaching twice with one is idempotent."""


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag="attached"):
    """The partition is yours while no newer fence exists."""

    fence: Fence
    capabilities: Capabilities


class Append(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One rollout's next journal entries, what they submit and acknowledge: one transaction."""

    rollout_id: RolloutId
    expected_seq: int
    """Entries this rollout's journal has now (I11). Repeating an append that was applied gives
    ``already``; anything else that does not fit is a conflict."""
    events: tuple[bytes, ...] = ()
    """Encoded journal events, opaque to the ledger."""
    submits: tuple[Action, ...] = ()
    acknowledges: tuple[ActionId, ...] = ()
    finished: bool = False
    """The last event is the rollout's outcome: synced before reply."""


class AppendBatch(msgspec.Struct, frozen=True, kw_only=True, tag="append"):
    """Appends of many rollouts of one partition."""

    run_id: RunId
    partition: str = "0"
    fence: Fence
    appends: tuple[Append, ...]
    sync: bool = False
    """Force a sync even where the rules would allow a lazy commit."""


class SubmitDisposition(StrEnum):
    """What became of one submit."""

    ACCEPTED = "accepted"
    PARKED = "parked"
    DUPLICATE = "duplicate"
    """Same key, same digest: the action is already there (I7)."""
    CONFLICT = "conflict"
    """Same key, another digest: rejected (I7)."""


class AppendDisposition(StrEnum):
    """What became of one append."""

    APPLIED = "applied"
    ALREADY = "already"
    CONFLICT = "conflict"
    """``expected_seq`` does not fit: a bug or a fenced writer; nothing was applied."""


class AppendReply(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Result of one append."""

    disposition: AppendDisposition
    seq: int
    """Entries the journal has now."""
    submits: tuple[SubmitDisposition, ...] = ()


class AppendBatchReply(msgspec.Struct, frozen=True, kw_only=True, tag="appended"):
    """Results in the order of the appends."""

    replies: tuple[AppendReply, ...]


class LedgerEventKind(StrEnum):
    """What the ledger tells a coordinator."""

    COMPLETED = "completed"
    """An action reached its terminal state (I8); carries the completion."""
    LATE = "late"
    """A stale result came; recorded, with the disposition in ``detail`` (I4)."""
    REQUEUED = "requeued"
    """A lease was lost or released; ``detail`` says why."""
    RECLAIMED = "reclaimed"
    """A cancelled action's worker has let go of it (I10)."""


class LedgerEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One event; ids rise and are never reused."""

    event_id: int
    kind: LedgerEventKind
    action_id: ActionId
    rollout_id: RolloutId
    completion: Completion | None = None
    detail: str = ""


class EventsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="events"):
    """Long poll: events of this partition after ``after``.

    From 0 on a completed event is delivered again until its action is acknowledged.
    """

    run_id: RunId
    partition: str = "0"
    fence: Fence
    after: int = 0
    limit: int = 1000
    wait_seconds: float = 0.0


class EventsReply(msgspec.Struct, frozen=True, kw_only=True, tag="events_reply"):
    """Events in order."""

    events: tuple[LedgerEvent, ...]


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """End actions at once (I10): first commit wins."""

    run_id: RunId
    partition: str = "0"
    fence: Fence
    action_ids: tuple[ActionId, ...] = ()
    rollout_ids: tuple[RolloutId, ...] = ()
    """All unfinished actions of these rollouts."""
    reason: str = ""


class CancelDisposition(StrEnum):
    """What a cancel found."""

    CANCELLED = "cancelled"
    TOO_LATE = "too_late"
    UNKNOWN = "unknown"


class CancelReply(msgspec.Struct, frozen=True, kw_only=True, tag="cancel_reply"):
    """Per action that was named or found."""

    dispositions: dict[ActionId, CancelDisposition]


# --- worker's verbs ------------------------------------------------------------------------


class Enroll(msgspec.Struct, frozen=True, kw_only=True, tag="enroll"):
    """A worker incarnation says what it is. Repeating is harmless."""

    worker_id: WorkerId
    name: str
    """Stable name of the worker, over its incarnations."""
    slots: dict[str, int]
    """Worker class → concurrency; for status and idle attribution."""
    replaces: WorkerId | None = None
    """An earlier incarnation *known* to be dead (its lock is free): its leases end now."""


class Enrolled(msgspec.Struct, frozen=True, kw_only=True, tag="enrolled"):
    """What the worker must keep to."""

    lease_seconds: float
    capabilities: Capabilities


Request = (
    Attach
    | AppendBatch
    | EventsRequest
    | Cancel
    | Enroll
    | LeaseRequest
    | TicketsRequest
    | StartRequest
    | HeartbeatRequest
    | CompleteRequest
    | ReleaseRequest
    | JournalRequest
    | RolloutsRequest
    | ActionsRequest
    | DeadLettersRequest
    | StatsRequest
    | ClaimRequest
    | CapabilitiesRequest
    | OperatorRequest
)

Poll = EventsRequest | LeaseRequest | TicketsRequest
"""Requests that may wait; asking again is harmless, so a caller may withdraw one."""


class Ledger(Protocol):
    """An engine as its users see it: asynchronous, batched, idempotent.

    Raises (every verb): ``LedgerUnavailable`` when it cannot be reached and retries are spent;
    ``LedgerFenced`` for a coordinator whose fence is old; ``LedgerRefused`` for a request that does
    not fit. **Cancellation:** a cancelled call may or may not have been carried out;
    repeating it is harmless. **Durability:** see the module.
    """

    async def attach(self, request: Attach) -> Attached:
        """Own a partition."""
        ...

    async def append(self, request: AppendBatch) -> AppendBatchReply:
        """Write journal entries, submit and acknowledge, in one transaction."""
        ...

    async def events(self, request: EventsRequest) -> EventsReply:
        """Wait for what happened to my actions."""
        ...

    async def cancel(self, request: Cancel) -> CancelReply:
        """End actions."""
        ...

    async def enroll(self, request: Enroll) -> Enrolled:
        """Introduce a worker incarnation."""
        ...

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Wait for work."""
        ...

    async def tickets(self, request: TicketsRequest) -> TicketsReply:
        """Wait for what a queue of the team's own should carry."""
        ...

    async def start(self, request: StartRequest) -> HoldReply:
        """Ask to begin work."""
        ...

    async def heartbeat(self, request: HeartbeatRequest) -> HoldReply:
        """Keep leases alive."""
        ...

    async def complete(self, request: CompleteRequest) -> CompleteReply:
        """Hand in results."""
        ...

    async def release(self, request: ReleaseRequest) -> HoldReply:
        """Give back leases."""
        ...

    async def journal(self, request: JournalRequest) -> JournalReply:
        """Read a rollout's journal."""
        ...

    async def rollouts(self, request: RolloutsRequest) -> RolloutsReply:
        """List rollouts."""
        ...

    async def actions(self, request: ActionsRequest) -> ActionsReply:
        """Look at actions."""
        ...

    async def dead_letters(self, request: DeadLettersRequest) -> ActionsReply:
        """List dead letters, with every cause."""
        ...

    async def stats(self) -> StatsReply:
        """Count."""
        ...

    async def claim(self, request: ClaimRequest) -> ClaimReply:
        """Say what one uses of model servers, and hear what others do."""
        ...

    async def capabilities(self) -> Capabilities:
        """Say what is promised."""
        ...

    async def close(self) -> None:
        """Let go of the connection; the ledger itself lives on."""
        ...
