"""Read every journal of a run and every action behind it; say what does not fit.

Checks what a reader relies on: entries decode, the first admits this rollout, calls are issued
once and answered once, nothing follows the outcome, and an action that was issued and not answered
is still in the ledger (I1). It changes nothing.
"""

from collections.abc import Sequence

import msgspec

from stoker.broker.base import ActionsRequest, JournalRequest, Ledger, RolloutSummary
from stoker.cli.ledger_access import all_rollouts
from stoker.model.events import (
    Admitted,
    Delivered,
    Dropped,
    Finished,
    Issued,
    JournalEvent,
    Withdrawn,
    decode_event,
)
from stoker.model.ids import ActionId, CallPath, RunId


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, and every problem found."""

    rollouts: int
    finished: int
    entries: int
    outstanding: int
    """Actions issued and not yet answered."""
    problems: tuple[str, ...]


async def check(ledger: Ledger, run_id: RunId) -> Checked:
    """Check every rollout of the run."""
    problems: list[str] = []
    entries = finished = outstanding = 0
    rollouts = await all_rollouts(ledger, run_id)
    for rollout in rollouts:
        stored = (
            await ledger.journal(JournalRequest(run_id=run_id, rollout_id=rollout.rollout_id))
        ).events
        entries += len(stored)
        finished += rollout.last is not None
        waiting, found = judge(rollout, stored)
        outstanding += len(waiting)
        found += await _missing(ledger, waiting)
        problems += [f"{rollout.rollout_id}: {problem}" for problem in found]
    return Checked(
        rollouts=len(rollouts),
        finished=finished,
        entries=entries,
        outstanding=outstanding,
        problems=tuple(problems),
    )


def judge(rollout: RolloutSummary, stored: Sequence[bytes]) -> tuple[set[ActionId], list[str]]:
    """Return the actions that wait for an answer, and what does not fit in the journal."""
    problems: list[str] = []
    events: list[JournalEvent] = []
    for number, entry in enumerate(stored):
        try:
            events.append(decode_event(entry))
        except msgspec.MsgspecError as error:
            problems.append(f"entry {number} does not decode: {error}")
    if len(stored) < rollout.seq:
        problems.append(f"{rollout.seq} entries were promised, {len(stored)} are there")
    first = events[0] if events else None
    if not isinstance(first, Admitted) or first.rollout_id != rollout.rollout_id:
        problems.append("its first entry does not admit it")
    ends = [number for number, event in enumerate(events) if isinstance(event, Finished)]
    if ends and ends[0] != len(events) - 1:
        problems.append(f"{len(events) - 1 - ends[0]} entries follow its outcome")
    waiting, order = _calls(events)
    return (set() if ends else waiting), problems + order


def _calls(events: Sequence[JournalEvent]) -> tuple[set[ActionId], list[str]]:
    issued: dict[CallPath, ActionId | None] = {}
    answered: set[CallPath] = set()
    problems: list[str] = []
    for event in events:
        match event:
            case Issued(path=path, action_id=action_id):
                if path in issued:
                    problems.append(f"call {path} was issued twice")
                issued[path] = action_id
            case Delivered(path=path):
                if path not in issued:
                    problems.append(f"a result was delivered to {path}, which was never issued")
                if path in answered:
                    problems.append(f"call {path} was answered twice")
                answered.add(path)
            case Dropped(path=path) | Withdrawn(path=path):
                answered.add(path)
            case _:
                pass
    waiting = {action for path, action in issued.items() if action and path not in answered}
    return waiting, problems


async def _missing(ledger: Ledger, waiting: set[ActionId]) -> list[str]:
    if not waiting:
        return []
    reply = await ledger.actions(ActionsRequest(action_ids=tuple(sorted(waiting))))
    there = {view.action.action_id for view in reply.actions}
    return [f"action {action} waits for a result and is gone" for action in sorted(waiting - there)]
