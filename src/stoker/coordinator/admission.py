"""Admission: how many rollouts are active at once. Pure decisions on measured figures.

A rollout that waits for a tool holds no room in the lane, so a full lane needs more rollouts than
its window: by Little's law N* = Z·µ + B (think time Z, calls a second at full windows µ, window B;
``facts``: N* = (Z + a + cB)·µ). ``adaptive`` starts at ``active_start`` and moves in bounded steps:

- up, while the lane has unused window with nothing ready, the target is what limits the number of
  rollouts, and no mark is passed: towards N* where that can be measured, else by a quarter;
- not at all, while work queues beyond a *hold* mark: more rollouts would only wait elsewhere;
- down by a tenth, when a *lower* mark is passed twice running, then not again for a while.

Knows neither rollouts nor boxes, only counts; holds nothing back itself: the coordinator asks.
(Holding rollouts for room in the KV cache, the tau-working-set, comes with the lane issue.)
"""

import math

import msgspec

from stoker.config.tree import AdmissionSettings
from stoker.coordinator.partition import WHOLE, Partition
from stoker.errors import ConfigInvalid
from stoker.seams.clock import Clock

ROOM_SHARE_MIN = 0.05
"""Unused share of the window from which the lane wants more."""
BINDING_SHARE = 0.95
"""Active ÷ target from which the target is what limits the number of rollouts."""
RAISE_FACTOR_MAX = 2.0
"""A target is at most doubled at once."""
RAISE_FACTOR_BLIND = 1.25
"""Step up where Little's law has no figures yet."""
LOWER_FACTOR = 0.9
HEADROOM = 1.25
"""Target over N*: think times vary (facts: goals hold from about 1.5 N* on; steps go on)."""
SETTLE_SECONDS = 1.0
"""Between two changes upwards: a change must show before the next."""
LOWER_PAUSE_SECONDS = 5.0
"""After lowering, neither lowered nor raised for so long."""
_LOWER_SAMPLES = 2


class AdmissionSample(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured since the sample before."""

    active: int
    """Rollouts admitted and not finished."""
    ready: int
    """Model calls that wait for room in the lane."""
    running: int
    """Model calls on replicas."""
    window: int
    """Calls all replicas take at once."""
    room_share: float
    """Share of the window that was unused with nothing ready (``LaneFigures.room_share``)."""
    queue_seconds: dict[str, float] = {}
    """Worker class → age of its oldest queued action."""
    results_share: float = 0.0
    """Results not yet acknowledged ÷ their cap."""
    kv_share: float | None = None
    """KV cache in use by running sequences."""
    boxes_reserved: int = 0
    """By active rollouts together."""
    service_seconds: float | None = None
    """Mean time of a model call."""
    think_seconds: float | None = None
    """Mean time of a rollout from an answer to its next model call (tools, queues, program)."""
    capacity_calls_per_second: float | None = None
    """Of the lane at full windows; ``None``: taken from ``service_seconds``."""


class AdmissionChange(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the target, and why."""

    before: int
    after: int
    reason: str
    """One sentence for the log."""


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A figure with the values from which it holds and lowers."""

    what: str
    value: float
    hold: float
    lower: float


class Admission:
    """Decides the target; see the module."""

    def __init__(
        self, settings: AdmissionSettings, clock: Clock, partition: Partition = WHOLE
    ) -> None:
        self._settings = settings
        self._partition = partition
        self._boxes_max = partition.share(settings.boxes_max)
        self._clock = clock
        self._fixed = settings.mode == "fixed"
        start = settings.active_max if self._fixed else settings.active_start
        self._target = min(start, settings.active_max)
        self._changed_at = -math.inf
        self._quiet_until = -math.inf
        self._pressed = 0

    def target(self) -> int:
        """Return how many rollouts may be active now."""
        return self._target

    def observe(self, sample: AdmissionSample) -> AdmissionChange | None:
        """Take one sample, about once a second; return the change it led to, if any."""
        if self._fixed:
            return None
        now = self._clock.monotonic()
        marks = _marks(sample)
        self._pressed = self._pressed + 1 if any(m.value >= m.lower for m in marks) else 0
        if now < self._quiet_until:
            return None
        if self._pressed >= _LOWER_SAMPLES:
            return self._lower(now, sample, marks)
        if any(mark.value >= mark.hold for mark in marks):
            return None
        return self._raise(now, sample)

    def may_admit(self, active: int, *, boxes_reserved: int, boxes_needed: int) -> str | None:
        """Return why one more rollout that needs ``boxes_needed`` is held, or ``None``."""
        if active >= self._target:
            return f"{active} rollouts are active and the target is {self._target}"
        if boxes_reserved + boxes_needed > self._boxes_max:
            return (
                f"{boxes_reserved} of {self._boxes_max} boxes are reserved and it needs "
                f"{boxes_needed} (admission.boxes_max)"
            )
        return None

    def require_fit(self, boxes_needed: int) -> None:
        """Check once, before a run starts, that a single rollout can be admitted at all.

        Raises:
            ConfigInvalid: it asks for more boxes than all rollouts may have together.
        """
        if boxes_needed > self._boxes_max:
            share = f", of which partition {self._partition} has {self._boxes_max}"
            raise ConfigInvalid(
                f"a rollout reserves {boxes_needed} boxes (boxes= of the program) and "
                f"admission.boxes_max is {self._settings.boxes_max}"
                f"{'' if self._partition.is_whole else share}: it could never start. "
                f"Set admission.boxes_max to {boxes_needed * self._partition.count} or more."
            )

    def _lower(
        self, now: float, sample: AdmissionSample, marks: list[_Mark]
    ) -> AdmissionChange | None:
        self._pressed = 0
        self._quiet_until = now + LOWER_PAUSE_SECONDS
        passed = max((m for m in marks if m.value >= m.lower), key=lambda m: m.value / m.lower)
        # What is active now is what presses; a target above it would take steps to have any effect.
        current = min(self._target, max(sample.active, 1))
        after = max(1, math.floor(current * LOWER_FACTOR))
        return self._move(
            now, after, f"{passed.what} is {passed.value:.2f}, past its mark {passed.lower:.2f}"
        )

    def _raise(self, now: float, sample: AdmissionSample) -> AdmissionChange | None:
        if now - self._changed_at < SETTLE_SECONDS or sample.room_share < ROOM_SHARE_MIN:
            return None
        if sample.active < BINDING_SHARE * self._target:
            return None
        room = f"{sample.room_share:.0%} of the lane's window is unused with nothing ready"
        saturation = _saturation(sample)
        wanted = math.ceil(self._target * RAISE_FACTOR_BLIND)
        if saturation is not None and saturation * HEADROOM > wanted:
            wanted = math.ceil(saturation * HEADROOM)
            room += f"; measured times ask for {saturation:.0f} rollouts to fill it"
        bounded = min(
            wanted, math.floor(self._target * RAISE_FACTOR_MAX), self._settings.active_max
        )
        return self._move(now, bounded, room)

    def _move(self, now: float, after: int, reason: str) -> AdmissionChange | None:
        before = self._target
        if after == before:
            return None
        self._target = after
        self._changed_at = now
        verb = "raised" if after > before else "lowered"
        return AdmissionChange(
            before=before, after=after, reason=f"target {verb} from {before} to {after}: {reason}"
        )


def _marks(sample: AdmissionSample) -> list[_Mark]:
    """Return the figures that hold or lower. Queue marks grow with what an answer takes anyway."""
    marks = [
        _Mark(
            what="results not acknowledged ÷ cap", value=sample.results_share, hold=0.7, lower=0.9
        ),
        _Mark(what="ready calls ÷ window", value=sample.ready / sample.window, hold=0.5, lower=2.0),
    ]
    if sample.kv_share is not None:
        marks.append(_Mark(what="KV cache in use", value=sample.kv_share, hold=0.85, lower=0.97))
    if sample.queue_seconds:
        slowest = max(sample.queue_seconds, key=lambda name: sample.queue_seconds[name])
        service = sample.service_seconds or 0.0
        marks.append(
            _Mark(
                what=f"queue age of worker class {slowest} (s)",
                value=sample.queue_seconds[slowest],
                hold=2.0 + 2 * service,
                lower=20.0 + 20 * service,
            )
        )
    return marks


def _saturation(sample: AdmissionSample) -> float | None:
    """Return N* = Z·µ + B by Little's law, or ``None`` where nothing is measured yet."""
    if sample.think_seconds is None or not sample.service_seconds:
        return None
    rate = sample.capacity_calls_per_second or sample.window / sample.service_seconds
    return sample.think_seconds * rate + sample.window
