"""The one catalogue of metric and log-event names. What is not here is not measured.

Every metric says its kind, labels, meaning and where it is measured; ``docs/reference/metrics.md``
is made from this file. Label values are few and known in advance (classes, codes, states): never
an id. Names end in their unit; counters end in ``_total``.
"""

from typing import ClassVar

import msgspec

PREFIX = "stoker_"

LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0,
)  # fmt: skip
LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One name of the catalogue."""

    kind: ClassVar[str] = ""
    name: str
    labels: tuple[str, ...] = ()
    help: str
    """What it counts, in one sentence."""
    where: str
    """The room that measures it, and at which moment."""


class CounterMetric(Metric, frozen=True, kw_only=True):
    """Only grows."""

    kind: ClassVar[str] = "counter"


class GaugeMetric(Metric, frozen=True, kw_only=True):
    """A state, now."""

    kind: ClassVar[str] = "gauge"


class HistogramMetric(Metric, frozen=True, kw_only=True):
    """A distribution."""

    kind: ClassVar[str] = "histogram"
    buckets: tuple[float, ...] = LATENCY_BUCKETS


# --- inference lane -------------------------------------------------------------------------

LANE_SECONDS = CounterMetric(
    name="stoker_lane_seconds_total",
    help="Lane time: seconds in which the lane existed.",
    where="coordinator, lane",
)
LANE_ACTIVE_SECONDS = CounterMetric(
    name="stoker_lane_active_seconds_total",
    help="Seconds in which some replica had at least one call running.",
    where="coordinator, lane",
)
LANE_IDLE_WHILE_READY_SECONDS = CounterMetric(
    name="stoker_lane_idle_while_ready_seconds_total",
    help="Seconds in which a rollout was ready, a replica had room, and nothing was issued.",
    where="coordinator, lane",
)
LANE_UNUSED_SECONDS = CounterMetric(
    name="stoker_lane_unused_call_seconds_total",
    help="Places of the window that nothing was ready for, times seconds, by what they waited for.",
    where="coordinator, once a second",
    labels=("cause",),
)
LANE_TOKENS = CounterMetric(
    name="stoker_lane_tokens_total",
    help="Tokens sampled.",
    where="coordinator, when a generation returns",
)
LANE_CALLS = CounterMetric(
    name="stoker_lane_calls_total",
    labels=("result",),
    help="Model calls by result: returned, retried, failed; aborted: continued, anew.",
    where="coordinator, lane",
)
LANE_RUNNING = GaugeMetric(
    name="stoker_lane_running_calls",
    help="Model calls running now, all replicas.",
    where="coordinator, lane",
)
LANE_WINDOW = GaugeMetric(
    name="stoker_lane_window_calls",
    help="Model calls all replicas take at once.",
    where="coordinator, lane",
)
LANE_THROUGHPUT_SHARE = GaugeMetric(
    name="stoker_lane_throughput_share",
    help="Tokens sampled ÷ what a full window would have sampled in the same time.",
    where="coordinator, lane, from the model's own load figures",
)
INFERENCE_BATCH = HistogramMetric(
    name="stoker_inference_batch_calls",
    buckets=BATCH_BUCKETS,
    help="Calls running on a replica at the moment another is issued to it, itself included.",
    where="coordinator, lane, at each issue",
)
GENERATE_SECONDS = HistogramMetric(
    name="stoker_generate_seconds",
    help="Model call issued to returned.",
    where="coordinator, lane",
)
READY_ROLLOUTS = GaugeMetric(
    name="stoker_ready_rollouts",
    help="Ready depth: rollouts whose next model call could be issued now.",
    where="coordinator, ready set",
)

# --- execution lane -------------------------------------------------------------------------

QUEUED_ACTIONS = GaugeMetric(
    name="stoker_queued_actions",
    labels=("worker_class",),
    help="Actions accepted and not leased.",
    where="coordinator, from the ledger's stats",
)
QUEUE_AGE_SECONDS = GaugeMetric(
    name="stoker_queue_age_seconds",
    labels=("worker_class",),
    help="Age of the oldest queued action.",
    where="coordinator, from the ledger's stats",
)
RUNNING_ACTIONS = GaugeMetric(
    name="stoker_running_actions",
    labels=("worker_class",),
    help="Actions leased or started.",
    where="coordinator, from the ledger's stats",
)
WORKER_SLOTS = GaugeMetric(
    name="stoker_worker_slots",
    labels=("worker_class",),
    help="Slots of live workers.",
    where="coordinator, from the ledger's stats",
)
WORKER_BUSY_SHARE = GaugeMetric(
    name="stoker_worker_busy_share",
    labels=("worker_class",),
    help="Worker utilisation: running actions ÷ slots.",
    where="coordinator, from the ledger's stats",
)
EXECUTION_SECONDS = HistogramMetric(
    name="stoker_execution_seconds",
    labels=("worker_class", "status"),
    help="The work of one action in its box.",
    where="coordinator, from the completion's timings",
)
QUEUE_SECONDS = HistogramMetric(
    name="stoker_queue_seconds",
    labels=("worker_class",),
    help="Action accepted to leased.",
    where="coordinator, from the completion's timings",
)
BOOT_SECONDS = HistogramMetric(
    name="stoker_boot_seconds",
    labels=("worker_class",),
    help="Making the box of an action.",
    where="coordinator, from the completion's timings",
)
ACTION_SECONDS = HistogramMetric(
    name="stoker_action_seconds",
    labels=("worker_class",),
    help="Action selected to observation received.",
    where="coordinator, when a result is delivered to its program",
)
ACTIONS = CounterMetric(
    name="stoker_actions_total",
    labels=("worker_class", "status"),
    help="Terminal results of actions, by completion status.",
    where="coordinator, when a result is applied",
)
RETRIES = CounterMetric(
    name="stoker_retries_total",
    labels=("reason",),
    help="Deliveries and attempts after the first, by why they were needed.",
    where="coordinator, when the ledger tells of them",
)
LATE_RESULTS = CounterMetric(
    name="stoker_late_results_total",
    help="Results under a stale fence: recorded, nothing applied unless the action says so.",
    where="coordinator, from the ledger's stats",
)
DEAD_LETTERS = CounterMetric(
    name="stoker_dead_letters_total",
    help="Actions that used up their attempts or deliveries.",
    where="coordinator, from the ledger's stats",
)
BOXES_ALIVE = GaugeMetric(
    name="stoker_boxes_alive",
    help="Boxes that exist now.",
    where="coordinator, from the workers' status files",
)
BOXES_READY = GaugeMetric(
    name="stoker_boxes_ready",
    help="Boxes made ahead that wait for use.",
    where="coordinator, from the workers' status files",
)
BOXES = CounterMetric(
    name="stoker_boxes_total",
    labels=("ready",),
    help="Boxes asked for, by whether one waited; checkpoints restored count as no.",
    where="worker, per box",
)
BOXES_LEAKED = GaugeMetric(
    name="stoker_boxes_leaked",
    help="Boxes written down whose teardown did not finish; the expected value is 0.",
    where="coordinator, from the workers' status files",
)

# --- rollouts and coordinator ---------------------------------------------------------------

OUTCOMES = CounterMetric(
    name="stoker_outcomes_total",
    labels=("outcome",),
    help="Finished rollouts by kind of outcome.",
    where="coordinator, when an outcome is durable",
)
FAULTS = CounterMetric(
    name="stoker_faults_total",
    labels=("code",),
    help="Faults met, by error code; docs/reference/errors.md says whose fault each is.",
    where="coordinator, where a fault is recorded",
)
ACTIVE_ROLLOUTS = GaugeMetric(
    name="stoker_active_rollouts",
    help="Rollouts admitted and not finished.",
    where="coordinator, admission",
)
ADMISSION_TARGET = GaugeMetric(
    name="stoker_admission_target_rollouts",
    help="Active rollouts admission aims at.",
    where="coordinator, admission",
)
STEPS = CounterMetric(
    name="stoker_steps_total",
    help="Model turns whose actions were handed off.",
    where="coordinator, when a turn is durable",
)
HOST_EVICTIONS = CounterMetric(
    name="stoker_host_evictions_total",
    help="Program hosts ended because a program held them, or lost.",
    where="coordinator, program hosts",
)
LOOP_LAG_SECONDS = HistogramMetric(
    name="stoker_loop_lag_seconds",
    buckets=LAG_BUCKETS,
    help="How late the coordinator's event loop ran a timer.",
    where="coordinator, event loop",
)
COMMITS = CounterMetric(
    name="stoker_ledger_commits_total",
    help="Transactions of the ledger.",
    where="coordinator, from the ledger's stats",
)
SYNCS = CounterMetric(
    name="stoker_ledger_syncs_total",
    help="Syncs of the ledger to its disk.",
    where="coordinator, from the ledger's stats",
)

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
"""Every metric, in the order above."""

# --- log lines ------------------------------------------------------------------------------

ROLLOUT_FINISHED = "rollout_finished"

LOG_EVENTS: dict[str, str] = {
    "run_started": "A coordinator has attached to a run.",
    "run_ended": "A coordinator lets go of a run; says whether work is left.",
    ROLLOUT_FINISHED: "The canonical line of one rollout: everything about how it went.",
    "model_notice": "What the model cannot give, said once when the run starts.",
    "policy_published": "A trainer published a policy version, and what calls in flight do.",
    "calls_taken_back": "Calls ended for a policy: how many go on from what they had, or anew.",
    "admission_changed": "Admission changed its target or a rollout's calls at once, and why.",
    "fault": "A rollout met a fault; says which, and whether it bars a reward.",
    "action_requeued": "The ledger takes an action back from a worker, and why.",
    "late_result": "A result came under a stale fence, and what was decided.",
    "check_failed": "A finished rollout could not be replayed for a check, and why.",
    "branch_refused": "Branches that were asked for from outside cannot be made any more.",
    "host_lost": "A program host was ended or died; its rollouts are replayed elsewhere.",
}
"""Event name → what it says, of the coordinator's log; the workers' are in ``worker.log``."""
