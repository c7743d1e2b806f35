"""How large a fleet a wish needs: one replica of it simulated in its steady state, and multiplied.

The lane, admission and the working set are the production classes; what is drawn are the sizes of
rollouts and the waits for their tools. So a plan says what this scheduler does with this device
and these waits, and it is as good as those are.

Assumed: replicas do not help each other; tools find a free slot at once (a plan says how many that
takes); the coordinator costs nothing; the work is endless, so ramp and tail of a batch come on top.
Boots of boxes, faults, retries, weight updates and scoring are not there.
"""

import math
from collections.abc import Sequence

import msgspec

from stoker.errors import BadInput
from stoker.inference.profile import SimProfile
from stoker.testing.simulator.policies import Adaptive
from stoker.testing.simulator.trace import Shape, Waits, endless
from stoker.testing.simulator.world import Outcome, World, simulate

NOT_MODELLED = (
    "boots of boxes", "queues for tool slots", "faults and retries", "weight updates", "scoring",
    "the ramp and the tail of a batch", "one replica helping another",
)  # fmt: skip
_WARM_SHARE = 0.25
"""Of the simulated time: before it, figures are of the ramp."""
_P99 = 2.3263
"""Standard deviations above the mean."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked."""

    profile: SimProfile
    """One replica; how many it names does not matter."""
    shape: Shape
    waits: Waits
    rollouts: int
    hours: float | None = None
    """In how long; ``None``: the profile's replicas take as long as they take."""
    seconds: float = 1600.0
    """Simulated, of a replica's time."""
    seed: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a wish needs. Shares are of a replica's time in the steady state."""

    replicas: int
    hours: float
    """For all rollouts with so many replicas; the last of them not awaited."""
    rollouts_per_hour: float
    tokens_per_second: float
    """Sampled, all replicas together."""
    active_rollouts: int
    """That admission lets be active, mean."""
    tool_slots_mean: int
    tool_slots_p99: int
    """Slots of workers with which a tool waits for one in a hundredth of the time."""
    rollout_seconds_p50: float
    rollout_seconds_p95: float
    active_share: float
    throughput_share: float
    """Tokens ÷ what full windows without prefill would give."""
    occupancy: float
    """Mean running calls ÷ window while active."""
    kv_held_share: float
    """With room, and calls held back for KV memory."""
    idle_share: dict[str, float]
    """Nothing ran, by cause."""
    simulated_rollouts: int
    """What the figures stand on."""
    not_modelled: tuple[str, ...] = NOT_MODELLED


def plan(wish: Wish) -> Plan:
    """Simulate one replica and return what the wish needs.

    Raises:
        BadInput: a rollout does not fit in the KV cache, or none ended in the time simulated.
    """
    profile = wish.profile.model_copy(update={"replicas": 1})
    _fits(profile, wish.shape)
    watched = _Watched(wish.seconds * _WARM_SHARE)
    work = endless(wish.seed, wish.shape, wish.waits)
    done = simulate(profile, work, watched, until=wish.seconds, warm=wish.seconds * _WARM_SHARE)
    if not done.completed:
        raise BadInput(
            f"no rollout ended in {wish.seconds:g} simulated seconds; simulate longer: --seconds"
        )
    # By tokens: rollouts that ended were begun before the time that is looked at, and more of them
    # than were begun in it where admission is still finding its place.
    per_hour = 3600 * done.lane.device_tokens / done.lane.seconds * done.completed / done.tokens
    replicas = wish.profile.replicas
    if wish.hours is not None:
        replicas = math.ceil(wish.rollouts / (per_hour * wish.hours))
    return _of(wish, done, watched.waiting, replicas, per_hour)


def _of(wish: Wish, done: Outcome, waiting: Sequence[int], replicas: int, per_hour: float) -> Plan:
    lane, profile = done.lane, wish.profile
    capacity = profile.window / (profile.a + profile.c * profile.window)
    mean = sum(waiting) / max(1, len(waiting))
    spread = math.sqrt(sum((one - mean) ** 2 for one in waiting) / max(1, len(waiting)))
    return Plan(
        replicas=replicas,
        hours=wish.rollouts / (per_hour * replicas),
        rollouts_per_hour=per_hour * replicas,
        tokens_per_second=lane.device_tokens / lane.seconds * replicas,
        active_rollouts=math.ceil(done.active_mean * replicas),
        tool_slots_mean=math.ceil(mean * replicas),
        # Replicas' tools come and go by themselves: their spreads add up as those of sums do.
        tool_slots_p99=math.ceil(mean * replicas + _P99 * spread * math.sqrt(replicas)),
        rollout_seconds_p50=done.durations[len(done.durations) // 2],
        rollout_seconds_p95=done.durations[int(0.95 * len(done.durations))],
        active_share=lane.active_seconds / lane.seconds,
        throughput_share=lane.device_tokens / (capacity * lane.seconds),
        occupancy=lane.call_seconds / max(lane.active_window_seconds, 1e-9),
        kv_held_share=lane.kv_held_seconds / lane.seconds,
        idle_share={cause: one / done.seconds for cause, one in sorted(done.idle_seconds.items())},
        simulated_rollouts=done.completed,
    )


def _fits(profile: SimProfile, shape: Shape) -> None:
    longest = shape.prompt[1] + shape.turns[1] * (shape.sampled[1] + shape.observed[1])
    if profile.kv_tokens is not None and longest > profile.kv_tokens:
        raise BadInput(
            f"a rollout of {shape.turns[1]} turns grows to {longest:,} tokens and the KV cache of "
            f"the profile has {profile.kv_tokens:,}; nothing was simulated"
        )


class _Watched(Adaptive):
    """Production admission; looks once a second how many tools run."""

    def __init__(self, warm: float) -> None:
        super().__init__()
        self._warm = warm
        self.waiting: list[int] = []

    def sample(self, world: World) -> None:
        """Look, then do as ever."""
        if world.clock.monotonic() >= self._warm:
            self.waiting.append(world.waiting)
        super().sample(world)
