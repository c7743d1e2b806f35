"""Runs a trace under a policy on a virtual clock, and says what became of the time.

The lane, its working set and admission are the production classes; a rollout is a task that asks
the lane and then waits for as long as its trace says. Each instant in which a replica could have
worked and did not is charged to what is true then (``idle_seconds``): the simulator knows.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol

import msgspec

from stoker.config.tree import LaneSettings
from stoker.coordinator.figures import RunFigures
from stoker.coordinator.lane import Lane
from stoker.coordinator.lane_figures import LaneTotals
from stoker.coordinator.places import place
from stoker.inference.profile import SimProfile
from stoker.model.generation import GenerateRequest, Sampling
from stoker.model.ids import RolloutId
from stoker.observe.metrics import Metrics
from stoker.testing.simulator.device_model import DeviceModel, ids
from stoker.testing.simulator.trace import RolloutTrace
from stoker.testing.virtual_clock import VirtualClock, run_virtual

_SAMPLE_SECONDS = 1.0


class Policy(Protocol):
    """How many rollouts are active: production admission, or a peer of it."""

    kv_share: float
    """Share of the KV cache for the lane's working set; 0: nothing is held for it."""
    new_last: bool
    """First calls have the place a run gives them; else all go in order of arrival."""

    def begin(self, world: "World") -> None:
        """The world is about to run."""
        ...

    def may_start(self, active: int) -> bool:
        """Return whether one more rollout may start."""
        ...

    def sample(self, world: "World") -> None:
        """Look at the world, once a second."""
        ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run; figures of the time after ``warm`` seconds, where one was given."""

    seconds: float
    completed: int
    """Rollouts that ended."""
    tokens: int
    """Sampled by rollouts that ended."""
    durations: tuple[float, ...]
    """Start to end of each of those."""
    parked_max: float
    """Longest time a call waited for memory, seconds."""
    prefilled_again: int
    """Prompt tokens prefilled that an earlier turn had."""
    active_mean: float
    """Rollouts active, mean over time."""
    lane: LaneTotals
    idle_seconds: dict[str, float]
    """No replica worked, by true cause."""
    events: int
    """Model calls and waits that ended: the simulator's work."""

    @property
    def tokens_per_second(self) -> float:
        """Throughput of what ended."""
        return self.tokens / self.seconds


class World:
    """One run; made and run on a virtual loop."""

    def __init__(
        self, profile: SimProfile, work: Iterator[RolloutTrace], policy: Policy, warm: float
    ) -> None:
        self.clock = VirtualClock()
        self.model = DeviceModel(profile)
        self.lane = Lane(
            self.model,
            LaneSettings(call_timeout=1e9),
            self.clock,
            jitter=lambda seconds: seconds,
            kv_share=policy.kv_share,
        )
        self.model.changed = self._charge
        self.policy = policy
        self.active = self.waiting = 0
        self.contexts: dict[RolloutId, int] = {}
        """Tokens of each active rollout's context."""
        self.kv_tokens = sum(one.kv_tokens or 0 for one in self.lane.info.replicas)
        self.figures = RunFigures(Metrics())
        self._work = work
        self._next: RolloutTrace | None = next(work, None)
        self._warm = warm
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._count = 0
        self._events = 0
        self._ended: list[tuple[float, float, int]] = []
        self._idle: defaultdict[str, float] = defaultdict(float)
        self._active_integral = 0.0
        self._at = 0.0
        self._parked_max = 0.0

    async def run(self, until: float | None) -> Outcome:
        """Run to the end of the work, or for ``until`` seconds."""
        self.policy.begin(self)
        sampling = asyncio.create_task(self._sample())
        begun: tuple[LaneTotals, int] | None = None
        if self._warm:
            warming = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_at(
                self._warm,
                lambda: warming.set_result((self.lane.totals(), self.model.prefilled_again)),
            )
        try:
            async with asyncio.timeout_at(until):
                await self._admit()
        except TimeoutError:
            assert until is not None
        if self._warm:
            begun = warming.result()
        self._charge()
        seconds = self.clock.monotonic() - self._warm
        outcome = self._outcome(seconds, begun)
        sampling.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(sampling, *self._tasks, return_exceptions=True)
        await self.model.close()
        return outcome

    async def _admit(self) -> None:
        while self._next is not None or self._tasks:
            while (
                self._next is not None
                and self.policy.may_start(self.active)
                and (self.lane.may_start())
            ):
                self._start(self._next)
                self._next = next(self._work, None)
            self._wake.clear()
            await self._wake.wait()

    def _start(self, trace: RolloutTrace) -> None:
        self._charge()
        self._count += 1
        rollout = RolloutId(f"rol_{self._count}")
        self.lane.started(rollout)
        self.active += 1
        self.contexts[rollout] = trace.prompt
        task = asyncio.create_task(self._rollout(rollout, trace, self._count))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _rollout(self, rollout: RolloutId, trace: RolloutTrace, number: int) -> None:
        began = self.clock.monotonic()
        context = trace.prompt
        for step, turn in enumerate(trace.turns):
            request = _request(rollout, step, context=context, sampled=turn.sampled)
            first = step == 0 and self.policy.new_last
            ready = place(self.clock.monotonic(), number, first=first)
            await self.lane.generate(request, ready)
            self._events += 1
            self._charge()
            context += turn.sampled + turn.observed
            self.contexts[rollout] = context
            self._wake.set()
            self.waiting += 1
            await asyncio.sleep(turn.wait)
            self._events += 1
            self._charge()
            self.waiting -= 1
            self.figures.thought(turn.wait)
        self.active -= 1
        del self.contexts[rollout]
        self.lane.ended(rollout)
        self._ended.append((began, self.clock.monotonic(), sum(t.sampled for t in trace.turns)))
        asyncio.get_running_loop().call_soon(self._wake.set)

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            self.policy.sample(self)
            self._parked_max = max(self._parked_max, self.lane.parked_seconds())
            self._wake.set()

    def _charge(self) -> None:
        """Charge the time since the last change."""
        now = self.clock.monotonic()
        since, self._at = max(self._at, self._warm), now
        if now <= since:
            return
        self._active_integral += (now - since) * self.active
        if not self.model.running:
            self._idle[self._cause()] += now - since

    def _cause(self) -> str:
        if self.lane.parked():
            return "held for KV"
        if self.lane.ready_depth():
            return "coordinator busy"
        if self.waiting:
            return "tools running"
        return "admission held" if self._next is not None else "no admitted work"

    def _outcome(self, seconds: float, begun: tuple[LaneTotals, int] | None) -> Outcome:
        ended = [one for one in self._ended if one[1] >= self._warm]
        totals, again = begun or (LaneTotals(), 0)
        return Outcome(
            seconds=seconds,
            completed=len(ended),
            tokens=sum(tokens for _, _, tokens in ended),
            durations=tuple(sorted(end - began for began, end, _ in ended)),
            parked_max=self._parked_max,
            prefilled_again=self.model.prefilled_again - again,
            active_mean=self._active_integral / seconds,
            lane=self.lane.totals().since(totals),
            idle_seconds=dict(self._idle),
            events=self._events,
        )


def simulate(
    profile: SimProfile,
    work: Iterator[RolloutTrace],
    policy: Policy,
    *,
    until: float | None = None,
    warm: float = 0.0,
) -> Outcome:
    """Run ``work`` under ``policy`` and return what became of it.

    ``until`` ends it after so many seconds of virtual time (needed for endless work); the first
    ``warm`` seconds are left out of the figures.
    """

    async def main() -> Outcome:
        return await World(profile, work, policy, warm).run(until)

    return run_virtual(main())


def _request(rollout: RolloutId, step: int, *, context: int, sampled: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{rollout}/{step}",
        rollout_id=rollout,
        task_id="",
        step=step,
        messages=(),
        tools=(),
        sampling=Sampling(tokens_max=sampled),
        seed=0,
        prompt_ids=ids(context),
    )
