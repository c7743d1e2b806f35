"""Admission: how many rollouts are active at once. Pure decisions on measured figures.

A rollout that waits for a tool holds no room in the lane, so a full lane needs more rollouts than
its window: by Little's law N* = Z·µ + B (think time Z, calls a second at full windows µ, window B;
``facts``: N* = (Z + a + cB)·µ). ``decide`` starts at ``active_start`` and moves in bounded steps:

- up, while the lane has unused window with nothing ready, the target is what limits the number of
  rollouts, and no mark is passed: towards N* where that can be measured, else by a quarter;
- not at all, while work queues beyond a *hold* mark: more rollouts would only wait elsewhere;
- down by a tenth, when a *lower* mark is passed twice running, then not again for a while. Queues
  alone never lower it below N*, Z taken without the time in those queues: fewer rollouts than that
  would starve the lane. Memory and results that nobody takes do.

``parallelism`` bounds the model calls one rollout has on the lane at once: halved with each
lowering that a queue asked for, doubled back to no bound while no mark is passed.

Which contexts the KV caches are left to, and so which calls are parked, is the working set's part
(``working_set``); here it shows as a lane without room. Knows neither rollouts nor boxes, only
counts; holds nothing back itself: the coordinator asks.
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
PARALLELISM_MAX = 64
"""Calls of one rollout at once from which there is no bound."""
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
    over_caps: int = 0
    """Actions of the run that a cap or its quota keeps out of the queues."""
    results_share: float = 0.0
    """Results not yet acknowledged ÷ their cap."""
    kv_share: float | None = None
    """KV cache in use by running sequences."""
    preempted_share: float = 0.0
    """Sequences put back for lack of KV memory ÷ calls answered."""
    boxes_reserved: int = 0
    """By active rollouts together."""
    memory_short_share: float = 0.0
    """Workers that take on no more boxes for want of memory ÷ workers."""
    service_seconds: float | None = None
    """Mean time of a model call."""
    think_seconds: float | None = None
    """Mean time of a rollout from an answer to its next model call (tools, queues, program)."""
    queued_seconds: float = 0.0
    """Part of ``think_seconds`` that its actions waited for a worker."""
    capacity_calls_per_second: float | None = None
    """Of the lane at full windows; ``None``: taken from ``service_seconds``."""


class AdmissionState(msgspec.Struct, frozen=True, kw_only=True):
    """What is decided, and what the next decision must know of the last ones."""

    target: int
    """Rollouts that may be active."""
    parallelism: int = PARALLELISM_MAX
    """Model calls one rollout may have on the lane at once."""
    changed_at: float = -math.inf
    quiet_until: float = -math.inf
    pressed: int = 0
    """Samples running in which a lower mark was passed."""


class AdmissionChange(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the target, of parallelism or of both, and why."""

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
    queues: bool
    """Work that only waits: pressing below saturation would starve the lane."""

    @property
    def lowers(self) -> bool:
        return self.value >= self.lower


def decide(
    state: AdmissionState, sample: AdmissionSample, *, active_max: int, now: float
) -> tuple[AdmissionState, AdmissionChange | None]:
    """Return the state after ``sample``, and what changed if anything did. Pure."""
    marks = _marks(sample)
    lowering = [mark for mark in marks if mark.lowers]
    state = msgspec.structs.replace(state, pressed=state.pressed + 1 if lowering else 0)
    if now < state.quiet_until:
        return state, None
    if state.pressed >= _LOWER_SAMPLES:
        return _lower(state, sample, lowering, now)
    if any(mark.value >= mark.hold for mark in marks):
        return state, None
    if state.parallelism < PARALLELISM_MAX:
        return _give_back(state, now)
    return _raise(state, sample, active_max, now)


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
        self._state = AdmissionState(target=min(start, settings.active_max))

    def target(self) -> int:
        """Return how many rollouts may be active now."""
        return self._state.target

    def parallelism(self) -> int | None:
        """Return how many model calls a rollout may have on the lane at once; ``None``: any."""
        bound = self._state.parallelism
        return bound if bound < PARALLELISM_MAX else None

    def observe(self, sample: AdmissionSample) -> AdmissionChange | None:
        """Take one sample, about once a second; return the change it led to, if any."""
        if self._fixed:
            return None
        self._state, change = decide(
            self._state,
            sample,
            active_max=self._settings.active_max,
            now=self._clock.monotonic(),
        )
        return change

    def may_admit(self, active: int, *, boxes_reserved: int, boxes_needed: int) -> str | None:
        """Return why one more rollout that needs ``boxes_needed`` is held, or ``None``."""
        if active >= self.target():
            return f"{active} rollouts are active and the target is {self.target()}"
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
    state: AdmissionState, sample: AdmissionSample, lowering: list[_Mark], now: float
) -> tuple[AdmissionState, AdmissionChange | None]:
    state = msgspec.structs.replace(state, pressed=0, quiet_until=now + LOWER_PAUSE_SECONDS)
    # What is active now is what presses; a target above it would take steps to have any effect.
    current = min(state.target, max(sample.active, 1))
    after = max(1, math.floor(current * LOWER_FACTOR))
    hard = [mark for mark in lowering if not mark.queues]
    saturation = _saturation(sample)
    if not hard and saturation is not None:
        after = max(after, min(state.target, math.ceil(saturation)))
    passed = max(hard or lowering, key=lambda mark: mark.value / mark.lower)
    reason = f"{passed.what} is {passed.value:.2f}, past its mark {passed.lower:.2f}"
    if len(hard) < len(lowering) and state.parallelism > 1:
        state = msgspec.structs.replace(state, parallelism=state.parallelism // 2)
        reason += f"; a rollout may have {state.parallelism} model calls at once"
        if after == state.target:
            return state, AdmissionChange(before=after, after=after, reason=reason)
    return _move(state, after, reason, now)


def _give_back(state: AdmissionState, now: float) -> tuple[AdmissionState, AdmissionChange | None]:
    if now - state.changed_at < SETTLE_SECONDS:
        return state, None
    bound = min(PARALLELISM_MAX, 2 * state.parallelism)
    shown = "any number of" if bound == PARALLELISM_MAX else bound
    reason = f"no mark is passed; a rollout may have {shown} model calls at once again"
    state = msgspec.structs.replace(state, parallelism=bound, changed_at=now)
    return state, AdmissionChange(before=state.target, after=state.target, reason=reason)


def _raise(
    state: AdmissionState, sample: AdmissionSample, active_max: int, now: float
) -> tuple[AdmissionState, AdmissionChange | None]:
    if now - state.changed_at < SETTLE_SECONDS or sample.room_share < ROOM_SHARE_MIN:
        return state, None
    if sample.active < BINDING_SHARE * state.target:
        return state, None
    room = f"{sample.room_share:.0%} of the lane's window is unused with nothing ready"
    saturation = _saturation(sample)
    wanted = math.ceil(state.target * RAISE_FACTOR_BLIND)
    if saturation is not None and saturation * HEADROOM > wanted:
        wanted = math.ceil(saturation * HEADROOM)
        room += f"; measured times ask for {saturation:.0f} rollouts to fill it"
    bounded = min(wanted, math.floor(state.target * RAISE_FACTOR_MAX), active_max)
    return _move(state, bounded, room, now)


def _move(
    state: AdmissionState, after: int, reason: str, now: float
) -> tuple[AdmissionState, AdmissionChange | None]:
    before = state.target
    if after == before:
        return state, None
    verb = "raised" if after > before else "lowered"
    change = AdmissionChange(
        before=before, after=after, reason=f"target {verb} from {before} to {after}: {reason}"
    )
    return msgspec.structs.replace(state, target=after, changed_at=now), change


def _marks(sample: AdmissionSample) -> list[_Mark]:
    """Return the figures that hold or lower. Queue marks grow with what an answer takes anyway."""
    marks = [
        _Mark(
            what="results not acknowledged ÷ cap",
            value=sample.results_share,
            hold=0.7,
            lower=0.9,
            queues=False,
        ),
        _Mark(
            what="ready calls ÷ window",
            value=sample.ready / sample.window,
            hold=0.5,
            lower=2.0,
            queues=True,
        ),
    ]
    if sample.kv_share is not None:
        marks.append(
            _Mark(
                what="KV cache in use", value=sample.kv_share, hold=0.85, lower=0.97, queues=False
            )
        )
    if sample.preempted_share:
        marks.append(
            _Mark(
                what="calls put back for lack of KV memory ÷ calls answered",
                value=sample.preempted_share,
                hold=0.0,
                lower=0.05,
                queues=False,
            )
        )
    if sample.memory_short_share:
        marks.append(
            _Mark(
                what="workers without memory for more boxes ÷ workers",
                value=sample.memory_short_share,
                hold=0.0,
                lower=1.0,
                queues=False,
            )
        )
    return marks + _queue_marks(sample)


def _queue_marks(sample: AdmissionSample) -> list[_Mark]:
    """Return those of work that waits for workers."""
    marks = []
    if sample.over_caps:  # whoever is admitted now would only wait behind them
        marks.append(
            _Mark(
                what="actions over a cap",
                value=sample.over_caps,
                hold=1.0,
                lower=math.inf,
                queues=True,
            )
        )
    if sample.queue_seconds:
        slowest = max(sample.queue_seconds, key=lambda name: sample.queue_seconds[name])
        service = sample.service_seconds or 0.0
        marks.append(
            _Mark(
                what=f"queue age of worker class {slowest} (s)",
                value=sample.queue_seconds[slowest],
                hold=2.0 + 2 * service,
                lower=20.0 + 20 * service,
                queues=True,
            )
        )
    return marks


def _saturation(sample: AdmissionSample) -> float | None:
    """Return N* = Z·µ + B by Little's law, or ``None`` where nothing is measured yet.

    Z is without the time actions wait for workers: more rollouts would only wait longer.
    """
    if sample.think_seconds is None or not sample.service_seconds:
        return None
    rate = sample.capacity_calls_per_second or sample.window / sample.service_seconds
    think = max(0.0, sample.think_seconds - sample.queued_seconds)
    return think * rate + sample.window
