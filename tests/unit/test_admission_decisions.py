"""Admission: what each sample leads to, and how the loop behaves over a simulated lane."""

from typing import Any

import msgspec
import pytest

from stoker.config.tree import AdmissionSettings
from stoker.coordinator.admission import (
    LOWER_PAUSE_SECONDS,
    SETTLE_SECONDS,
    Admission,
    AdmissionSample,
    AdmissionState,
    decide,
)
from stoker.errors import ConfigInvalid
from stoker.seams.clock import Instant

WINDOW = 8


class HandClock:
    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at

    def now(self) -> Instant:
        return Instant(boot=self.at, wall=self.at)


def _admission(**keys: object) -> tuple[Admission, HandClock]:
    clock = HandClock()
    return Admission(AdmissionSettings.model_validate(keys), clock), clock


def _sample(active: int, **keys: object) -> AdmissionSample:
    plain = AdmissionSample(active=active, ready=0, running=0, window=WINDOW, room_share=0.5)
    return msgspec.structs.replace(plain, **keys)


def test_fixed_keeps_active_max_whatever_is_measured() -> None:
    admission, clock = _admission(mode="fixed", active_max=33)
    for share in (0.0, 1.0):
        clock.at += 10
        assert admission.observe(_sample(33, results_share=share)) is None
        assert admission.target() == 33


def test_it_starts_where_it_is_told_and_never_above_the_most() -> None:
    assert _admission(active_start=5)[0].target() == 5
    assert _admission(active_start=50, active_max=20)[0].target() == 20


def test_it_rises_by_a_quarter_while_the_lane_has_room_and_says_why() -> None:
    admission, _ = _admission(active_start=16)
    change = admission.observe(_sample(16))
    assert change is not None
    assert (change.before, change.after) == (16, 20)
    assert change.reason == (
        "target raised from 16 to 20: 50% of the lane's window is unused with nothing ready"
    )


def test_it_heads_for_saturation_by_littles_law_in_bounded_steps() -> None:
    # One call takes 1 s, rollouts think for 9: 8 at once need (9 + 1) * 8 = 80 rollouts.
    admission, clock = _admission(active_start=16)
    measured = {"service_seconds": 1.0, "think_seconds": 9.0, "capacity_calls_per_second": 8.0}
    targets = []
    for _ in range(4):
        change = admission.observe(_sample(admission.target(), **measured))
        assert change is not None
        targets.append(change.after)
        clock.at += SETTLE_SECONDS
    assert targets == [32, 64, 100, 125]  # doubled at most; 1.25 * 80; then by quarters
    last = admission.observe(_sample(125, room_share=0.01, **measured))
    assert last is None


def test_it_waits_for_a_change_to_show_and_for_the_target_to_bind() -> None:
    admission, clock = _admission(active_start=16)
    assert admission.observe(_sample(16)) is not None
    assert admission.observe(_sample(20)) is None
    clock.at += SETTLE_SECONDS
    assert admission.observe(_sample(17)) is None  # rollouts are not limited by the target
    assert admission.observe(_sample(20)) is not None


@pytest.mark.parametrize(
    "pressed",
    [
        {"results_share": 0.75},
        {"kv_share": 0.9},
        {"preempted_share": 0.01},
        {"memory_short_share": 0.5},
        {"ready": WINDOW // 2},
        {"queue_seconds": {"fast": 0.0, "tests": 5.0}},
        {"over_caps": 1},
    ],
)
def test_a_mark_holds(pressed: dict[str, Any]) -> None:
    admission, clock = _admission(active_start=16)
    for _ in range(5):
        clock.at += 10
        assert admission.observe(_sample(16, **pressed)) is None
    assert admission.target() == 16


@pytest.mark.parametrize(
    ("pressed", "says"),
    [
        ({"results_share": 0.95}, "results not acknowledged"),
        ({"kv_share": 0.99}, "KV cache"),
        ({"preempted_share": 0.1}, "put back for lack of KV memory"),
        ({"memory_short_share": 1.0}, "without memory for more boxes"),
        ({"ready": 3 * WINDOW}, "ready calls"),
        ({"queue_seconds": {"fast": 0.0, "tests": 90.0}}, "worker class tests"),
    ],
)
def test_a_mark_passed_twice_running_lowers_and_then_rests(
    pressed: dict[str, Any], says: str
) -> None:
    admission, clock = _admission(active_start=100)
    assert admission.observe(_sample(100, **pressed)) is None
    assert admission.observe(_sample(100)) is not None  # one sample is no trend
    target = admission.target()
    assert admission.observe(_sample(target, **pressed)) is None
    change = admission.observe(_sample(target, **pressed))
    assert change is not None
    assert change.after == int(target * 0.9)
    assert says in change.reason
    for _ in range(3):  # nothing moves while the last step has not shown
        clock.at += LOWER_PAUSE_SECONDS / 4
        assert admission.observe(_sample(target, **pressed)) is None
        assert admission.observe(_sample(target, **pressed)) is None
        assert admission.observe(_sample(change.after)) is None
    clock.at += LOWER_PAUSE_SECONDS
    assert admission.observe(_sample(change.after)) is not None


def test_lowering_ends_at_one() -> None:
    admission, clock = _admission(active_start=4)
    for _ in range(100):
        clock.at += LOWER_PAUSE_SECONDS
        admission.observe(_sample(admission.target(), results_share=1.0))
    assert admission.target() == 1


def test_a30_boxes_are_reserved_before_a_rollout_starts() -> None:
    admission, _ = _admission(active_start=10, boxes_max=4)
    assert admission.may_admit(0, boxes_reserved=0, boxes_needed=2) is None
    assert admission.may_admit(1, boxes_reserved=2, boxes_needed=2) is None
    held = admission.may_admit(2, boxes_reserved=4, boxes_needed=2)
    assert held == "4 of 4 boxes are reserved and it needs 2 (admission.boxes_max)"
    assert admission.may_admit(3, boxes_reserved=4, boxes_needed=0) is None
    assert (
        admission.may_admit(10, boxes_reserved=0, boxes_needed=0)
        == "10 rollouts are active and the target is 10"
    )


def test_a_rollout_that_could_never_start_is_refused_at_once() -> None:
    admission, _ = _admission(boxes_max=4)
    admission.require_fit(4)
    with pytest.raises(ConfigInvalid, match=r"reserves 5 boxes .*admission.boxes_max is 4"):
        admission.require_fit(5)


def test_queues_do_not_lower_below_saturation_and_results_do() -> None:
    # (9 + 1) * 8 = 80 rollouts fill the lane.
    measured = {"service_seconds": 1.0, "think_seconds": 9.0, "capacity_calls_per_second": 8.0}
    for pressed, least in (({"ready": 3 * WINDOW}, 80), ({"results_share": 1.0}, 1)):
        admission, clock = _admission(active_start=100)
        for _ in range(100):
            clock.at += LOWER_PAUSE_SECONDS
            admission.observe(_sample(admission.target(), **measured, **pressed))
        assert admission.target() == least


def test_time_in_a_queue_is_no_reason_to_keep_it_long() -> None:
    """Counted as think time, a queue of 90 s would ask for 10 times the rollouts that fill it."""
    measured = {"service_seconds": 1.0, "think_seconds": 99.0, "capacity_calls_per_second": 8.0}
    admission, clock = _admission(active_start=500)
    for _ in range(200):
        clock.at += LOWER_PAUSE_SECONDS
        sample = _sample(
            admission.target(), **measured, queued_seconds=90.0, queue_seconds={"tests": 90.0}
        )
        admission.observe(sample)
    assert admission.target() == 80


def test_parallelism_is_halved_while_queues_press_and_given_back_with_a_reason() -> None:
    admission, clock = _admission(active_start=100)
    assert admission.parallelism() is None
    seen, reasons = [], []
    for ready in [3 * WINDOW] * 8 + [0] * 3:
        clock.at += LOWER_PAUSE_SECONDS
        change = admission.observe(_sample(100, ready=ready))
        seen.append(admission.parallelism())
        reasons.append(change.reason if change is not None else "")
    assert seen == [None, 32, 32, 16, 16, 8, 8, 4, 8, 16, 32]
    assert reasons[1].endswith("; a rollout may have 32 model calls at once")
    assert reasons[8].endswith("; a rollout may have 8 model calls at once again")
    clock.at += LOWER_PAUSE_SECONDS
    assert admission.observe(_sample(100)) is not None
    assert admission.parallelism() is None


def test_results_that_nobody_takes_are_no_reason_to_bound_parallelism() -> None:
    admission, clock = _admission(active_start=100)
    for _ in range(6):
        clock.at += LOWER_PAUSE_SECONDS
        admission.observe(_sample(100, results_share=1.0))
    assert admission.parallelism() is None


def test_a_decision_depends_on_nothing_but_its_arguments() -> None:
    state, sample = AdmissionState(target=16), _sample(16)
    first = decide(state, sample, active_max=100, now=5.0)
    assert first == decide(state, sample, active_max=100, now=5.0)
    assert state == AdmissionState(target=16)
    changed, change = first
    assert change is not None
    assert (changed.target, change.after, changed.changed_at) == (20, 20, 5.0)
