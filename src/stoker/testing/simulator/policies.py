"""Who decides how many rollouts are active: production admission, and the peers it is measured by.

The peers are what users have today, at their best: each is tuned offline, on other seeds.
"""

from stoker.config.tree import AdmissionSettings
from stoker.coordinator.admission import Admission
from stoker.coordinator.sampling import AdmissionFeed
from stoker.testing.simulator.world import World


class Adaptive:
    """Production admission with the working set, as a run has them; nothing is tuned."""

    kv_share = 1.0
    new_last = True

    def __init__(self, settings: AdmissionSettings | None = None) -> None:
        self._settings = settings or AdmissionSettings()
        self._admission: Admission | None = None
        self._feed: AdmissionFeed | None = None

    def begin(self, world: World) -> None:
        """Start with the world's own lane and figures."""
        self._admission = Admission(self._settings, world.clock)
        self._feed = AdmissionFeed(self._admission, world.lane, world.figures, results_max=1)

    def may_start(self, active: int) -> bool:
        """Ask admission; no boxes are reserved here."""
        assert self._admission is not None
        return self._admission.may_admit(active, boxes_reserved=0, boxes_needed=0) is None

    def sample(self, world: World) -> None:
        """Tell admission how things are."""
        assert self._feed is not None
        self._feed.sample(active=world.active, boxes_reserved=0, stats=None)


class Semaphore:
    """At most ``count`` rollouts, each holding its permit through its tools' waits."""

    kv_share = 0.0
    new_last = False

    def __init__(self, count: int) -> None:
        self.count = count

    def begin(self, world: World) -> None:
        """Need nothing of the world."""

    def may_start(self, active: int) -> bool:
        """Allow as many as there are permits."""
        return active < self.count

    def sample(self, world: World) -> None:
        """Change nothing."""


class StagedQueues(Semaphore):
    """A pool for model calls and one for tools, with queues between; both have a size.

    As many rollouts are under way as the pools and queues hold, ``count``; at most ``issued`` calls
    are at a replica, though it would batch more. Tools never wait for a worker here.
    """

    def __init__(self, count: int, issued: int) -> None:
        super().__init__(count)
        self._issued = issued

    def begin(self, world: World) -> None:
        """Issue no more than the pool's size."""
        world.lane.share(
            {r.replica: (min(1.0, self._issued / r.window), 1.0) for r in world.lane.info.replicas}
        )


class Pinned:
    """The KV cache of a rollout is kept from its start to its end, through every wait.

    A rollout starts when its context, counted with at least ``least`` tokens, fits beside those of
    all that are active. Where contexts outgrow that, the device evicts: kinder than an engine that
    pins, which then stands still.
    """

    kv_share = 0.0
    new_last = False

    def __init__(self, least: float) -> None:
        self._least = least
        self._world: World | None = None

    def begin(self, world: World) -> None:
        """Look at the contexts of this world."""
        self._world = world

    def may_start(self, active: int) -> bool:
        """Start where there is memory for the whole of it; one alone always starts."""
        world = self._world
        assert world is not None
        kept = sum(max(tokens, self._least) for tokens in world.contexts.values())
        return not active or kept + self._least <= world.kv_tokens

    def sample(self, world: World) -> None:
        """Change nothing."""


class UsageAimd:
    """A limit that aims at a share of the KV usage servers report (running sequences alone).

    Up by one a second below ``aim``, down by a tenth from 95 % or when a sequence was preempted.
    """

    kv_share = 0.0
    new_last = False
    _BACK_OFF, _FACTOR = 0.95, 0.9

    def __init__(self, aim: float = 0.8, start: int = 16) -> None:
        self._aim = aim
        self._limit = float(start)
        self._preempted = 0

    def begin(self, world: World) -> None:
        """Need nothing of the world."""

    def may_start(self, active: int) -> bool:
        """Allow as many as the limit is now."""
        return active < int(self._limit)

    def sample(self, world: World) -> None:
        """Look at usage and preemptions."""
        used = world.model.load(0).kv_used_share
        preempted = world.model.preemptions - self._preempted
        self._preempted = world.model.preemptions
        if used >= self._BACK_OFF or preempted:
            self._limit = max(1.0, min(self._limit, world.active) * self._FACTOR)
        elif used < self._aim and world.active >= int(self._limit):
            self._limit += 1.0
