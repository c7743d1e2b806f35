"""What the coordinator keeps of one active rollout, and nothing it could read back.

Everything here can be rebuilt from the journal (``rebuild``), except what is on its way: results
that wait for the host, running model calls, armed timers.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from stoker.coordinator.calls import Call
from stoker.coordinator.environments import Environment
from stoker.coordinator.history import HistoryStore
from stoker.model.completion import Completion
from stoker.model.events import Admitted, Late
from stoker.model.faults import FaultRecord
from stoker.model.ids import ActionId, CallPath, RolloutId
from stoker.model.value import Value
from stoker.rollout.messages import Became, HostCall


@dataclass(slots=True)
class Result:
    """One result that waits to be put into its program."""

    path: CallPath
    value: Value | None = None
    fault: FaultRecord | None = None
    completion: Completion | None = None
    spent: tuple[ActionId, ...] = ()
    """Actions this result acknowledges, retries included."""
    latency_seconds: float = 0.0
    at: float = 0.0
    """Wall time at which it was delivered; the program's ``now``."""
    noted: bool = False
    """What it did to its environment is known there."""
    truncates: str = ""
    """Set: the rollout ends truncated for this reason instead of seeing the result."""


@dataclass(slots=True, eq=False)
class ActiveRollout:
    """One rollout that is not finished."""

    admitted: Admitted
    seq: int
    """Journal entries, queued appends included."""
    history: HistoryStore = field(default_factory=HistoryStore)
    calls: dict[CallPath, Call] = field(default_factory=dict)
    """Awaited calls by path."""
    routes: dict[ActionId, CallPath] = field(default_factory=dict)
    """Which call an action stands for."""
    unrouted: dict[ActionId, Completion] = field(default_factory=dict)
    """Completions that came before this coordinator knew their action (after a resume)."""
    waiting: deque[Result] = field(default_factory=deque)
    current: Result | None = None
    """In the program now; journalled with the turn it causes."""
    in_turn: bool = False
    """The host owes a turn."""
    replaying: bool = False
    """The turn it owes is the end of a replay."""
    host: int | None = None
    """Number of its host, while it has one."""
    strikes: int = 0
    """How often it ended its host; holding one counts by quarantine alone."""
    quarantined: bool = False
    stuck_where: str = ""
    environments: dict[CallPath, Environment] = field(default_factory=dict)
    tainted: dict[str, FaultRecord] = field(default_factory=dict)
    """Infrastructure faults it has not recovered from, by code."""
    actions: int = 0
    attempts: int = 0
    tokens: int = 0
    resumed: int = 0
    """How often it was replayed after a crash."""
    paused: float = 0.0
    """Seconds before it was; written down with the next result."""
    queue_seconds: float = 0.0
    run_seconds: float = 0.0
    policy_versions: set[int] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    answered_at: float | None = None
    """Monotonic seconds of its latest answer, while no model call followed."""
    order: int = 0
    """Place in the order of admission; older rollouts go first on the lane."""
    began: float = 0.0
    """Monotonic seconds of this coordinator."""
    deadline: float = 0.0
    """Monotonic seconds at which it is cut; time without a coordinator does not count."""
    timeout: asyncio.TimerHandle | None = None
    finished: bool = False
    reissued: set[CallPath] = field(default_factory=set)
    late: list[Late] = field(default_factory=list)
    """Late results journalled by earlier coordinators: the ledger tells of them once more."""
    became: tuple[Became, ...] = ()
    """Who it was; empty unless it is a branch."""

    @property
    def rollout_id(self) -> RolloutId:
        """Its id."""
        return self.admitted.rollout_id

    @property
    def restoring(self) -> list[ActionId]:
        """Actions that rebuild its environments now."""
        rebuilds = (environment.restoration for environment in self.environments.values())
        return [one.running for one in rebuilds if one is not None and one.running is not None]

    @property
    def given_up(self) -> list[ActionId]:
        """Actions on record of calls that nobody waits for any more."""
        return [action_id for action_id, path in self.routes.items() if path not in self.calls]

    def earlier(self, paths: Iterable[CallPath]) -> list[ActionId]:
        """Return the ended actions that stood for calls before: nobody takes their results."""
        calls = [self.calls[path] for path in paths if path in self.calls]
        return [action_id for call in calls for action_id in call.spent]

    @property
    def rebuilt(self) -> list[ActionId]:
        """Ended actions of rebuilds that go on."""
        rebuilds = [environment.restoration for environment in self.environments.values()]
        return [action_id for one in rebuilds if one is not None for action_id in one.spent]

    def opened(self, path: CallPath, completion: Completion | None) -> Environment | None:
        """Note who holds what ``completion`` opened at ``path``; ``None``: it opened nothing."""
        environment = self.environments.get(path)
        if environment is None or completion is None or not completion.leaves_open:
            return None
        environment.holder = completion.worker_id
        return environment

    def count(self, completion: Completion) -> None:
        """Count what a delivered completion cost."""
        self.attempts += completion.attempt
        self.queue_seconds += completion.timings.queue_seconds
        self.run_seconds += completion.timings.run_seconds

    def call(self, host_call: HostCall, now: float) -> Call:
        """Remember that the program awaits ``host_call``."""
        call = Call(
            path=host_call.path,
            verb=host_call.verb,
            arguments=host_call.arguments,
            issued_at=now,
        )
        self.calls[call.path] = call
        return call
