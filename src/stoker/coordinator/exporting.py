"""Prometheus metrics that are states: brought up to date once a second from one snapshot.

Metrics that are events (latencies, outcomes, faults) are recorded where they happen, in
``figures``.
"""

from collections.abc import Mapping

from stoker.broker.base import StatsReply
from stoker.coordinator.lane_figures import LaneTotals
from stoker.coordinator.view import RunSnapshot
from stoker.observe import catalogue
from stoker.observe.metrics import Metrics


class Exporter:
    """Writes snapshots into metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def export(
        self,
        snapshot: RunSnapshot,
        lane: LaneTotals,
        unused: Mapping[str, float],
        stats: StatsReply,
    ) -> None:
        """Bring every state metric up to date; ``unused``: call-seconds by cause."""
        self._lane(snapshot, lane)
        for cause, seconds in unused.items():
            self._metrics.total(catalogue.LANE_UNUSED_SECONDS, seconds, cause=cause)
        self._classes(stats)
        metrics = self._metrics
        metrics.set(catalogue.ADMISSION_TARGET, snapshot.admission_target)
        metrics.set(catalogue.ACTIVE_ROLLOUTS, snapshot.rollouts_active)
        metrics.set(catalogue.BOXES_ALIVE, snapshot.boxes_alive)
        metrics.set(catalogue.BOXES_LEAKED, snapshot.boxes_leaked)
        metrics.set(catalogue.BOXES_READY, snapshot.boxes_ready)
        metrics.total(catalogue.LATE_RESULTS, stats.late_total)
        metrics.total(catalogue.DEAD_LETTERS, stats.dead_total)
        metrics.total(catalogue.COMMITS, stats.commits_total)
        metrics.total(catalogue.SYNCS, stats.syncs_total)

    def lag(self, seconds: float) -> None:
        """Record how late the loop ran a timer."""
        self._metrics.observe(catalogue.LOOP_LAG_SECONDS, max(0.0, seconds))

    def _lane(self, snapshot: RunSnapshot, lane: LaneTotals) -> None:
        metrics = self._metrics
        metrics.total(catalogue.LANE_SECONDS, lane.seconds)
        metrics.total(catalogue.LANE_ACTIVE_SECONDS, lane.active_seconds)
        metrics.total(catalogue.LANE_IDLE_WHILE_READY_SECONDS, lane.idle_while_ready_seconds)
        metrics.total(catalogue.LANE_TOKENS, lane.tokens)
        metrics.total(catalogue.LANE_CALLS, lane.calls, result="returned")
        metrics.total(catalogue.LANE_CALLS, lane.retries, result="retried")
        metrics.total(catalogue.LANE_CALLS, lane.failures, result="failed")
        metrics.total(catalogue.LANE_CALLS, lane.continued, result="continued")
        metrics.total(catalogue.LANE_CALLS, lane.anew, result="anew")
        metrics.set(catalogue.LANE_RUNNING, snapshot.lane.running)
        metrics.set(catalogue.LANE_WINDOW, snapshot.lane.window)
        metrics.set(catalogue.LANE_THROUGHPUT_SHARE, snapshot.lane.throughput_share or 0.0)
        metrics.set(catalogue.READY_ROLLOUTS, snapshot.lane.ready)

    def _classes(self, stats: StatsReply) -> None:
        metrics = self._metrics
        for name, found in stats.classes.items():
            running = found.leased + found.started
            metrics.set(catalogue.QUEUED_ACTIONS, found.queued, worker_class=name)
            metrics.set(catalogue.RUNNING_ACTIONS, running, worker_class=name)
            metrics.set(catalogue.WORKER_SLOTS, found.slots, worker_class=name)
            metrics.set(catalogue.QUEUE_AGE_SECONDS, found.oldest_queued_seconds, worker_class=name)
            busy = running / found.slots if found.slots else 0.0
            metrics.set(catalogue.WORKER_BUSY_SHARE, busy, worker_class=name)
