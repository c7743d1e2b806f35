"""An action's row: everything the ledger knows of one action, as immutable data.

Invariants: a row has a live fence exactly while it is leased or started (I3); ``settled_fence`` and
``settled_status`` are written once, with the terminal state (I2); ``reclaim_fence`` names a lease
that was taken away from a worker who has not yet said that it let go. An acknowledged row is a
*tombstone*: id, digest and fences stay for the life of the ledger, input and result are gone.
"""

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import msgspec

from stoker.broker.base import LedgerEventKind
from stoker.model.action import Action, ActionState
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, Fence, RunId, WorkerId

NO_FENCE = Fence(0)

# Looking up a member of an enum costs 0.2 µs in Python 3.11, and every transition asks for several.
PARKED, ACCEPTED, LEASED, STARTED, COMPLETED, ACKNOWLEDGED = ActionState

_COMPLETED = LedgerEventKind.COMPLETED

LIVE = frozenset({LEASED, STARTED})
"""Under a fence, in some worker's hands."""
WAITING = frozenset({PARKED, ACCEPTED})
"""In nobody's hands yet."""
TERMINAL = frozenset({COMPLETED, ACKNOWLEDGED})
"""Has its one result."""


class ParkedOn(StrEnum):
    """What a parked action waits for."""

    NOTHING = ""
    """It is not parked."""
    ROLLOUT = "rollout"
    """Its own rollout has too many actions outstanding."""
    RUN = "run"
    """Its own run has its quota queued."""
    CAPS = "caps"
    """The queue of its class, or the whole queue, is full."""


class Queue(NamedTuple):
    """What waits together: actions of one run that the same workers may take."""

    worker_class: str
    run_id: RunId
    holder: WorkerId | None
    """The one worker that may take them, or any."""
    suspect: bool


_queue_of = lru_cache(maxsize=4096)(Queue)


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One action in the ledger."""

    order: int
    """Place in order of acceptance; never reused."""
    action: Action
    digest: str
    partition: str
    state: ActionState
    parked_on: ParkedOn = ParkedOn.NOTHING
    deliveries: int = 0
    """Hand-outs so far."""
    attempts: int = 0
    """Executions that count: a suspect's crowd loses none (I5)."""
    fence: Fence = NO_FENCE
    """Fence of the live lease, or 0."""
    worker: WorkerId | None = None
    """Holder of the live lease."""
    alone: bool = False
    """The live lease tolerates no other lease beside it."""
    suspect: bool = False
    """Was running with others when their worker was lost: delivered alone from now on."""
    accepted_boot: float
    accepted_wall: float
    queue_seconds: float = 0.0
    """Accepted → last leased."""
    deadline_boot: float
    """Deadline on the boot clock of this boot."""
    deadline_wall: float
    """The same instant on the wall clock; read only after a reboot."""
    due_boot: float
    """When the ledger itself ends the action: the deadline, plus one lease once started (I9)."""
    completion: Completion | None = None
    settled_status: CompletionStatus | None = None
    settled_fence: Fence = NO_FENCE
    """Fence under which the result came; 0 when the ledger ended the action."""
    reclaim_fence: Fence = NO_FENCE
    """A revoked lease whose worker has not let go yet, or 0."""
    reclaim_worker: WorkerId | None = None
    causes: tuple[str, ...] = ()
    """Why earlier deliveries ended, oldest first."""
    lost_fences: tuple[Fence, ...] = ()
    """Fences of deliveries that ended without a result."""
    late_fences: tuple[Fence, ...] = ()
    """Stale fences whose late result was recorded already (B9)."""

    @property
    def action_id(self) -> ActionId:
        """Return the action's id."""
        return self.action.action_id

    @property
    def queue(self) -> Queue:
        """Return what it waits in while it is queued."""
        action = self.action
        return _queue_of(action.worker_class, action.run_id, action.holder, self.suspect)

    @property
    def terminal(self) -> bool:
        """Whether the one result exists."""
        return self.state in TERMINAL

    @property
    def live(self) -> bool:
        """Whether a worker holds it under a live fence."""
        return self.state in LIVE

    @property
    def bearer(self) -> WorkerId | None:
        """Return the worker that holds it or has yet to let go of it."""
        return self.worker if self.fence else self.reclaim_worker


class Note(NamedTuple):
    """What the coordinator is told of a decision."""

    kind: LedgerEventKind
    detail: str = ""
    completion: Completion | None = None


class Decision(NamedTuple):
    """A row after a command, and what is told of it."""

    row: Row
    notes: tuple[Note, ...] = ()


def terminal_note(row: Row) -> Note:
    """Return the one event of a terminal state (I8)."""
    assert row.completion is not None, f"{row.action_id} is terminal without a result"
    assert row.settled_status is not None, f"{row.action_id} is terminal without a status"
    return Note(_COMPLETED, row.settled_status.value, row.completion)
