"""What admission is told once a second: differences of counters since it was told before."""

from stoker.broker.base import StatsReply
from stoker.coordinator.admission import Admission, AdmissionChange, AdmissionSample
from stoker.coordinator.figures import RunFigures
from stoker.coordinator.lane import Lane


class AdmissionFeed:
    """Turns the run's counters into samples."""

    def __init__(
        self, admission: Admission, lane: Lane, figures: RunFigures, results_max: int
    ) -> None:
        self._admission = admission
        self._lane = lane
        self._figures = figures
        self._results_max = results_max
        self._totals = lane.totals()
        self._thinks = 0
        self._think_seconds = self._queued_seconds = 0.0

    def sample(
        self,
        *,
        active: int,
        boxes_reserved: int,
        stats: StatsReply | None,
        memory_short_share: float = 0.0,
        over_caps: int = 0,
    ) -> AdmissionChange | None:
        """Tell admission how things are; return what it changed, if anything.

        ``memory_short_share``: workers that take on no more boxes for want of memory ÷ workers;
        ``over_caps``: actions of this run that the ledger has parked over a cap.
        """
        lane = self._lane.figures(self._totals)
        self._totals = self._lane.totals()
        think, queued = self._think()
        limits = self._lane.working.limits
        change = self._admission.observe(
            AdmissionSample(
                active=active,
                ready=lane.ready,
                running=lane.running,
                window=lane.window,
                room_share=lane.room_share,
                queue_seconds={
                    name: found.oldest_queued_seconds for name, found in stats.classes.items()
                }
                if stats
                else {},
                results_share=stats.unacknowledged / self._results_max if stats else 0.0,
                # Where the working set holds for memory, full caches are what it aims at, and its
                # own model learns from what it finds missing.
                kv_share=None if limits else lane.kv_share,
                preempted_share=0.0 if limits else lane.preemptions / max(1, lane.calls),
                boxes_reserved=boxes_reserved,
                memory_short_share=memory_short_share,
                over_caps=over_caps,
                service_seconds=lane.service_seconds,
                think_seconds=think,
                queued_seconds=queued,
                capacity_calls_per_second=lane.capacity_calls_per_second,
            )
        )
        self._lane.parallelism.limit(self._admission.parallelism())
        return change

    def _think(self) -> tuple[float | None, float]:
        """Return the mean time from an answer to the next model call since the sample before, and
        how much of it actions waited for workers.
        """  # noqa: D205 - one thought
        count = self._figures.thinks - self._thinks
        seconds = self._figures.think_seconds - self._think_seconds
        queued = self._figures.queued_seconds - self._queued_seconds
        self._thinks += count
        self._think_seconds += seconds
        self._queued_seconds += queued
        return (seconds / count, queued / count) if count else (None, 0.0)
