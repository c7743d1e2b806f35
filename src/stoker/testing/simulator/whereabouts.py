"""Where every rollout of a simulated run is, by what passes between its parts: the true causes.

Nothing is asked of the coordinator: the simulator sees each message, each call on a device and each
jump of the clock, during which nothing changes. While a replica has places free, the time is
charged to where the rollouts are that are not on one, in proportion; places beyond their number
want more rollouts. The coordinator's own account (``coordinator.unused``) looks once a second; this
one is exact.
"""

from collections import Counter, defaultdict
from collections.abc import Callable

from stoker.broker.base import (
    AppendBatch,
    CompleteRequest,
    HoldReply,
    HoldVerdict,
    LeaseReply,
    Request,
    StartRequest,
)
from stoker.broker.service import Reply
from stoker.coordinator.actions import TOOLS
from stoker.coordinator.unused import ADMISSION, NO_WORK, PAUSES, PROGRAMS
from stoker.model.action import Action
from stoker.model.events import Verb
from stoker.model.ids import ActionId, RolloutId
from stoker.rollout.messages import Deliver, Evict, StartRollout, Turn

ON_REPLICA = "on a replica"
READY = "ready and not issued"
HELD_FOR_KV = "held for KV"
HANDED_OVER = "handed over"
"""Between two processes, or waiting for a commit."""
QUEUED = "waiting for a worker"
RUNNING = "tools running"
_PROGRAM = ""
"""What a rollout waits for while its program has the turn; calls are named by their paths."""
_RANKS = {ON_REPLICA: 0, READY: 1, PROGRAMS: 2, PAUSES: 4}
"""A rollout that waits for several things is where the first of these is; actions are between."""


class Whereabouts:
    """Follows the rollouts of one run and charges the device's free places."""

    def __init__(self, window: int, rollouts: int) -> None:
        self.calls = 0
        """On replicas now."""
        self.unused: defaultdict[str, float] = defaultdict(float)
        """Call-seconds of free places, by true cause."""
        self.idle: defaultdict[str, float] = defaultdict(float)
        """Seconds in which no replica worked, by where the active rollouts were; none active: by
        why there were none."""
        self.parked: Callable[[], int] = lambda: 0
        """Calls that the lane holds for memory."""
        self._window = window
        self._left = rollouts
        """Rollouts that have not begun."""
        self._things: dict[RolloutId, dict[str, str]] = {}
        """Rollout → what it waits for → where that is."""
        self._leading: dict[RolloutId, str] = {}
        self._counts: Counter[str] = Counter()
        self._actions: dict[ActionId, Action] = {}

    def counts(self) -> dict[str, int]:
        """Return how many active rollouts are where."""
        return {where: count for where, count in sorted(self._counts.items()) if count}

    # --- messages ----------------------------------------------------------------------------

    def to_host(self, message: object) -> None:
        """A message leaves for a program host."""
        if isinstance(message, StartRollout):
            self._left -= message.rollout_id not in self._things
            self._things.setdefault(message.rollout_id, {})
            self.put(message.rollout_id, _PROGRAM, PROGRAMS)
        elif isinstance(message, Deliver):
            self._take(message.rollout_id, message.path)
            self.put(message.rollout_id, _PROGRAM, PROGRAMS)
        elif isinstance(message, Evict):
            self._gone(message.rollout_id)

    def from_host(self, message: object) -> None:
        """A message of a program host has arrived."""
        if not isinstance(message, Turn):
            return
        for call in message.calls:
            self.put(message.rollout_id, call.path, _begins(call.verb))
        for path in message.withdrawn:
            self._take(message.rollout_id, path)
        self._take(message.rollout_id, _PROGRAM)
        if message.outcome is not None:
            self._gone(message.rollout_id)

    def asked(self, request: Request) -> None:
        """A request leaves for the ledger."""
        if isinstance(request, AppendBatch):
            for append in request.appends:
                for action in append.submits:
                    self._actions[action.action_id] = action
                    self._action(action.action_id, HANDED_OVER)
        elif isinstance(request, CompleteRequest):
            for completion in request.completions:
                self._action(completion.action_id, HANDED_OVER)

    def decided(self, request: Request, reply: Reply) -> None:
        """The ledger has committed a reply and it leaves."""
        if isinstance(request, AppendBatch):
            for append in request.appends:
                for action in append.submits:
                    self._action(action.action_id, QUEUED)
        elif isinstance(reply, LeaseReply):
            for lease in reply.leases:
                self._action(lease.action.action_id, HANDED_OVER)

    def answered(self, request: Request, reply: Reply) -> None:
        """A reply of the ledger has arrived."""
        if isinstance(request, StartRequest) and isinstance(reply, HoldReply):
            for held, verdict in zip(request.held, reply.verdicts, strict=True):
                if verdict is HoldVerdict.OK:
                    self._action(held.action_id, RUNNING)

    def put(self, rollout: RolloutId, what: str, where: str) -> None:
        """Note where something is that an active rollout waits for."""
        things = self._things.get(rollout)
        if things is not None:
            things[what] = where
            self._lead(rollout, things)

    # --- time --------------------------------------------------------------------------------

    def passes(self, seconds: float) -> None:
        """Charge time that is about to pass."""
        free = self._window - self.calls
        if free <= 0:
            return
        elsewhere = {where: n for where, n in self._counts.items() if n and where != ON_REPLICA}
        rollouts = sum(elsewhere.values())
        filled = min(1.0, rollouts / free)
        for where, count in elsewhere.items():
            cause = HELD_FOR_KV if where == READY and self.parked() else where
            self.unused[cause] += seconds * free * filled * count / rollouts
            if not self.calls:
                self.idle[cause] += seconds * count / rollouts
        wanting = ADMISSION if self._left else NO_WORK
        if filled < 1.0:
            self.unused[wanting] += seconds * free * (1.0 - filled)
        if not rollouts and not self.calls:
            self.idle[wanting] += seconds

    # --- books -------------------------------------------------------------------------------

    def _action(self, action_id: ActionId, stage: str) -> None:
        """Note the stage of an action whose call is still awaited."""
        action = self._actions.get(action_id)
        if action is None:
            return
        path = action.path.partition("~")[0]  # a retry stands for the same call
        if path in self._things.get(action.rollout_id, {}):
            self.put(action.rollout_id, path, f"{stage}, class {action.worker_class}")

    def _take(self, rollout: RolloutId, what: str) -> None:
        things = self._things.get(rollout)
        if things is not None:
            things.pop(what, None)
            self._lead(rollout, things)

    def _gone(self, rollout: RolloutId) -> None:
        if self._things.pop(rollout, None) is not None:
            self._counts[self._leading.pop(rollout)] -= 1

    def _lead(self, rollout: RolloutId, things: dict[str, str]) -> None:
        leading = min(things.values(), key=_rank, default=PROGRAMS)
        before = self._leading.get(rollout)
        if before != leading:
            self._counts[leading] += 1
            self._leading[rollout] = leading
            if before is not None:
                self._counts[before] -= 1


def _rank(where: str) -> int:
    return _RANKS.get(where, 3)


def _begins(verb: Verb) -> str:
    if verb is Verb.GENERATE:
        return READY
    if verb in TOOLS:
        return HANDED_OVER
    return PAUSES if verb in {Verb.SLEEP, Verb.TIMER} else PROGRAMS
