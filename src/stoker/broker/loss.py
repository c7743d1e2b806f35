"""What becomes of an action whose lease or worker is lost: retry, ambiguity, poison.

Pure, like ``core``. Rules (DESIGN §4): before ``started`` an action is requeued, its attempt
unspent. After it, *pure*, *idempotent* and *contained without an environment* get a new attempt
within their bound; *contained in an environment* is ``environment_lost``, since the box went with
the worker; *external* is ``ambiguous``, never run again.

Poison (I5, B10, B18): of several actions that ran on a lost worker any one may have killed it. They
become suspects: requeued without spending the attempt and from then on delivered alone. A suspect
lost while alone spends its attempt, as does the only action that ran on a lost worker.
"""

from msgspec.structs import replace

from stoker.broker.base import CompleteDisposition, LedgerEventKind
from stoker.broker.core import cause, complete, ended_by_ledger, reclaimed, requeued, settle
from stoker.broker.rows import Decision, Note, Row, terminal_note
from stoker.errors import DeadLetter, EffectAmbiguous, EnvironmentLost, ServiceBusy
from stoker.model.action import ActionState, Effect
from stoker.model.completion import Completion, CompletionStatus, EnvironmentState


def lose(row: Row, what: str, *, crowd: bool = False, worker_gone: bool = True) -> Decision:
    """Decide about a live row whose lease ended without a result.

    ``crowd``: its worker was lost with more than one action started. ``worker_gone``: the whole
    incarnation is lost, and every environment it held with it.
    """
    assert row.live, f"{row.action_id} is {row.state}, not in a worker's hands"
    noted = replace(row, causes=(*row.causes, cause(row, what)))
    if worker_gone and row.action.holder is not None and row.action.holder == row.worker:
        return environment_lost(noted)
    if row.state is ActionState.LEASED:
        return _back(noted)
    if row.action.effect is Effect.EXTERNAL:
        return _ambiguous(noted)
    if row.action.effect is Effect.CONTAINED and row.action.environment_id is not None:
        return environment_lost(noted)
    if crowd and not row.alone:
        return _back(replace(noted, suspect=True, attempts=row.attempts - 1))
    return _back(noted)


def turned_away(row: Row, result: Completion, service: str) -> tuple[CompleteDisposition, Decision]:
    """Decide about an action whose remote service said "too many requests": nothing was done.

    It goes back into the queue, its attempt unspent, as long as it may be handed out again. An
    external action does not: its tool may have done something before that request. Neither is an
    observation, since the service's state is no answer to what the program did. A refusal under an
    old fence changes nothing, but that a worker which says so has let go.
    """
    if result.fence and result.fence == row.reclaim_fence:
        return CompleteDisposition.STALE, reclaimed(row, "its worker reported a refusal")
    if not row.fence or row.fence != result.fence:
        known = result.fence in (*row.lost_fences, row.settled_fence)
        ended = CompleteDisposition.ALREADY if known else CompleteDisposition.STALE
        return ended, Decision(row)
    what = f"the service {service} said: too many requests"
    unspent = row.attempts - (row.state is ActionState.STARTED)
    noted = replace(row, causes=(*row.causes, cause(row, what)), attempts=unspent)
    if row.action.effect is not Effect.EXTERNAL and deliverable(row):
        return CompleteDisposition.OK, _back(noted)
    fault = ServiceBusy(
        f"the service {service} refused action {row.action_id} ({row.action.tool}) with too many "
        f"requests, after {row.deliveries} deliveries; it was not carried out; lower "
        f"services.{service}.rate, or let it wait for longer",
        action_id=row.action_id,
    ).record()
    kept = replace(result, status=CompletionStatus.ERROR, observation=None, fault=fault)
    return complete(row, kept)


def deliverable(row: Row) -> bool:
    """Whether it may be handed out once more (I5)."""
    return row.deliveries < row.action.deliveries_max


def environment_lost(row: Row) -> Decision:
    """End an action whose environment went with its worker, queued or running."""
    fault = EnvironmentLost(
        f"the environment {row.action.environment_id} of action {row.action_id} went with worker "
        f"{row.action.holder or row.worker}; the action was not run again; the environment can "
        "only be restored as a new generation",
        action_id=row.action_id,
    ).record()
    result = ended_by_ledger(row, CompletionStatus.ERROR, fault, EnvironmentState.LOST)
    return _ended(settle(row, result), row)


def restored(row: Row) -> Decision:
    """Decide about a row of a ledger that was restored from a copy.

    Whatever happened after the copy is unknown: workers of that time and their boxes are nobody's
    any more; an unfinished external action may have run since, even if the copy shows it queued.
    No attempt is spent: the copy is no fault of the action.
    """
    why = "the ledger was restored from a copy"
    if row.terminal:
        return reclaimed(row, why) if row.reclaim_fence else Decision(row)
    noted = replace(row, causes=(*row.causes, cause(row, why)))
    action = row.action
    if action.effect is Effect.EXTERNAL:
        decision = _ambiguous(noted)
        result = decision.row.completion
        assert result is not None, f"{row.action_id} ended without a result"
        kept = replace(decision.row, completion=replace(result, external_effect_possible=True))
        return Decision(kept, (terminal_note(kept),))
    if action.holder is not None or (row.live and action.environment_id is not None):
        return environment_lost(noted)
    if not row.live:
        return Decision(row)
    if not deliverable(row):  # its last one is unknown, and deliveries are bounded too (I5)
        return _dead(noted)
    unspent = replace(noted, attempts=row.attempts - (row.state is ActionState.STARTED))
    return Decision(requeued(unspent), (Note(LedgerEventKind.REQUEUED, noted.causes[-1]),))


def _back(row: Row) -> Decision:
    if row.attempts >= row.action.attempts_max or not deliverable(row):
        return _dead(row)
    return Decision(requeued(row), (Note(LedgerEventKind.REQUEUED, row.causes[-1]),))


def _dead(row: Row) -> Decision:
    fault = DeadLetter(
        f"action {row.action_id} used up its {row.attempts} of {row.action.attempts_max} attempts "
        f"and {row.deliveries} of {row.action.deliveries_max} deliveries; it will not be run "
        f"again. Causes: {'; '.join(row.causes)}",
        action_id=row.action_id,
    ).record()
    environment = EnvironmentState.LOST if row.action.environment_id else EnvironmentState.NONE
    return _ended(settle(row, ended_by_ledger(row, CompletionStatus.DEAD, fault, environment)), row)


def _ambiguous(row: Row) -> Decision:
    fault = EffectAmbiguous(
        f"the external effect of action {row.action_id} may or may not have happened: "
        f"{row.causes[-1]}; it is not run again; look at the tool's own record",
        action_id=row.action_id,
    ).record()
    return _ended(settle(row, ended_by_ledger(row, CompletionStatus.AMBIGUOUS, fault)), row)


def _ended(settled: Row, before: Row) -> Decision:
    lost = (*before.lost_fences, before.fence) if before.fence else before.lost_fences
    settled = replace(settled, lost_fences=lost)
    return Decision(settled, (terminal_note(settled),))
