"""What a running run says of itself: status, log lines, metrics, the observer, its claims.

A second's look at the ledger serves all of them, admission too. What is told may fail, the run may
not: a silent ledger leaves the last counters, a full disk a status that is old, an observer that
raises is told nothing more.
"""

import asyncio
from contextlib import suppress

from stoker.broker.base import RunStats, StatsReply
from stoker.config.tree import Settings
from stoker.coordinator.coordinator import Coordinator
from stoker.coordinator.exporting import Exporter
from stoker.coordinator.request import Observer
from stoker.coordinator.sampling import AdmissionFeed
from stoker.coordinator.server_share import ServerShare
from stoker.coordinator.snapshots import Snapshots
from stoker.coordinator.unused import Unused
from stoker.coordinator.view import RunSnapshot
from stoker.errors import StokerError
from stoker.observe.metrics import Metrics
from stoker.seams.clock import Clock

_OBSERVE_SECONDS = 0.25
_STATUS_EVERY = 4
_LOOK_SECONDS = 1.0
"""How long a status waits for the ledger's counters before it is written with the last ones, and
the lane for what others claim of its servers before it keeps the part it has."""


class Telling:
    """Tells of one coordinator; its observer hears four times a second, all others once."""

    def __init__(
        self,
        settings: Settings,
        coordinator: Coordinator,
        snapshots: Snapshots,
        observer: Observer | None,
    ) -> None:
        self._coordinator = coordinator
        self._snapshots = snapshots
        self._observer = observer
        parts = coordinator.parts
        self._log = coordinator.flow.parts.log
        self._stats: StatsReply | None = None
        self._memory_short = 0.0
        self._unused = Unused(parts.lane)
        self._feed = AdmissionFeed(
            parts.admission, parts.lane, parts.figures, settings.ledger.results_max
        )
        self._share = ServerShare.of_run(parts.ledger, parts.lane, parts.plan, settings.lane)

    async def run(self, metrics: Metrics, clock: Clock) -> None:
        """Tell until cancelled."""
        exporter = Exporter(metrics)
        count = 0
        while True:
            whole = count % _STATUS_EVERY == 0
            if whole:
                await self._look()
                self._admit()
                self._charge()
            snapshot = self.now()
            if whole:
                self._snapshots.write(snapshot)
                if self._stats is not None:
                    totals = self._coordinator.parts.lane.totals()
                    exporter.export(snapshot, totals, self._unused.seconds, self._stats)
            count += 1
            due = clock.monotonic() + _OBSERVE_SECONDS
            await asyncio.sleep(_OBSERVE_SECONDS)
            exporter.lag(clock.monotonic() - due)

    def last(self) -> RunSnapshot:
        """Return the run as it ended."""
        self._charge()
        return self.now()

    def now(self) -> RunSnapshot:
        """Return the run as it stands, its ended rollouts logged and its observer told."""
        for line in self._coordinator.parts.lines:
            self._log.rollout(line)
            self._snapshots.ended(line)
        self._coordinator.parts.lines.clear()
        snapshot = self._snapshots.take(self._unused.shares())
        self._memory_short = snapshot.memory_short_share
        if self._observer is not None:
            try:
                self._observer(snapshot)
            except Exception as error:  # noqa: BLE001 - the caller's code, or a terminal that went away
                self._observer = None
                self._snapshots.said(f"the run's observer failed and hears no more: {error!r}")
        return snapshot

    async def _look(self) -> None:
        """Ask the ledger; what it does not say in time stays as it was."""
        with suppress(TimeoutError, StokerError):
            async with asyncio.timeout(_LOOK_SECONDS):
                self._stats = await self._snapshots.refresh()
        with suppress(TimeoutError, StokerError):
            async with asyncio.timeout(_LOOK_SECONDS):
                active = len(self._coordinator.flow.active)
                await self._share.refresh(more=self._coordinator.left > active)

    def _charge(self) -> None:
        active = self._coordinator.flow.active
        self._unused.look(active.values(), more=self._coordinator.left > len(active))

    def _admit(self) -> None:
        runs = self._stats.runs if self._stats else {}
        mine = runs.get(self._coordinator.parts.plan.run_id, RunStats())
        change = self._feed.sample(
            active=len(self._coordinator.flow.active),
            boxes_reserved=self._coordinator.boxes_reserved,
            stats=self._stats,
            memory_short_share=self._memory_short,
            over_caps=mine.over_caps,
        )
        if change is not None:
            self._log.event(
                "admission_changed",
                before=change.before,
                after=change.after,
                why=change.reason,
            )
