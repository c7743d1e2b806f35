"""A divided run seen as one: the snapshots of its partitions put together."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from stoker.coordinator.groups import LengthBias
from stoker.coordinator.view import BudgetView, ClassView, LaneView, RunSnapshot
from stoker.model.outcome import OutcomeKind

_RECENT = 6
_STATES = ("starting", "running", "draining", "stopped", "finished")
"""Of the whole: the first of these that some partition is in."""


def merged(snapshots: Sequence[RunSnapshot]) -> RunSnapshot:
    """Return one snapshot of all partitions, of which the last was taken last.

    Counts are summed. Shares of lane time are means weighted by window. Of latencies the largest
    is kept, since percentiles do not add up. Workers and queues are the run's, seen by each
    partition alike: the last snapshot's are kept; what each partition needs of slots is summed.
    """
    last = snapshots[-1]
    p50, p99 = (
        max((v for v in values if v is not None), default=None)
        for values in (
            [s.latency_ms_p50 for s in snapshots],
            [s.latency_ms_p99 for s in snapshots],
        )
    )
    return msgspec.structs.replace(
        last,
        partition="",
        state=min((s.state for s in snapshots), key=_STATES.index),
        seconds=max(s.seconds for s in snapshots),
        tasks_total=sum(s.tasks_total for s in snapshots),
        rollouts_total=sum(s.rollouts_total for s in snapshots),
        rollouts_active=sum(s.rollouts_active for s in snapshots),
        admission_target=sum(s.admission_target for s in snapshots),
        outcomes=_summed([s.outcomes for s in snapshots]),
        reward_mean=_reward(snapshots),
        lane=_lane([s.lane for s in snapshots]),
        latency_ms_p50=p50,
        latency_ms_p99=p99,
        actions=sum(s.actions for s in snapshots),
        retries=sum(s.retries for s in snapshots),
        faults=_summed([s.faults for s in snapshots]),
        first_failures={k: v for s in reversed(snapshots) for k, v in s.first_failures.items()},
        classes=_classes(snapshots),
        budget=_budget([s.budget for s in snapshots if s.budget is not None]),
        held=next((s.held for s in snapshots if s.held), ""),
        isolation={k: v for s in snapshots for k, v in s.isolation.items()},
        stragglers=_stragglers([s.stragglers for s in snapshots if s.stragglers is not None]),
        recent=tuple(line for s in snapshots for line in s.recent)[-_RECENT:],
    )


def _classes(snapshots: Sequence[RunSnapshot]) -> dict[str, ClassView]:
    found = dict(snapshots[-1].classes)
    for name, one in found.items():
        views = (s.classes[name] for s in snapshots if name in s.classes)
        needed = [view.slots_needed for view in views if view.slots_needed is not None]
        found[name] = msgspec.structs.replace(one, slots_needed=sum(needed) if needed else None)
    return found


def _stragglers(parts: Sequence[LengthBias]) -> LengthBias | None:
    fields = [msgspec.structs.asdict(one) for one in parts]
    names = fields[0] if fields else ()
    return (
        LengthBias(**{name: sum(one[name] for one in fields) for name in names}) if parts else None
    )


def _budget(parts: Sequence[BudgetView]) -> BudgetView | None:
    if not parts:
        return None
    return BudgetView(
        tokens=sum(one.tokens for one in parts),
        tokens_max=_most([one.tokens_max for one in parts]),
        box_seconds=sum(one.box_seconds for one in parts),
        box_seconds_max=_most([one.box_seconds_max for one in parts]),
        money=sum(one.money for one in parts),
        money_max=_most([one.money_max for one in parts]),
    )


def _most(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) if known else None


def _summed(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _reward(snapshots: Sequence[RunSnapshot]) -> float | None:
    weights = [(s.reward_mean, s.outcomes.get(OutcomeKind.COMPLETED, 0)) for s in snapshots]
    rewarded = [(mean, count) for mean, count in weights if mean is not None]
    total = sum(count for _, count in rewarded)
    return sum(mean * count for mean, count in rewarded) / total if total else None


def _lane(lanes: Sequence[LaneView]) -> LaneView:
    windows = sum(lane.window for lane in lanes)

    def mean(shares: Sequence[float]) -> float:
        weighted = zip(shares, (lane.window for lane in lanes), strict=True)
        return sum(share * window for share, window in weighted) / windows if windows else 0.0

    bounds = [lane.throughput_share for lane in lanes]
    known = [share for share in bounds if share is not None]
    return LaneView(
        model=" + ".join(dict.fromkeys(lane.model for lane in lanes)),
        simulated=any(lane.simulated for lane in lanes),
        replicas=sum(lane.replicas for lane in lanes),
        window=windows,
        running=sum(lane.running for lane in lanes),
        ready=sum(lane.ready for lane in lanes),
        active_share=mean([lane.active_share for lane in lanes]),
        throughput_share=mean(known) if len(known) == len(lanes) else None,
        occupancy=mean([lane.occupancy for lane in lanes]),
        idle_while_ready_share=mean([lane.idle_while_ready_share for lane in lanes]),
        calls=sum(lane.calls for lane in lanes),
        tokens=sum(lane.tokens for lane in lanes),
        retries=sum(lane.retries for lane in lanes),
        paused=any(lane.paused for lane in lanes),
        parked=sum(lane.parked for lane in lanes),
        kv_held_share=mean([lane.kv_held_share for lane in lanes]),
        unused={
            cause: mean([lane.unused.get(cause, 0.0) for lane in lanes])
            for cause in dict.fromkeys(cause for lane in lanes for cause in lane.unused)
        },
    )
