"""What the ledger must look like from outside, in one page: the model of the state machine.

It remembers only what was *replied* (promises) and what it last saw of each row; every step is
checked against both. Lazy promises (leases, plain starts, acknowledgements) may be lost with power,
synced ones (accepts, results, cancels, external starts) never.
"""

from collections import Counter

from stoker.broker.base import LedgerEvent, LedgerEventKind, LedgerLimits
from stoker.broker.rows import Row
from stoker.model.action import ActionState, Effect
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, Fence

S = ActionState
ALIVE = frozenset({S.PARKED, S.ACCEPTED, S.LEASED, S.STARTED})
NEXT = {
    S.PARKED: ALIVE | {S.COMPLETED},
    S.ACCEPTED: frozenset({S.ACCEPTED, S.LEASED, S.COMPLETED}),
    S.LEASED: frozenset({S.LEASED, S.STARTED, S.ACCEPTED, S.COMPLETED}),
    S.STARTED: frozenset({S.STARTED, S.ACCEPTED, S.COMPLETED}),
    S.COMPLETED: frozenset({S.COMPLETED, S.ACKNOWLEDGED}),
    S.ACKNOWLEDGED: frozenset({S.ACKNOWLEDGED}),
}


class Model:
    """Promises made so far, and the rows as last seen."""

    def __init__(self, limits: LedgerLimits) -> None:
        self.limits = limits
        self.accepted: set[ActionId] = set()
        self.results: dict[ActionId, tuple[CompletionStatus, Fence]] = {}
        self.effects: dict[ActionId, set[Fence]] = {}
        self.newest: dict[ActionId, Fence] = {}
        self.seen: dict[ActionId, Row] = {}
        self.last_fence = Fence(0)
        self.dropped: set[ActionId] = set()
        self.uncertain: set[ActionId] = set()
        """Unfinished in a copy that was restored: what became of them is unknown."""

    def twin(self) -> "Model":
        """Return a copy that goes its own way."""
        other = Model(self.limits)
        other.accepted = set(self.accepted)
        other.results = dict(self.results)
        other.effects = {action: set(fences) for action, fences in self.effects.items()}
        other.newest = dict(self.newest)
        other.seen = dict(self.seen)
        other.last_fence = self.last_fence
        other.dropped = set(self.dropped)
        other.uncertain = set(self.uncertain)
        return other

    def restored(self, original: "Model") -> None:
        """This is what a copy holds; ``original`` went on from there and is lost (I3, I12)."""
        self.last_fence = original.last_fence
        self.newest = dict.fromkeys(self.newest | original.newest, Fence(0))
        self.effects = {a: fences for a, fences in original.effects.items() if a in self.accepted}
        self.uncertain |= {a for a, row in self.seen.items() if not row.terminal}

    def requeued_dead(self, action_id: ActionId) -> None:
        """An operator took back a dead result before anybody applied it."""
        del self.results[action_id], self.seen[action_id]

    def letters(self) -> set[ActionId]:
        """Return the dead letters that are to be listed."""
        dead = CompletionStatus.DEAD
        return {a for a, row in self.seen.items() if row.settled_status is dead} - self.dropped

    def fence(self, fence: Fence) -> None:
        """A fence was given out: higher than all before, over every crash (I3)."""
        assert fence > self.last_fence
        self.last_fence = fence

    def handed(self, action_id: ActionId, fence: Fence) -> None:
        """An action was leased: every earlier lease of it is dead now."""
        self.fence(fence)
        self.newest[action_id] = fence

    def cut(self, rows: list[Row]) -> None:
        """Power was lost, and with it the newest leases: an earlier one may be live again."""
        self.newest |= {row.action_id: row.fence for row in rows if row.live}

    def began(self, action_id: ActionId, fence: Fence) -> None:
        """A start was allowed: the tool is touched now."""
        self.effects.setdefault(action_id, set()).add(fence)

    def ended(self, action_id: ActionId, result: Completion) -> None:
        """A result was shown or promised: the only one there will ever be (I2)."""
        known = self.results.setdefault(action_id, (result.status, result.fence))
        assert known == (result.status, result.fence), f"{action_id} changed its result"
        started = self.effects.get(action_id, set())
        if result.status is CompletionStatus.AMBIGUOUS:
            assert started or action_id in self.uncertain
            assert result.external_effect_possible

    def check(self, rows: list[Row], events: list[LedgerEvent], *, power_lost: bool) -> None:
        """Compare the whole ledger with what was promised."""
        now = {row.action_id: row for row in rows}
        assert self.accepted <= set(now), "an accepted action vanished (I1)"
        told = [e for e in events if e.kind is LedgerEventKind.COMPLETED]
        completed = {row.action_id for row in rows if row.state is S.COMPLETED}
        assert sorted(e.action_id for e in told) == sorted(completed), "one event each (I8)"
        for event in told:
            assert event.completion is not None
            self.ended(event.action_id, event.completion)
        for row in rows:
            self._check_row(row)
            old = self.seen.get(row.action_id)
            if old is not None and not power_lost:
                assert row.state in NEXT[old.state], f"{old.state} -> {row.state}"
                assert row.deliveries >= old.deliveries
        live = [row.fence for row in rows if row.fence]
        assert len(live) == len(set(live)), "one fence, two actions (I3)"
        queued = [row for row in rows if row.state in ALIVE and row.state is not S.PARKED]
        assert len(queued) <= self.limits.queued_max
        classes = Counter(row.action.worker_class for row in queued)
        assert all(n <= self.limits.queued_per_class_max for n in classes.values())
        busy = sum(row.state in (S.LEASED, S.STARTED) for row in rows)
        assert busy <= self.limits.results_max, "every lease has a result slot (I6)"
        self.seen = now

    def _check_row(self, row: Row) -> None:
        action = row.action
        check_form(row)
        if row.action_id in self.results:
            assert row.terminal, f"{row.action_id} came back after its result"
            assert (row.settled_status, row.settled_fence) == self.results[row.action_id]
        if row.state is not S.ACKNOWLEDGED:
            assert row.attempts <= action.attempts_max, "I5"
            assert row.deliveries <= action.deliveries_max, "I5"
            if action.effect is Effect.EXTERNAL:
                assert len(self.effects.get(row.action_id, ())) <= 1, "run again blindly (I12)"


def check_form(row: Row) -> None:
    """Look whether the parts of a row fit its state."""
    dead = row.settled_status is CompletionStatus.DEAD
    assert row.live == bool(row.fence) == (row.worker is not None)
    assert row.live or not row.alone
    assert bool(row.parked_on) == (row.state is S.PARKED)
    assert bool(row.reclaim_fence) == (row.reclaim_worker is not None)
    assert not (row.live and row.reclaim_fence), "in two workers' hands"
    assert row.terminal == (row.settled_status is not None)
    if not dead:
        assert (row.completion is not None) == (row.state is S.COMPLETED)
    if row.live:
        # Late fences may be younger: of a delivery that a power cut has undone.
        assert row.fence > max((*row.lost_fences, row.settled_fence))
    grace = row.state is S.STARTED or row.terminal
    assert row.due_boot == row.deadline_boot or (grace and row.due_boot > row.deadline_boot)
