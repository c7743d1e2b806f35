"""How many actions are where: what caps, quotas, fair shares and statistics are decided from.

Changed with every transition, so these counts always equal those of the rows; read from the store
when a ledger is opened.
"""

from collections import Counter, defaultdict
from functools import lru_cache
from typing import NamedTuple, TypeVar

from stoker.broker.base import LedgerLimits
from stoker.broker.rows import (
    ACCEPTED,
    ACKNOWLEDGED,
    COMPLETED,
    LEASED,
    LIVE,
    PARKED,
    STARTED,
    TERMINAL,
    ParkedOn,
    Queue,
    Row,
)
from stoker.model.action import ActionState
from stoker.model.ids import RolloutId, RunId, WorkerId

ANY = WorkerId("")
"""In place of a worker: all of them together."""

_OWN_CAP = ParkedOn.ROLLOUT
_TAKEN = LIVE | {ACCEPTED}

_SERVED_MAX = 4096
"""Runs whose turn is remembered; one that is forgotten was served longest ago, as it should be."""

K = TypeVar("K")


class Line(NamedTuple):
    """A run's actions of one worker class: what competes for that class's slots."""

    worker_class: str
    run_id: RunId


line_of = lru_cache(maxsize=4096)(Line)
"""The line of a worker class and a run; asked for with every change."""


class Counts:
    """Unfinished actions by class, run and state."""

    def __init__(self, limits: LedgerLimits, unfinished: dict[RolloutId, int]) -> None:
        self.limits = limits
        self._unfinished = unfinished
        """Of a few rollouts: unfinished actions, less those parked for its own cap."""
        self.work_seq = 0
        """Rises whenever a waiting ``lease`` may have become answerable."""
        self.events_seq = 0
        """Rises whenever a waiting ``events`` may have become answerable."""
        self.tickets_seq = 0
        """Rises whenever the queue of a class that is leased by ticket has changed."""
        self.states: defaultdict[str, Counter[ActionState]] = defaultdict(Counter)
        self.parked_caps: Counter[Line] = Counter()
        self.parked_runs: Counter[RunId] = Counter()
        self.parked_rollouts: Counter[RunId] = Counter()
        self.waiting: Counter[Line] = Counter()
        """Queued actions."""
        self.out: Counter[Line] = Counter()
        """Leased and started actions."""
        self.run_out: Counter[RunId] = Counter()
        self.run_queued: Counter[RunId] = Counter()
        """Queued, leased and started actions."""
        self.served: dict[RunId, int] = {}
        """Run → when it was last given to a worker, as an id; the longest ago goes first."""
        self.suspects: Counter[str] = Counter()
        # Queued actions that one worker alone may run; ``ANY`` sums them up.
        self.held: Counter[tuple[str, WorkerId]] = Counter()
        self.relieved: set[RolloutId] = set()
        """Rollouts of which an action ended while some wait for their own cap."""
        self.queued = 0
        self.busy = 0
        self.results = 0
        """Results that are not acknowledged."""
        self.next_due: float | None = None
        """Nothing is due before."""

    def _account(self, old: Row | None, new: Row) -> None:
        state = new.state
        if (self.next_due is None or new.due_boot < self.next_due) and state not in TERMINAL:
            self.next_due = new.due_boot
        if old is None:
            self._recount(new, 1)
        elif state in LIVE and old.state in _TAKEN:  # a lease or a start: no new kind of work
            self._count_step(old, new)
            return
        elif (old.state, old.parked_on, old.suspect) != (new.state, new.parked_on, new.suspect):
            self._recount(old, -1)
            self._recount(new, 1)
            if state is ACKNOWLEDGED:
                self.work_seq += 1
        else:
            return
        if state is ACCEPTED:
            self.work_seq += 1

    def _count_step(self, old: Row, new: Row) -> None:
        """Count a lease or a start: what ``_count`` of both would, in one step."""
        action = new.action
        cls, run_id, holder = action.worker_class, action.run_id, action.holder
        states = self.states[cls]
        states[old.state] -= 1
        states[new.state] += 1
        if old.state is not ACCEPTED:
            return
        line = line_of(cls, run_id)
        self.tickets_seq += cls in self.limits.ticket_classes
        _add(self.waiting, line, -1)
        self.suspects[cls] -= old.suspect
        if holder is not None:
            _add(self.held, (cls, holder), -1)
            _add(self.held, (cls, ANY), -1)
        self.busy += 1
        self.out[line] += 1
        self.run_out[run_id] += 1

    def _recount(self, row: Row, sign: int) -> None:
        ended = row.state in TERMINAL
        if row.state is COMPLETED:
            self.results += sign
        elif not ended:
            self._count(row.queue, row.state, row.parked_on, sign)
        if not ended and row.parked_on is not _OWN_CAP:
            rollout_id = row.action.rollout_id
            if rollout_id in self._unfinished:
                self._unfinished[rollout_id] += sign

    def _count(self, queue: Queue, state: ActionState, parked_on: ParkedOn, count: int) -> None:
        cls, run_id, holder, suspect = queue
        self.states[cls][state] += count
        if state is PARKED:
            if parked_on is ParkedOn.CAPS:
                _add(self.parked_caps, Line(cls, run_id), count)
            elif parked_on is ParkedOn.RUN:
                _add(self.parked_runs, run_id, count)
            else:
                _add(self.parked_rollouts, run_id, count)
            return
        self.queued += count
        _add(self.run_queued, run_id, count)
        if state is ACCEPTED:
            self.tickets_seq += cls in self.limits.ticket_classes
            _add(self.waiting, line_of(cls, run_id), count)
            self.suspects[cls] += count if suspect else 0
            if holder is not None:
                _add(self.held, (cls, holder), count)
                _add(self.held, (cls, ANY), count)
        else:
            self.busy += count
            _add(self.out, line_of(cls, run_id), count)
            _add(self.run_out, run_id, count)

    def serve(self, run_id: RunId, fence: int) -> None:
        """Note that a run was given to a worker; who was served longest ago is forgotten first."""
        self.served.pop(run_id, None)
        self.served[run_id] = fence
        if len(self.served) > _SERVED_MAX:
            del self.served[next(iter(self.served))]

    def class_queued(self, worker_class: str) -> int:
        """Count queued and leased actions of a class."""
        states = self.states[worker_class]
        return states[ACCEPTED] + states[LEASED] + states[STARTED]


def _add(counter: Counter[K], key: K, count: int) -> None:
    """Count, and forget what has come to nothing: runs come and go."""
    counter[key] += count
    if not counter[key]:
        del counter[key]
