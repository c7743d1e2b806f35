"""What operators do with dead letters: queue one again, or forget it.

The result of an action never changes once it was applied (I2). So a dead letter is requeued only
while its result waits, and the partition is taken from whoever may have heard of it in the same
transaction: a coordinator that had read the dead result is fenced before it can apply it.
Applied, it stays what the rollout saw; it can be dropped, which leaves the tombstone.
"""

from msgspec.structs import replace

from stoker.broker.base import LedgerEventKind
from stoker.broker.books import Books
from stoker.broker.counts import line_of
from stoker.broker.loss import environment_lost
from stoker.broker.operating import AuditEntry, DeadLetterVerb, SettledDead, SettleDead
from stoker.broker.queueing import parking
from stoker.broker.rows import Decision, Note, ParkedOn, Row
from stoker.broker.store import Owner
from stoker.model.action import ActionState
from stoker.model.completion import CompletionStatus
from stoker.model.ids import ActionId, Fence
from stoker.seams.clock import Instant


def settle_dead(books: Books, request: SettleDead, now: Instant) -> SettledDead:
    """Requeue or drop each action that is named, or say why not."""
    books.flush()
    rows = books.rows(request.action_ids)
    refused: dict[ActionId, str] = {}
    partitions: set[str] = set()
    for action_id in dict.fromkeys(request.action_ids):
        row = rows.get(action_id)
        why = _why_not(row, request)
        if row is None or why:
            refused[action_id] = why
            continue
        if request.verb is DeadLetterVerb.REQUEUE:
            partitions.add(row.partition)
            _requeue(books, row, request, now)
        else:
            books.store.drop_dead([row])
        books.store.note(_entry(row, request, now))
        books.sync = True
    for partition in sorted(partitions):
        fence = Fence(books.draw())
        owner = Owner(request.run_id, partition, fence, f"operator {request.who} {fence}")
        books.put_owner(owner)
        books.events_seq += 1  # whoever waits for events under the old fence is told
    return SettledDead(refused=refused)


def _why_not(row: Row | None, request: SettleDead) -> str:
    if row is None or row.action.run_id != request.run_id:
        return "there is no such action in this run"
    if row.settled_status is not CompletionStatus.DEAD:
        stands = row.settled_status or row.state
        return f"it is no dead letter: it is {stands}"
    applied = row.state is ActionState.ACKNOWLEDGED
    if request.verb is DeadLetterVerb.REQUEUE and applied:
        return (
            f"rollout {row.action.rollout_id} has applied its dead result, which never changes; "
            "run the rollout's task again in a new run"
        )
    if request.verb is DeadLetterVerb.DROP and not applied:
        return "its rollout has not applied its result yet; resume the run first, or requeue it"
    if request.verb is DeadLetterVerb.DROP and row.completion is None:
        return "it was dropped already"
    return ""


def requeued_dead(row: Row, why: str, parked_on: ParkedOn, now: Instant) -> Row:
    """Return a dead letter as it was accepted: fresh attempts, deliveries and deadline."""
    assert row.settled_status is CompletionStatus.DEAD, f"{row.action_id} is no dead letter"
    assert row.state is ActionState.COMPLETED, f"{row.action_id} was applied (I2)"
    deadline = row.action.deadline_seconds
    return replace(
        row,
        state=ActionState.PARKED if parked_on else ActionState.ACCEPTED,
        parked_on=parked_on,
        deliveries=0,
        attempts=0,
        suspect=False,
        completion=None,
        settled_status=None,
        accepted_boot=now.boot,
        accepted_wall=now.wall,
        deadline_boot=now.boot + deadline,
        deadline_wall=now.wall + deadline,
        due_boot=now.boot + deadline,
        causes=(*row.causes, why),
    )


def _requeue(books: Books, row: Row, request: SettleDead, now: Instant) -> None:
    action = row.action
    parked_on = parking(
        books, line_of(action.worker_class, action.run_id), books.outstanding(action.rollout_id)
    )
    why = f"requeued by {request.who}: {request.reason or 'no reason given'}"
    fresh = requeued_dead(row, why, parked_on, now)
    books.revive(fresh)
    fresh = books.apply(row, Decision(fresh, (Note(LedgerEventKind.REQUEUED, why),)))
    if action.holder is not None and books.worker(action.holder, now.boot).dead:
        books.apply(fresh, environment_lost(fresh))


def _entry(row: Row, request: SettleDead, now: Instant) -> AuditEntry:
    done = "requeued" if request.verb is DeadLetterVerb.REQUEUE else "dropped"
    return AuditEntry(
        at=now.wall,
        who=request.who,
        what=done,
        run_id=request.run_id,
        action_id=row.action_id,
        detail=request.reason,
    )
