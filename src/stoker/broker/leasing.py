"""A worker's leases: how it gets them, what it says under them, and what it is told.

Part of the contract in ``base``, which exports all of it.
"""

from enum import StrEnum

import msgspec

from stoker.model.action import Action
from stoker.model.completion import Completion
from stoker.model.ids import ActionId, Fence, WorkerId


class Lease(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One delivery of one action."""

    action: Action
    fence: Fence
    delivery: int
    """Which hand-out, from 1."""
    attempt: int
    """Which execution this becomes if started, from 1."""
    deadline_seconds: float
    """What is left until the action's deadline."""
    alone: bool = False
    """A suspect of a poison: run nothing else beside it (I5)."""
    queue_seconds: float = 0.0
    """How long it was queued."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    """Long poll for work, never for more than the free slots. Also extends the worker's life."""

    worker_id: WorkerId
    slots: dict[str, int] = {}
    """Worker class → free slots; empty: only wait for revocations."""
    action_ids: tuple[ActionId, ...] = ()
    """Tickets: lease exactly these, as far as they are queued; with ``slots``, only of its classes.
    """
    wait_seconds: float = 0.0


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True, tag="lease_reply"):
    """Work, and leases that are no longer yours: kill what runs under them."""

    leases: tuple[Lease, ...] = ()
    revoked: tuple[ActionId, ...] = ()


class Held(msgspec.Struct, frozen=True, gc=False):
    """One lease a worker believes it has."""

    action_id: ActionId
    fence: Fence


class HoldVerdict(StrEnum):
    """Whether the worker may go on."""

    OK = "ok"
    LOST = "lost"
    CANCEL = "cancel"


class StartRequest(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Work begins only after the reply says ``ok``; counts an attempt (I5, I12)."""

    worker_id: WorkerId
    held: tuple[Held, ...]


class HeartbeatRequest(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Evidence of life for every lease of a worker: one message per worker."""

    worker_id: WorkerId
    held: tuple[Held, ...]


class HoldReply(msgspec.Struct, frozen=True, kw_only=True, tag="hold_reply"):
    """Verdicts in the order asked."""

    verdicts: tuple[HoldVerdict, ...]


class CompleteRequest(msgspec.Struct, frozen=True, kw_only=True, tag="complete"):
    """Results. Never refused for a cap."""

    worker_id: WorkerId
    completions: tuple[Completion, ...]


class CompleteDisposition(StrEnum):
    """What became of one result."""

    OK = "ok"
    ALREADY = "already"
    """The same fence had completed it; nothing changed (B9)."""
    STALE = "stale"
    """The fence is old; recorded, nothing applied (I4, B2)."""
    ADOPTED = "adopted"
    """Stale, and taken under ``late = adopt``."""


class CompleteReply(msgspec.Struct, frozen=True, kw_only=True, tag="complete_reply"):
    """Dispositions in the order given."""

    dispositions: tuple[CompleteDisposition, ...]


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Give back unstarted work (attempt not spent), or report a revoked lease as let go."""

    worker_id: WorkerId
    held: tuple[Held, ...]


class TicketsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="tickets"):
    """Long poll for what somebody else's queue should carry. Reading it changes nothing."""

    mark: str = ""
    """Mark of the last reply: wait until the tickets differ from it."""
    limit: int = 256
    """Tickets of each worker class and run, at most."""
    wait_seconds: float = 0.0


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """One queued action whose class is leased by ticket only."""

    action_id: ActionId
    worker_class: str
    priority: int
    delivery: int
    """Which hand-out it will be, from 1; higher than before after a lease was lost."""


class TicketsReply(msgspec.Struct, frozen=True, kw_only=True, tag="tickets_reply"):
    """The heads of the queues: of each class in ``ticket_classes``, first what should go first.

    What is missing that was there before is leased, over, or behind others now. When nothing has
    changed in time, ``mark`` is the request's and ``tickets`` is left out.
    """

    tickets: tuple[Ticket, ...]
    mark: str
