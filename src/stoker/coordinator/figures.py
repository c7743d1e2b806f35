"""Counters of one run, kept as things happen, so that a snapshot costs no scan.

Latencies are kept whole up to a bound and then sampled evenly, so that percentiles stay exact for
runs of ordinary size and bounded for long ones.
"""

from bisect import insort
from collections import Counter

from stoker.coordinator.calls import Call
from stoker.coordinator.rollouts import ActiveRollout
from stoker.model.completion import Completion
from stoker.model.outcome import Outcome
from stoker.observe import catalogue
from stoker.observe.metrics import Metrics

_LATENCIES_MAX = 200_000


class Latencies:
    """Durations in seconds with exact percentiles up to a bound.

    Kept in order, so that asking costs nothing: the live view asks four times a second.
    """

    def __init__(self) -> None:
        self._ordered: list[float] = []
        self._stride = 1
        self._seen = 0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        if self._seen % self._stride == 0:
            insort(self._ordered, seconds)
        self._seen += 1
        if len(self._ordered) >= _LATENCIES_MAX:
            self._ordered = self._ordered[::2]
            self._stride *= 2

    def percentile(self, share: float) -> float | None:
        """Return the duration below which ``share`` of them lie; ``None``: there are none."""
        if not self._ordered:
            return None
        return self._ordered[min(len(self._ordered) - 1, int(share * len(self._ordered)))]


class RunFigures:
    """What happened in this coordinator so far."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.actions_by_class: Counter[str] = Counter()
        self.slot_seconds: dict[str, float] = {}
        """Worker class → how long its actions held slots, together."""
        self.statuses: Counter[str] = Counter()
        self.latencies = Latencies()
        self.rollouts_admitted = 0
        self.actions_finished = 0
        self.late_results = 0
        self.thinks = 0
        self.think_seconds = 0.0
        self.queued_seconds = 0.0
        self.reward_sum = 0.0
        self.rewards = 0

    def admitted(self, rollout: ActiveRollout) -> None:
        """Count a rollout that became active."""
        del rollout
        self.rollouts_admitted += 1

    def fault(self, code: str) -> None:
        """Count a fault that was met."""
        self.faults[code] += 1
        self._metrics.add(catalogue.FAULTS, code=code)

    def retried(self, why: str) -> None:
        """Count one more delivery or attempt than the first."""
        self.retries[why or "requeued"] += 1
        self._metrics.add(catalogue.RETRIES, reason=why or "requeued")

    def host_lost(self) -> None:
        """Count a program host that was ended or died with rollouts in it."""
        self._metrics.add(catalogue.HOST_EVICTIONS)

    def late(self) -> None:
        """Count a result that came under a stale fence."""
        self.late_results += 1

    def latency(self, call: Call, seconds: float) -> None:
        """Count action selected → observation received."""
        self.latencies.add(seconds)
        self._metrics.observe(catalogue.ACTION_SECONDS, seconds, worker_class=call.worker_class)

    def answered(self, batch: int, seconds: float) -> None:
        """Count an answered model call: calls on its replica when it was issued, its time."""
        self._metrics.observe(catalogue.INFERENCE_BATCH, batch)
        self._metrics.observe(catalogue.GENERATE_SECONDS, seconds)
        self._metrics.add(catalogue.STEPS)

    def thought(self, seconds: float) -> None:
        """Count a model's answer → the same rollout's next model call."""
        self.thinks += 1
        self.think_seconds += seconds

    def completed(self, call: Call, completion: Completion) -> None:
        """Count a finished action."""
        self.actions_finished += 1
        self.statuses[completion.status] += 1
        self.actions_by_class[call.worker_class] += 1
        worker_class, timings, metrics = call.worker_class, completion.timings, self._metrics
        self.queued_seconds += timings.queue_seconds
        held = timings.boot_seconds + timings.run_seconds + timings.collect_seconds
        self.slot_seconds[worker_class] = self.slot_seconds.get(worker_class, 0.0) + held
        metrics.add(catalogue.ACTIONS, worker_class=worker_class, status=completion.status)
        metrics.observe(catalogue.QUEUE_SECONDS, timings.queue_seconds, worker_class=worker_class)
        if completion.attempt:
            metrics.observe(
                catalogue.EXECUTION_SECONDS,
                timings.run_seconds,
                worker_class=worker_class,
                status=completion.status,
            )
            metrics.observe(catalogue.BOOT_SECONDS, timings.boot_seconds, worker_class=worker_class)

    def finished(self, outcome: Outcome) -> None:
        """Count an outcome."""
        self.outcomes[outcome.kind] += 1
        self._metrics.add(catalogue.OUTCOMES, outcome=outcome.kind)
        if outcome.reward is not None:
            self.reward_sum += outcome.reward
            self.rewards += 1

    @property
    def ended(self) -> int:
        """Rollouts with an outcome."""
        return self.outcomes.total()

    @property
    def reward_mean(self) -> float | None:
        """Mean reward of completed rollouts."""
        return self.reward_sum / self.rewards if self.rewards else None

    @property
    def retries_total(self) -> int:
        """All retries."""
        return sum(self.retries.values())
