"""What a run left in its ledger, read back through an ordinary client."""

import asyncio
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stoker.broker.base import (
    ActionsRequest,
    ActionView,
    DeadLettersRequest,
    JournalRequest,
    RolloutsRequest,
    StatsReply,
)
from stoker.broker.client import LedgerClient, connect
from stoker.broker.place import owner_pid
from stoker.coordinator.rebuild import Standing, rebuild
from stoker.journal.artifacts import ArtifactStore
from stoker.model.events import (
    Admitted,
    Delivered,
    Finished,
    Issued,
    JournalEvent,
    Reissued,
    Verb,
    decode_event,
)
from stoker.model.generation import Generation
from stoker.model.ids import ActionId, RolloutId, RunId
from stoker.model.outcome import Outcome
from stoker.model.task import Task
from support.runs import wait_gone

Seen = dict[str, tuple[str, bytes | None, str]]
"""Call path → verb, what the program got, and the code of the fault it got instead."""


@dataclass
class Rollout:
    """One rollout's journal, read."""

    rollout_id: RolloutId
    events: list[JournalEvent]
    standing: Standing
    actions: dict[ActionId, ActionView] = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, int]:
        """Task and index: the same in every run of the same tasks."""
        return self.standing.admitted.task.task_id, self.standing.admitted.index

    @property
    def task(self) -> Task:
        """What it worked on."""
        return self.standing.admitted.task

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        finished = self.standing.finished
        assert finished is not None, f"{self.rollout_id} has no outcome"
        return finished.outcome

    def seen(self, store: ArtifactStore, *, gate: str | None = None) -> Seen:
        """Return everything the program was given, but for what lies below ``gate``.

        The mark of a model call that was asked again after a crash is no part of what was given;
        it must agree with the journal and is then set aside.
        """
        again = {event.path for event in self.events if isinstance(event, Reissued)}
        found: Seen = {}
        for event in self.events:
            if isinstance(event, Delivered) and not (gate and event.path.startswith(gate)):
                value = None if event.value is None else store.get(event.value)
                code = event.fault.code if event.fault else ""
                verb = self.standing.issued[event.path].verb
                if verb is Verb.GENERATE and value is not None:
                    generation = msgspec.msgpack.decode(value, type=Generation)
                    assert generation.reissued == (event.path in again), event.path
                    value = msgspec.msgpack.encode(
                        msgspec.structs.replace(generation, reissued=False)
                    )
                found[event.path] = (verb, value, code)
        return found

    def issued(self) -> dict[str, tuple[str, str]]:
        """Return call path → verb and digest of its arguments."""
        return {e.path: (e.verb, e.digest) for e in self.events if isinstance(e, Issued)}


@dataclass
class Records:
    """One run's ledger, read."""

    every: list[Rollout]
    """In order of admission; a restarted place has several."""
    rollouts: dict[tuple[str, int], Rollout]
    """The latest of each place."""
    dead: tuple[ActionView, ...]
    stats: StatsReply
    store: ArtifactStore

    @property
    def outcomes(self) -> Counter[str]:
        """Rollouts by kind of outcome."""
        return Counter(rollout.outcome.kind.value for rollout in self.rollouts.values())

    @property
    def actions(self) -> dict[ActionId, ActionView]:
        """Every action of every rollout."""
        return {key: view for one in self.rollouts.values() for key, view in one.actions.items()}


def read(run: Path) -> Records:
    """Read everything; the owner this starts is ended again."""
    return asyncio.run(_read(run))


async def _read(run: Path) -> Records:
    store = ArtifactStore(run / "artifacts")
    lived = owner_pid(run / "ledger")
    client = await connect(run / "ledger", role="reader", idle_exit_seconds=5.0)
    try:
        every = [
            await _rollout(client, RunId(run.name), rollout_id, store)
            for rollout_id in await _ids(client, RunId(run.name))
        ]
        dead = (await client.dead_letters(DeadLettersRequest(run_id=RunId(run.name)))).actions
        stats = await client.stats()
    finally:
        await client.close()
        pid = owner_pid(run / "ledger")
        if pid is not None and lived is None:
            os.kill(pid, signal.SIGTERM)
            wait_gone(pid)
    return Records(every, {one.place: one for one in every}, dead, stats, store)


async def _ids(client: LedgerClient, run_id: RunId) -> list[RolloutId]:
    found: list[RolloutId] = []
    while True:
        after = found[-1] if found else None
        page = await client.rollouts(RolloutsRequest(run_id=run_id, after=after))
        if not page.rollouts:
            return found
        found += [one.rollout_id for one in page.rollouts]


async def _rollout(
    client: LedgerClient, run_id: RunId, rollout_id: RolloutId, store: ArtifactStore
) -> Rollout:
    journal = await client.journal(JournalRequest(run_id=run_id, rollout_id=rollout_id))
    events = [decode_event(stored) for stored in journal.events]
    assert isinstance(events[0], Admitted), f"{rollout_id} does not begin with its admission"
    ends = [at for at, event in enumerate(events) if isinstance(event, Finished)]
    assert ends in ([], [len(events) - 1]), f"{rollout_id}: something follows its outcome"
    actions = (await client.actions(ActionsRequest(rollout_id=rollout_id))).actions
    views = {view.action.action_id: view for view in actions}
    return Rollout(rollout_id, events, rebuild(events, store.get), views)
