"""From a completion to what the program sees: data, or a fault that is raised there.

The table is the fourth promise at its root: what the policy did is data; what our machines did is a
fault, and a fault taints the rollout.
"""

from dataclasses import dataclass

import msgspec

from stoker.coordinator.calls import Call
from stoker.errors import BoxFailed, Infrastructure, InternalError, WorkerLost
from stoker.model.action import Effect
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.events import Verb
from stoker.model.faults import FaultRecord, FaultSide
from stoker.model.tools import CallResult, RunResult
from stoker.model.value import Value, inline_value
from stoker.rollout.arguments import CallArguments, OnTimeout

_BARRED = frozenset({FaultSide.INFRASTRUCTURE, FaultSide.INTERNAL, FaultSide.CALLER})
SAFE_RETRIES_MAX = 2
"""Submits after the first of a call whose work never began."""
_DATA = frozenset({CompletionStatus.OK, CompletionStatus.TIMED_OUT, CompletionStatus.LIMIT})


@dataclass(slots=True, frozen=True)
class Seen:
    """What the program will see of a completion: one of the two is set, or neither for ``None``."""

    value: Value | None
    fault: FaultRecord | None


def seen(verb: Verb, completion: Completion) -> Seen:
    """Return what ``completion`` is to the program that awaits a ``verb``.

    A timeout that a worker reports is data. One that the ledger had to declare carries a fault: the
    worker did not answer, or a second attempt found none.
    """
    if completion.status in _DATA and completion.observation is not None:
        return Seen(completion.observation, None)
    if completion.status is CompletionStatus.OK:
        return Seen(None, None)
    if completion.fault is not None:
        return Seen(None, completion.fault)
    if completion.status is CompletionStatus.TIMED_OUT and completion.attempt > 0:
        empty = _timed_out(verb)
        if empty is not None:
            return Seen(inline_value(msgspec.msgpack.encode(empty)), None)
    return Seen(None, _unexplained(completion))


def taints(fault: FaultRecord | None) -> bool:
    """Whether ``fault`` bars a reward until the program says it recovered.

    A run whose settings a worker cannot carry out is no fault of the policy either.
    """
    return fault is not None and fault.side in _BARRED


def on_timeout(verb: Verb, arguments: bytes) -> OnTimeout:
    """Return what a timed-out call is to become."""
    if verb is not Verb.CALL:
        return OnTimeout()
    return msgspec.msgpack.decode(arguments, type=CallArguments).on_timeout


def retry_reason(call: Call, completion: Completion) -> str:
    """Return why ``call`` is submitted once more instead of being answered; empty: it is not.

    Safe without asking: an action that was never started (its deadline passed in the queue, or
    while nothing ran at all; its worker was out of contact before it began), and a box that could
    not be made or begin its program, unless the effect is external. A timeout of running work is
    repeated only where the program says so.
    """
    status, fault = completion.status, completion.fault
    if status is CompletionStatus.TIMED_OUT and completion.attempt == 0:
        return "deadline before start" if call.retries < SAFE_RETRIES_MAX else ""
    if status is CompletionStatus.TIMED_OUT:
        late = on_timeout(call.verb, call.arguments)
        return "tool timeout" if late.kind == "retry" and call.retries < late.times else ""
    if fault is not None and fault.code == WorkerLost.code:
        return "worker out of contact" if call.retries < SAFE_RETRIES_MAX else ""
    box_failed = fault is not None and fault.code == BoxFailed.code
    nothing_lost = call.verb is Verb.ENVIRONMENT or not completion.box_gone
    if box_failed and nothing_lost and call.retries < SAFE_RETRIES_MAX and not _external(call):
        return "box failed"
    return ""


def _external(call: Call) -> bool:
    if call.verb is not Verb.CALL:
        return False
    effect = msgspec.msgpack.decode(call.arguments, type=CallArguments).effect
    return effect is Effect.EXTERNAL


def _timed_out(verb: Verb) -> RunResult | CallResult | None:
    if verb is Verb.RUN:
        return RunResult(timed_out=True)
    if verb is Verb.CALL:
        return CallResult(run=RunResult(timed_out=True))
    return None


def _unexplained(completion: Completion) -> FaultRecord:
    if completion.status is CompletionStatus.TIMED_OUT:
        when = "while it was carried out" if completion.attempt else "before it was started"
        return Infrastructure(
            f"action {completion.action_id} ran out of its time {when}; nothing of it is running; "
            "add workers of its class or raise its timeout and deadline",
            action=completion.action_id,
        ).record()
    return InternalError(
        f"action {completion.action_id} ended as {completion.status} without a reason"
    ).record()
