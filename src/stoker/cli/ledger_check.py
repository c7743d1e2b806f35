"""Read every journal of a run and every row behind it; say what does not fit. Changes nothing.

Works on a copy of the database, so that a living ledger is not disturbed and a dead one not opened:
the file itself and the invariants of its rows (``broker.checking``), then what a reader of journals
relies on: entries decode, the first admits this rollout, calls are issued once and answered once,
nothing follows the outcome, an action that was issued and not answered is still there (I1). Last,
all content that journals and rows name by digest is read in the artifact store.

A ledger in PostgreSQL is asked for its journals; its rows are for the server's own tools.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from stoker.broker.base import ActionsRequest, JournalRequest, Ledger, RolloutSummary
from stoker.broker.checking import DatabaseChecked, check_database, value_problems
from stoker.broker.copying import copy_database
from stoker.broker.memory import MemoryLedger
from stoker.broker.place import DATABASE, DATABASE_ADDRESS
from stoker.broker.store_sqlite import SqliteStore
from stoker.cli.ledger_access import all_rollouts, ledger_of
from stoker.cli.output import counted
from stoker.coordinator.record import RunDirectory
from stoker.errors import ArtifactDamaged
from stoker.journal.artifacts import ArtifactStore
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
from stoker.model.value import Value


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, and every problem found."""

    rollouts: int
    finished: int
    entries: int
    outstanding: int
    """Actions issued and not yet answered."""
    problems: tuple[str, ...]


class CheckedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run's ledger and its journals."""

    schema_version: int
    """0: the rows lie in PostgreSQL and were not looked at, nor counted."""
    lineage: str
    database_bytes: int
    actions: int
    """Rows of the ledger, tombstones included."""
    unacknowledged: int
    rollouts: int
    finished: int
    entries: int
    outstanding: int
    artifacts: int
    """Pieces of content in the artifact store that are named."""
    artifact_bytes: int
    problems: tuple[str, ...]


async def check_run(run: RunDirectory) -> CheckedRun:
    """Check the ledger of ``run``, living or not.

    Raises:
        RunDirectoryUnusable: there is no ledger, or no room beside it for a copy.
        LedgerTooNew: a newer Stoker made it.
        LedgerUnavailable: it lies in PostgreSQL and cannot be reached.
    **Cancellation:** nothing is left behind.
    """
    if not (run.ledger / DATABASE).exists() and _elsewhere(run):
        return await _check_elsewhere(run)
    with TemporaryDirectory(prefix=".check-", dir=run.path) as draft:
        copy = Path(draft) / DATABASE
        await copy_database(run.ledger, copy)
        rows = check_database(copy)
        journals = Checked(rollouts=0, finished=0, entries=0, outstanding=0, problems=())
        damaged = any(problem.startswith("file: ") for problem in rows.problems)
        if not damaged:  # the journals of a damaged file would only be damaged in other words
            journals = await _journals(copy, run.record.run_id, rows.values)
    return _checked(run, rows, journals)


def _elsewhere(run: RunDirectory) -> bool:
    settings = run.record.settings.get("ledger", {})
    return bool(settings.get("gateways")) or (run.ledger / DATABASE_ADDRESS).exists()


async def _check_elsewhere(run: RunDirectory) -> CheckedRun:
    rows = DatabaseChecked()
    async with ledger_of(run) as ledger:
        rows.lineage = (await ledger.capabilities()).lineage
        journals = await check(ledger, run.record.run_id, rows.values)
    return _checked(run, rows, journals)


def _checked(run: RunDirectory, rows: DatabaseChecked, journals: Checked) -> CheckedRun:
    missing = [*_content(ArtifactStore(run.artifacts), rows.values)]
    return CheckedRun(
        schema_version=rows.schema_version,
        lineage=rows.lineage,
        database_bytes=rows.size_bytes,
        actions=rows.actions,
        unacknowledged=rows.unacknowledged,
        rollouts=journals.rollouts,
        finished=journals.finished,
        entries=journals.entries,
        outstanding=journals.outstanding,
        artifacts=len(rows.values),
        artifact_bytes=sum(rows.values.values()),
        problems=(*rows.problems, *journals.problems, *missing),
    )


async def _journals(copy: Path, run_id: RunId, values: dict[str, int]) -> Checked:
    store = SqliteStore(copy)
    ledger = MemoryLedger(store=store)
    try:
        return await check(ledger, run_id, values)
    finally:
        await ledger.close()
        store.close()


def _content(artifacts: ArtifactStore, values: dict[str, int]) -> Iterator[str]:
    for digest, size in sorted(values.items()):
        try:
            artifacts.get(Value(digest=digest, size_bytes=size))
        except ArtifactDamaged as error:
            yield f"content: {error.message}"


async def check(ledger: Ledger, run_id: RunId, values: dict[str, int] | None = None) -> Checked:
    """Check every rollout of the run; note in ``values`` what its journals name by digest."""
    problems: list[str] = []
    entries = finished = outstanding = 0
    rollouts = await all_rollouts(ledger, run_id)
    for rollout in rollouts:
        stored = (
            await ledger.journal(JournalRequest(run_id=run_id, rollout_id=rollout.rollout_id))
        ).events
        entries += len(stored)
        finished += rollout.last is not None
        waiting, found = judge(rollout, stored, values)
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


def judge(
    rollout: RolloutSummary, stored: Sequence[bytes], values: dict[str, int] | None = None
) -> tuple[set[ActionId], list[str]]:
    """Return the actions that wait for an answer, and what does not fit in the journal."""
    problems: list[str] = []
    events: list[JournalEvent] = []
    for number, entry in enumerate(stored):
        try:
            events.append(decode_event(entry))
        except msgspec.MsgspecError as error:
            problems.append(f"entry {number} does not decode: {error}")
    if len(stored) < rollout.seq:
        problems.append(
            f"its journal should have {counted(rollout.seq, 'entry')} and has {len(stored)}"
        )
    first = events[0] if events else None
    if not isinstance(first, Admitted) or first.rollout_id != rollout.rollout_id:
        problems.append("its first entry does not admit it")
    ends = [number for number, event in enumerate(events) if isinstance(event, Finished)]
    if ends and ends[0] != len(events) - 1:
        problems.append(f"{counted(len(events) - 1 - ends[0], 'entry')} behind its outcome")
    waiting, order = _calls(events)
    named = values if values is not None else {}
    for event in events:
        value = event.arguments if isinstance(event, Issued) else getattr(event, "value", None)
        problems += value_problems(value, named, "the journal")
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
