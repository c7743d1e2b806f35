"""Requests that read the ledger and their replies: anybody may ask, nothing changes.

Part of the contract in ``base``, which exports all of it.
"""

import msgspec

from stoker.model.action import Action, ActionState
from stoker.model.completion import Completion
from stoker.model.ids import ActionId, RolloutId, RunId, WorkerId


class JournalRequest(msgspec.Struct, frozen=True, kw_only=True, tag="journal"):
    """Read one rollout's journal."""

    run_id: RunId
    rollout_id: RolloutId
    after: int = 0
    limit: int = 100_000


class JournalReply(msgspec.Struct, frozen=True, kw_only=True, tag="journal_reply"):
    """Entries after ``after``, in order."""

    events: tuple[bytes, ...]
    more: bool = False
    """Further entries did not fit the frame; clients ask on by themselves."""


class RolloutsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="rollouts"):
    """List a run's rollouts in order of admission."""

    run_id: RunId
    after: RolloutId | None = None
    limit: int = 10_000


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout as the ledger sees it."""

    rollout_id: RolloutId
    seq: int
    first: bytes
    """Its first journal event (admitted)."""
    last: bytes | None = None
    """Its outcome event, once finished."""


class RolloutsReply(msgspec.Struct, frozen=True, kw_only=True, tag="rollouts_reply"):
    """Summaries."""

    rollouts: tuple[RolloutSummary, ...]
    more: bool = False
    """Further rollouts did not fit the frame; clients ask on by themselves."""


class ActionsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="actions"):
    """Look at actions by id or of a rollout."""

    action_ids: tuple[ActionId, ...] = ()
    rollout_id: RolloutId | None = None


class ActionView(msgspec.Struct, frozen=True, kw_only=True):
    """One action as the ledger holds it."""

    action: Action
    state: ActionState
    deliveries: int
    attempts: int
    worker_id: WorkerId | None
    completion: Completion | None
    causes: tuple[str, ...] = ()
    """Why earlier deliveries ended, oldest first."""


class ActionsReply(msgspec.Struct, frozen=True, kw_only=True, tag="actions_reply"):
    """Views; unknown ids are left out."""

    actions: tuple[ActionView, ...]


class DeadLettersRequest(msgspec.Struct, frozen=True, kw_only=True, tag="dead_letters"):
    """Actions that used up their attempts."""

    run_id: RunId


class StatsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Counters and queue ages."""


class ClassStats(msgspec.Struct, frozen=True, kw_only=True):
    """One worker class, now."""

    queued: int = 0
    leased: int = 0
    started: int = 0
    parked: int = 0
    oldest_queued_seconds: float = 0.0
    slots: int = 0
    """Slots of live workers."""


class RunStats(msgspec.Struct, frozen=True, kw_only=True):
    """One run that has unfinished actions, now; all classes together."""

    queued: int = 0
    leased: int = 0
    """In workers' hands, started or not."""
    parked: int = 0
    """Over a cap, its own quota or their rollout's limit."""
    over_caps: int = 0
    """Those of them that wait for a cap or the quota, so for others to end."""


class ServiceStats(msgspec.Struct, frozen=True, kw_only=True):
    """One remote service, now."""

    rate: float
    """Actions a second that are handed out at most, now."""
    rate_max: float
    """As configured."""
    waits_seconds: float = 0.0
    """Until the next may be handed out."""
    lowered: int = 0
    """How often refusals have lowered the rate."""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One live worker incarnation."""

    worker_id: WorkerId
    name: str
    slots: dict[str, int]
    leases: int
    silent_seconds: float


class StatsReply(msgspec.Struct, frozen=True, kw_only=True, tag="stats_reply"):
    """The ledger, now."""

    classes: dict[str, ClassStats]
    workers: tuple[WorkerStats, ...]
    unacknowledged: int
    deliveries_total: int
    attempts_total: int
    retries_total: int
    completions_total: dict[str, int]
    """By status."""
    late_total: int
    dead_total: int
    commits_total: int = 0
    """Of a file since its owner started, as the two below; in PostgreSQL since the beginning."""
    transitions_total: int = 0
    syncs_total: int = 0
    runs: dict[RunId, RunStats] = {}
    services: dict[str, ServiceStats] = {}


class CapabilitiesRequest(msgspec.Struct, frozen=True, kw_only=True, tag="capabilities"):
    """Ask what the engine promises."""
