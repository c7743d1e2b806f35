"""Proves two runs of one seed equal, rollout by rollout, and that no tool ran twice.

Everything is read from the two ledgers as they lie on disk, after the fact. Compared are the calls
every rollout issued, what each was given (sampled tokens with their log-probabilities, every
observation) and the reward. Times, workers and whether a model call had to be sent again may
differ; nothing else may.

That no tool ran twice is counted at both ends: attempts of each action in the ledger, and the lines
the ``queue`` tool wrote for each of its runs.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stoker.broker.base import ActionsRequest, JournalRequest, Ledger
from stoker.cli.ledger_access import all_rollouts, ledger_of
from stoker.coordinator.record import RunDirectory
from stoker.journal.artifacts import ArtifactStore
from stoker.model.events import (
    Admitted,
    Delivered,
    Finished,
    Issued,
    JournalEvent,
    Reissued,
    Restored,
    Verb,
    decode_event,
)
from stoker.model.generation import Generation
from stoker.model.ids import ActionId, CallPath
from stoker.model.outcome import Outcome
from stoker.model.tools import CallResult, ExportResult, OpenResult, ReadResult, RunResult, Verdict

_RESULTS: dict[Verb, Any] = {
    Verb.ENVIRONMENT: OpenResult,
    Verb.RUN: RunResult,
    Verb.READ: ReadResult,
    Verb.EXPORT: ExportResult,
    Verb.CALL: CallResult,
    Verb.SCORE: Verdict,
}


@dataclass
class Told:
    """One rollout as its journal tells it."""

    calls: list[tuple[CallPath, Verb, str]] = field(default_factory=list)
    """Path, verb and digest of the arguments of each call, in order."""
    results: dict[CallPath, Any] = field(default_factory=dict)
    """What each call was given, without anything that may differ between runs."""
    tokens: int = 0
    observations: int = 0
    outcome: Outcome | None = None
    reissued: int = 0
    restored: int = 0


@dataclass
class Recorded:
    """One run as its ledger tells it."""

    run_id: str
    rollouts: dict[str, Told]
    """By task."""
    attempts: Counter[int]
    """Executions of an action → how many actions had so many."""
    queue_actions: set[ActionId]
    """Calls of the queue tool."""

    @property
    def actions(self) -> int:
        """Actions that were submitted."""
        return sum(self.attempts.values())

    @property
    def solved(self) -> int:
        """Rollouts with full reward."""
        told = self.rollouts.values()
        return sum(one.outcome is not None and one.outcome.reward == 1.0 for one in told)

    @property
    def first_failure(self) -> str:
        """What became of the first rollout that was not solved; empty when all were."""
        for task, told in self.rollouts.items():
            outcome = told.outcome
            if outcome is None:
                return f"{task} has no outcome"
            if outcome.reward != 1.0:
                why = outcome.fault.message if outcome.fault is not None else outcome.reason
                return f"{task} {outcome.kind} {outcome.reward if why == '' else why}"
        return ""


async def read_run(run: RunDirectory) -> Recorded:
    """Return everything the run's ledger holds."""
    store = ArtifactStore(run.artifacts)
    recorded = Recorded(run.record.run_id, {}, Counter(), set())
    async with ledger_of(run) as ledger:
        for summary in await all_rollouts(ledger, run.record.run_id):
            reply = await ledger.journal(
                JournalRequest(run_id=run.record.run_id, rollout_id=summary.rollout_id)
            )
            events = [decode_event(event) for event in reply.events]
            admitted = events[0]
            assert isinstance(admitted, Admitted), "a journal begins with its admission"
            recorded.rollouts[admitted.task.task_id] = _told(events, store)
            await _count(ledger, admitted, recorded)
    return recorded


def differences(one: Recorded, other: Recorded) -> list[str]:
    """Return every way in which two runs differ, one sentence each; nothing when they are equal."""
    found = []
    for task in sorted({*one.rollouts, *other.rollouts}):
        here, there = one.rollouts.get(task), other.rollouts.get(task)
        if here is None or there is None:
            found.append(f"{task} is in one run only")
        elif here.calls != there.calls:
            found.append(f"{task}: the calls differ")
        elif here.results != there.results:
            paths = [p for p in here.results if here.results[p] != there.results.get(p)]
            found.append(f"{task}: what call {', '.join(paths) or '?'} was given differs")
        elif here.outcome != there.outcome:
            found.append(f"{task}: the outcomes differ")
    return found


def run_twice(recorded: Recorded, counter: Path) -> list[str]:
    """Return every sign that some tool ran twice or not at all; nothing when each ran once."""
    lines = Counter(counter.read_text("ascii").split()) if counter.exists() else Counter[str]()
    at_the_ledger = [
        f"{count} finished actions had {attempts} attempts in the ledger"
        for attempts, count in sorted(recorded.attempts.items())
        if attempts != 1
    ]
    at_the_tool = [
        f"the queue tool ran {lines[action]} times for {action}"
        for action in sorted(recorded.queue_actions)
        if lines[action] != 1
    ]
    return at_the_ledger + at_the_tool


def _told(events: list[JournalEvent], store: ArtifactStore) -> Told:
    told = Told()
    verbs: dict[CallPath, Verb] = {}
    for event in events:
        match event:
            case Issued():
                verbs[event.path] = event.verb
                told.calls.append((event.path, event.verb, event.digest))
            case Delivered():
                content = None if event.value is None else store.get(event.value)
                verb = verbs[event.path]
                result = _result(verb, content)
                told.results[event.path] = (event.status, event.fault, result)
                told.tokens += result[0] if verb is Verb.GENERATE else 0
                told.observations += verb is not Verb.GENERATE
            case Finished():
                told.outcome = event.outcome
            case Reissued():
                told.reissued += 1
            case Restored():
                told.restored += 1
            case _:
                pass
    return told


def _result(verb: Verb, content: bytes | None) -> Any:  # noqa: ANN401 - any record
    if content is None:
        return None
    if verb is Verb.GENERATE:
        said = msgspec.msgpack.decode(content, type=Generation)
        return (said.token_count, said.prompt_ids, said.token_ids, said.logprobs, said.text)
    return msgspec.msgpack.decode(content, type=_RESULTS.get(verb, Any))


async def _count(ledger: Ledger, admitted: Admitted, recorded: Recorded) -> None:
    reply = await ledger.actions(ActionsRequest(rollout_id=admitted.rollout_id))
    for view in reply.actions:
        if view.action.tool == "environment.close" and view.attempts == 0:
            continue  # its worker ended with the run, and every box with it
        recorded.attempts[view.attempts] += 1
        if view.action.tool == "call":
            recorded.queue_actions.add(view.action.action_id)
