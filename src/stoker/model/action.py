"""Actions: what a rollout asks of the world outside the inference lane.

An action is accepted once, leased as often as workers die, started at most ``attempts_max`` times
and completed exactly once. Everything here is fixed when the action is submitted.
"""

from enum import StrEnum

import msgspec

from stoker.model.ids import ActionId, CallPath, EnvironmentId, RolloutId, RunId, WorkerId
from stoker.model.value import Value, canonical_digest


class Effect(StrEnum):
    """What an action touches; decides whether it may be run again after its worker was lost."""

    CONTAINED = "contained"
    """Its effect lives in the box; retried only from the exact state before it."""
    PURE = "pure"
    """No effect at all; may be run again freely."""
    IDEMPOTENT = "idempotent"
    """The tool is offered the action's key and makes repeats harmless."""
    EXTERNAL = "external"
    """Touches the world: at most once, or the outcome is ``ambiguous``."""


class LatePolicy(StrEnum):
    """What becomes of a result whose fence is stale."""

    DISCARD = "discard"
    """Recorded, changes nothing (default)."""
    ADOPT = "adopt"
    """Before a terminal state it is taken as the result; the live lease is revoked."""
    RECONCILE = "reconcile"
    """After a terminal state it becomes a journal event of its own; the result stays."""


class ActionState(StrEnum):
    """Where an action stands in its hand-off."""

    PARKED = "parked"
    """Accepted over a cap: durable, not yet queued."""
    ACCEPTED = "accepted"
    """Queued for a worker."""
    LEASED = "leased"
    """Handed to a worker under a fence; its work has not begun."""
    STARTED = "started"
    """An attempt is running; effects are possible."""
    COMPLETED = "completed"
    """Has its one terminal result, which waits to be acknowledged."""
    ACKNOWLEDGED = "acknowledged"
    """Its result was applied by the coordinator."""


class Action(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One action as submitted."""

    action_id: ActionId
    run_id: RunId
    rollout_id: RolloutId
    path: CallPath
    """Call path; (rollout, path) is the idempotency key (I7) and is offered to the tool."""
    step: int
    """Model turn it belongs to, from 0."""
    worker_class: str
    """Kind of slot it needs (``fast``, ``tests`` …)."""
    tool: str
    """What is done: ``environment.open``, ``box.run``, ``box.write_files``, ``box.read_file``,
    ``box.export``, ``box.checkpoint``, ``environment.close``, ``score`` or ``call``."""
    input: Value
    """Canonical msgpack of the tool's request record (``stoker.model.tools``)."""
    effect: Effect = Effect.CONTAINED
    priority: int = 0
    """Higher goes first; ties in order of acceptance."""
    timeout_seconds: float
    """Wall time one attempt may run once started, enforced by killing the box."""
    deadline_seconds: float
    """Time from acceptance to a terminal state, queueing included; always set (I9)."""
    environment_id: EnvironmentId | None = None
    """The environment it acts in; ``None`` for a stateless action."""
    generation: int = 0
    """Which life of the environment it is meant for."""
    holder: WorkerId | None = None
    """The one worker incarnation that may run it (it holds the environment), or any."""
    attempts_max: int = 3
    """Bound on started executions."""
    deliveries_max: int = 20
    """Bound on hand-outs."""
    late: LatePolicy = LatePolicy.DISCARD
    policy_digest: str = ""
    """Digest of the execution policy it must run under."""
    baseline_digest: str = ""
    """Digest of the baseline of its box."""
    policy_version: int | None = None
    """Weights that chose it, where known."""
    trace: str = ""
    """W3C traceparent, or empty."""

    def digest(self) -> str:
        """Return what two submits under one key must agree on; routing may differ after a loss."""
        return canonical_digest(
            [
                self.rollout_id,
                self.path,
                self.tool,
                self.effect,
                self.input.digest,
                self.worker_class,
            ]
        )
