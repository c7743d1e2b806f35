"""What a run looks like from outside, now: one snapshot for the live view, ``status`` and metrics.

A snapshot is plain data, taken from counters the coordinator keeps anyway; taking one costs no
scan of rollouts. It is also written to ``status.json`` in the run directory once a second. Of a
divided run each coordinator takes its own; ``whole`` puts them together.
"""

import msgspec

from stoker.coordinator.groups import LengthBias


class LaneView(msgspec.Struct, frozen=True, kw_only=True):
    """The inference lane: four figures that always stand together, and what lies behind them."""

    model: str
    simulated: bool
    replicas: int
    window: int
    """Calls all replicas take at once."""
    running: int
    ready: int
    """Rollouts whose next model call could be issued now."""
    active_share: float
    """Share of lane time in which some replica was working."""
    throughput_share: float | None
    """Tokens sampled ÷ what a full window would have sampled in the same time."""
    occupancy: float
    """Mean running calls ÷ window while active."""
    idle_while_ready_share: float
    """Share of lane time with a ready rollout and room, and nothing issued."""
    calls: int
    tokens: int
    retries: int
    paused: bool = False
    """New calls are held for a weight update."""
    parked: int = 0
    """Calls that wait for memory in a KV cache."""
    kv_held_share: float = 0.0
    """Share of lane time held for KV: room, and no memory for what would use it."""
    unused: dict[str, float] = {}
    """Share of the window that was unused with nothing ready, by what its places waited for."""


class ClassView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker class."""

    queued: int
    parked: int = 0
    """Accepted over a cap, not queued yet."""
    running: int
    slots: int
    oldest_queued_seconds: float
    finished: int
    busy_share: float
    slots_needed: float | None = None
    """Slots with which this class does not hold a full lane up (X·Z); ``None``: not known yet."""


class CapsView(msgspec.Struct, frozen=True, kw_only=True):
    """How far the ledger's caps are used, by this run and by all of its ledger."""

    queued: int
    """Queued and leased actions of every run."""
    queued_max: int
    unacknowledged: int
    """Results of every run that are not applied yet."""
    results_max: int
    run_queued: int = 0
    """Of this run: queued and leased."""
    run_queued_max: int | None = None
    run_leased: int = 0
    run_leased_max: int | None = None
    parked: int = 0
    """Of this run: accepted over a cap or quota."""
    other_runs: int = 0
    """Runs with unfinished actions on the same ledger."""


class ServiceView(msgspec.Struct, frozen=True, kw_only=True):
    """One remote service, as all workers of the ledger share it."""

    rate: float
    """Actions a second that may be handed out now."""
    rate_max: float
    waits_seconds: float = 0.0
    """Until the next may be handed out."""
    lowered: int = 0
    """How often its "too many requests" has lowered the rate."""


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """What the run has spent of its budgets."""

    tokens: int
    tokens_max: float | None = None
    box_seconds: float = 0.0
    box_seconds_max: float | None = None
    money: float = 0.0
    money_max: float | None = None


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run, now."""

    run_id: str
    run_directory: str
    state: str
    """``starting``, ``running``, ``draining``, ``finished``, ``stopped``."""
    seconds: float
    """Since this coordinator started."""
    tasks_total: int
    rollouts_total: int
    rollouts_active: int
    admission_target: int
    outcomes: dict[str, int]
    """Finished rollouts by kind."""
    reward_mean: float | None
    lane: LaneView
    classes: dict[str, ClassView]
    latency_ms_p50: float | None
    """Action selected → observation received."""
    latency_ms_p99: float | None
    actions: int
    retries: int
    faults: dict[str, int]
    """By code."""
    first_failures: dict[str, str] = {}
    """Fault code → which rollout failed with it first under this coordinator, and what was said."""
    boxes_alive: int
    boxes_leaked: int
    boxes_ready: int = 0
    """Of those alive, made ahead and not used yet."""
    memory_short_share: float = 0.0
    """Workers whose boxes leave the host no more memory than its reserve ÷ workers."""
    isolation: dict[str, str]
    """Worker class → ``namespace (rung a)`` or what it got."""
    accept_shared_kernel: bool
    caps: CapsView | None = None
    """``None``: the ledger has not answered yet."""
    services: dict[str, ServiceView] = {}
    """Remote services whose rate is limited."""
    budget: BudgetView | None = None
    """``None``: it has none."""
    held: str = ""
    """Why nothing new is admitted, where a budget says so."""
    stragglers: LengthBias | None = None
    """What cutting stragglers off has cost since this coordinator began; ``None``: nobody was."""
    recent: tuple[str, ...] = ()
    """Last few rollout lines, already free of control characters."""
    partition: str | msgspec.UnsetType = msgspec.UNSET
    """``1/4``: of that part only; empty: of all parts; left out where a run is not divided."""
