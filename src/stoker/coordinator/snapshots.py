"""Snapshots of a run: for the live view four times a second, for ``status.json`` once a second.

The Prometheus metrics that are states rather than events are brought up to date by ``exporting``.
"""

from contextlib import suppress
from typing import Protocol

import msgspec

from stoker.broker.base import LedgerLimits, RunStats, StatsReply
from stoker.coordinator.coordinator import Coordinator
from stoker.coordinator.lane_figures import LaneFigures
from stoker.coordinator.record import RunDirectory, write_atomically
from stoker.coordinator.sharing import Part
from stoker.coordinator.sizing import slots_needed
from stoker.coordinator.view import CapsView, ClassView, LaneView, RunSnapshot, ServiceView
from stoker.coordinator.workers import DIED, WorkerSeen
from stoker.observe.log import RolloutLine

_RECENT = 6


class Workers(Protocol):
    """Who knows the run's workers."""

    def seen(self) -> tuple[WorkerSeen, ...]:
        """Return what every worker last said of itself."""
        ...


class Snapshots:
    """Takes snapshots of one coordinator."""

    def __init__(
        self,
        coordinator: Coordinator,
        run: RunDirectory,
        part: Part,
        workers: Workers,
        *,
        accept_shared_kernel: bool,
    ) -> None:
        self._coordinator = coordinator
        self._parts = coordinator.parts
        self._run = run
        self._part = part
        self._workers = workers
        self._shared = accept_shared_kernel
        self._began = coordinator.parts.clock.monotonic()
        self._stats: StatsReply | None = None
        self._limits: LedgerLimits | None = None
        self._held = ""
        self._recent: list[str] = []
        self._first_failures: dict[str, str] = {}

    async def refresh(self) -> StatsReply:
        """Ask the ledger for its counters."""
        if self._limits is None:  # an owner that lived before us keeps its own
            self._limits = (await self._parts.ledger.capabilities()).limits
        self._stats = await self._parts.ledger.stats()
        return self._stats

    def said(self, line: str) -> None:
        """Remember a line for people."""
        self._recent = [*self._recent, line][-_RECENT:]

    def hold(self, line: str) -> None:
        """Tell why nothing new is admitted any more."""
        self.said(line)
        self._held = line

    def ended(self, line: RolloutLine) -> None:
        """Remember how a rollout ended, and of each kind of failure the first."""
        self.said(line.brief())
        if (fault := line.outcome.fault) is not None:
            said = f"{line.task} ({line.rollout}): {fault.message}"
            self._first_failures.setdefault(fault.code, said)

    def take(self, unused: dict[str, float]) -> RunSnapshot:
        """Return the run, now; ``unused``: shares of the lane's window by cause."""
        figures = self._parts.figures
        seen = self._workers.seen()
        partition = self._part.partition
        lane = self._parts.lane.figures()
        bias = self._coordinator.keeper.groups.bias
        p50, p99 = figures.latencies.percentile(0.5), figures.latencies.percentile(0.99)
        return RunSnapshot(
            run_id=self._parts.plan.run_id,
            run_directory=str(self._run.path),
            state=self._coordinator.state,
            seconds=self._parts.clock.monotonic() - self._began,
            tasks_total=len(self._parts.plan.tasks),
            rollouts_total=self._coordinator.keeper.total,
            rollouts_active=len(self._coordinator.flow.active),
            admission_target=self._parts.admission.target(),
            outcomes=dict(figures.outcomes),
            reward_mean=figures.reward_mean,
            lane=_lane_view(lane, unused),
            classes=self._classes(seen, lane),
            latency_ms_p50=None if p50 is None else p50 * 1000,
            latency_ms_p99=None if p99 is None else p99 * 1000,
            actions=figures.actions_finished,
            retries=figures.retries_total,
            faults=dict(figures.faults),
            first_failures=dict(self._first_failures),
            boxes_alive=sum(worker.boxes_alive for worker in seen),
            boxes_leaked=sum(worker.boxes_leaked for worker in seen),
            boxes_ready=sum(worker.boxes_ready for worker in seen),
            memory_short_share=_memory_short(seen),
            isolation=_isolation(seen),
            accept_shared_kernel=self._shared,
            caps=self._caps(),
            services=self._services(),
            budget=self._parts.budget.view(),
            held=self._held or self._parts.budget.held or self._coordinator.keeper.held,
            stragglers=msgspec.structs.replace(bias) if bias.cut else None,
            recent=tuple(self._recent),
            partition=msgspec.UNSET if partition.is_whole else str(partition),
        )

    def write(self, snapshot: RunSnapshot) -> None:
        """Replace the partition's ``status.json``; a full disk costs its readers, never the run."""
        with suppress(OSError):
            write_atomically(self._part.status, msgspec.json.encode(snapshot))

    def _caps(self) -> CapsView | None:
        stats, limits = self._stats, self._limits
        if stats is None or limits is None:
            return None
        mine = stats.runs.get(self._parts.plan.run_id, RunStats())
        return CapsView(
            queued=sum(one.queued + one.leased + one.started for one in stats.classes.values()),
            queued_max=limits.queued_max,
            unacknowledged=stats.unacknowledged,
            results_max=limits.results_max,
            run_queued=mine.queued + mine.leased,
            run_queued_max=limits.queued_per_run_max,
            run_leased=mine.leased,
            run_leased_max=limits.leased_per_run_max,
            parked=mine.parked,
            other_runs=len(stats.runs.keys() - {self._parts.plan.run_id}),
        )

    def _services(self) -> dict[str, ServiceView]:
        known = self._stats.services if self._stats else {}
        return {name: ServiceView(**msgspec.structs.asdict(one)) for name, one in known.items()}

    def _classes(self, seen: tuple[WorkerSeen, ...], lane: LaneFigures) -> dict[str, ClassView]:
        figures = self._parts.figures
        needed = slots_needed(lane, figures.actions_by_class, figures.slot_seconds)
        stats = self._stats.classes if self._stats else {}
        names = sorted({*stats, *(name for worker in seen for name in worker.classes)})
        views = {}
        for name in names:
            workers = [w.classes[name] for w in seen if name in w.classes]
            ledger = stats.get(name)
            slots = sum(w.slots for w in workers)
            views[name] = ClassView(
                queued=ledger.queued if ledger else 0,
                parked=ledger.parked if ledger else 0,
                running=ledger.started if ledger else 0,
                slots=slots,
                oldest_queued_seconds=ledger.oldest_queued_seconds if ledger else 0.0,
                finished=sum(w.finished for w in workers),
                busy_share=sum(w.busy_share * w.slots for w in workers) / slots if slots else 0.0,
                slots_needed=needed.get(name),
            )
        return views


def _lane_view(lane: LaneFigures, unused: dict[str, float]) -> LaneView:
    return LaneView(
        model=lane.model,
        simulated=lane.simulated,
        replicas=lane.replicas,
        window=lane.window,
        running=lane.running,
        ready=lane.ready,
        active_share=lane.active_share,
        throughput_share=lane.throughput_share,
        occupancy=lane.occupancy,
        idle_while_ready_share=lane.idle_while_ready_share,
        calls=lane.calls,
        tokens=lane.tokens,
        retries=lane.retries,
        paused=lane.paused,
        parked=lane.parked,
        kv_held_share=lane.kv_held_share,
        unused=unused,
    )


def _memory_short(seen: tuple[WorkerSeen, ...]) -> float:
    """Return the share of living workers that are short of memory."""
    living = [worker.memory_short for worker in seen if worker.state != DIED]
    return sum(living) / max(1, len(living))


def _isolation(seen: tuple[WorkerSeen, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for worker in seen:
        for name, figures in worker.classes.items():
            if figures.isolation is not None:
                kind, rung = figures.isolation.get("isolation"), figures.isolation.get("rung")
                found[name] = str(kind) if kind == rung else f"{kind} (rung {rung})"
    return found
