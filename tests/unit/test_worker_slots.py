"""Adaptive slots on hosts that are known, in a loop without time; and slots by Little's law."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from stoker.config.classes import WorkerClassSettings
from stoker.coordinator.lane_figures import LaneFigures
from stoker.coordinator.sizing import slots_needed
from stoker.worker.adapting import PAUSE_SECONDS, SlotChange, SlotControl, SlotTotals
from stoker.worker.figures import ClassMeter

SECONDS = 1.0
"""Of work, in a slot on an idle host."""


class Host:
    """A host with a queue that never empties: how long an action takes depends on how many run."""

    def __init__(self, control: SlotControl, takes: Callable[[int], float]) -> None:
        self.control = control
        self.takes = takes
        self.now = 0.0
        self.queued_each = 5.0
        self.faulty = False
        self.memory_short = False
        self.pressure: float | None = 0.0
        self.changes: list[SlotChange] = []
        self._totals = SlotTotals()
        self._carry = 0.0

    def run(self, seconds: int) -> int:
        """Let so many seconds pass; return the slots then."""
        for _ in range(seconds):
            self.now += 1.0
            slots = self.control.slots
            self._carry += slots / self.takes(slots)
            done, self._carry = int(self._carry), self._carry % 1
            old = self._totals
            self._totals = SlotTotals(
                finished=old.finished + done,
                faults=old.faults + done * self.faulty,
                busy_seconds=old.busy_seconds + slots,
                queued_seconds=old.queued_seconds + done * self.queued_each,
            )
            change = self.control.observe(
                self._totals, self.now, memory_short=self.memory_short, pressure=self.pressure
            )
            if change is not None:
                self.changes.append(change)
            assert 2 <= self.control.slots <= 64
        return self.control.slots


def control(start: int = 4) -> SlotControl:
    return SlotControl(start=start, least=2, most=64, now=0.0)


def test_work_that_waits_elsewhere_gets_all_the_slots_there_may_be() -> None:
    host = Host(control(), lambda _slots: SECONDS)
    assert host.run(400) == 64
    assert all(one.after > one.before for one in host.changes)


@pytest.mark.parametrize("cores", [3, 8, 16])
def test_on_a_host_out_of_cores_a_step_that_gives_nothing_is_taken_back(cores: int) -> None:
    host = Host(control(), lambda slots: SECONDS * max(1.0, slots / cores))
    host.run(600)
    settled = [one.after for one in host.changes][-6:]
    assert all(0.8 * cores <= slots <= 1.5 * cores + 1 for slots in settled), host.changes
    taken_back = [one for one in host.changes if one.after < one.before]
    assert taken_back
    assert "results a second" in taken_back[0].reason
    ups = [one for one in host.changes if one.after > one.before]
    assert len(ups) <= 600 / PAUSE_SECONDS + 12, "it does not try again and again"


def test_without_work_that_queues_nothing_changes() -> None:
    host = Host(control(), lambda _slots: SECONDS)
    host.queued_each = 0.0
    assert host.run(100) == 4
    assert host.changes == []


def test_faults_memory_and_contention_lower_it_and_say_so() -> None:
    host = Host(control(32), lambda _slots: SECONDS)
    host.queued_each = 0.0
    host.run(10)
    host.faulty = True
    host.run(5)
    host.faulty = False
    assert host.changes[-1].after <= 16
    assert "infrastructure faults" in host.changes[-1].reason
    host.memory_short = True
    host.run(3)
    host.memory_short = False
    assert "memory" in host.changes[-1].reason
    before = host.control.slots
    host.takes, host.pressure = (lambda _slots: 2 * SECONDS), 0.9
    host.run(30)
    assert host.control.slots < before
    assert "cores are fought over" in host.changes[-1].reason


def test_bounds_are_checked_with_the_field_named() -> None:
    with pytest.raises(ValidationError, match="slots_min, slots and slots_max are 5, 3 and 8"):
        WorkerClassSettings(slots=3, slots_min=5, slots_max=8)
    with pytest.raises(ValidationError, match="slots_max"):
        WorkerClassSettings(slots=9, slots_max=8)
    assert WorkerClassSettings(slots_max=8).slots is None


def lane(**known: float | None) -> LaneFigures:
    figures: dict[str, Any] = dict.fromkeys(LaneFigures.__struct_fields__, 0)
    figures |= {"window": 64, "calls": 100, "service_seconds": 1.5}
    return LaneFigures(**{**figures, "capacity_calls_per_second": 41.8, **known})


def test_slots_needed_is_littles_law_at_full_windows() -> None:
    # The facts' own figures: 41.8 calls a second, one action each of 3.9 s.
    assert slots_needed(lane(), {"tests": 100}, {"tests": 390.0})["tests"] == pytest.approx(163.02)
    unknown = lane(capacity_calls_per_second=None)
    half = slots_needed(unknown, {"tests": 50}, {"tests": 50.0})["tests"]
    assert half == pytest.approx(64 / 1.5 / 2), "half an action a call, by the window's own times"
    assert slots_needed(lane(), {"tests": 19}, {"tests": 19.0}) == {}, "too few to say"
    assert slots_needed(lane(calls=0), {"tests": 50}, {"tests": 50.0}) == {}
    nothing = lane(service_seconds=None, capacity_calls_per_second=None)
    assert slots_needed(nothing, {"tests": 50}, {"tests": 50.0}) == {}


def test_a_meter_follows_its_control_and_busy_shares_stay_shares() -> None:
    meter = ClassMeter(4, 0.0)
    assert meter.adapt(1.0, memory_short=True, pressure=None) is None, "fixed unless told"
    meter.control = control(4)
    for _ in range(4):
        meter.take(1.0)
    change = meter.adapt(2.0, memory_short=True, pressure=None)
    assert change is not None
    assert (meter.slots, meter.free) == (3, 0), "what runs goes on; nothing new begins"
    meter.give(3.0)
    meter.give(3.0)
    assert meter.free == 1
    figures = meter.figures(4.0)
    # 4 slots for two seconds, 3 for two; 4 busy for two seconds, 2 for one.
    assert figures.busy_share == pytest.approx((4 * 2 + 2) / (4 * 2 + 3 * 2))


def test_work_that_has_become_longer_is_not_taken_for_contention_for_ever() -> None:
    host = Host(SlotControl(start=8, least=2, most=8, now=0.0), lambda _slots: SECONDS)
    host.pressure = 0.9
    assert host.run(60) == 8, "pressure alone is nothing while actions take what they take"
    host.takes = lambda _slots: 2 * SECONDS
    assert host.run(60) < 8, "it may be contention"
    assert host.run(1200) == 8, "fewer slots made nothing quicker"
