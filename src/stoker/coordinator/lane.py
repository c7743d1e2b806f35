"""The inference lane: which ready model call goes to which replica, and when.

Work-conserving by construction: whenever a call becomes ready, room comes free, a replica recovers
or a pause ends, ready calls are matched with room in the same turn of the loop; time in which a
call waited that could have run is measured all the same. A call holds room from the moment it is
given some until it is answered, fails, is withdrawn or its task is cancelled, and never while its
rollout waits for a tool or between two tries.

Where the replicas' KV caches are known, room means memory too (``working_set``): a call held back
for it is *held for KV*, which is not idling. Knows nothing of admission or journals. A pause holds
new calls only: calls in flight and everything outside the lane go on.
"""

import asyncio
from collections.abc import Callable, Mapping

from stoker.config.tree import LaneSettings, Settings
from stoker.coordinator.lane_figures import LaneFigures, LaneMeter, LaneState, LaneTotals, share
from stoker.coordinator.lane_replica import PROBE_SECONDS, Health, LaneReplica
from stoker.coordinator.lane_tries import Course, TakenBack, Tries
from stoker.coordinator.matching import Matching
from stoker.coordinator.parallelism import Parallelism
from stoker.coordinator.partition import Partition
from stoker.coordinator.prompt_size import PromptSizes
from stoker.coordinator.ready_set import ReadyCall
from stoker.coordinator.working_set import WorkingSet
from stoker.errors import ModelUnavailable
from stoker.inference.base import DeviceLoad, Model
from stoker.inference.continuing import fresh_tokens, is_aborted
from stoker.model.generation import GenerateRequest, Generation
from stoker.model.ids import RolloutId
from stoker.seams.clock import Clock
from stoker.seams.entropy import jittered

_RECHECK_SECONDS = 0.01
"""Memory that comes free of itself is looked at no more finely than this."""


class Lane:
    """The way from ready calls to replicas; all methods belong to one event loop.

    ``answered`` is told of every answer: calls on its replica when it was issued, and its seconds.
    ``wanted`` is set while the lane has room and nothing is ready: admission may add rollouts.
    ``kv_share``: share of the replicas' KV caches that is ours, where their size is known: calls
    and new rollouts wait for room in it; 0: they never do.
    """

    def __init__(
        self,
        model: Model,
        settings: LaneSettings,
        clock: Clock,
        *,
        jitter: Callable[[float], float] = jittered,
        answered: Callable[[int, float], None] = lambda _calls, _seconds: None,
        kv_share: float = 1.0,
    ) -> None:
        info = model.info()
        self._model = model
        self.info = info
        self._settings = settings
        self._jitter = jitter
        self._answered = answered
        self._replicas = {one.replica: LaneReplica(one) for one in info.replicas}
        self._window = sum(replica.window for replica in self._replicas.values())
        self.working = WorkingSet(info.replicas, kv_share)
        self._ready = Matching(self._replicas, self.working)
        self._tries = Tries(model, settings.call_timeout)
        self._sizes = PromptSizes()
        self.parallelism = Parallelism()
        self._new_held = False
        self._recheck: asyncio.TimerHandle | None = None
        self._calls = 0
        self._held_by: set[str] = set()
        self._running = 0
        self._granted = 0
        self._ill_since: float | None = None
        self._meter = LaneMeter(clock)
        self._loads_before = self._loads()
        self.wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._settle()

    @classmethod
    def of_run(
        cls,
        model: Model,
        settings: Settings,
        clock: Clock,
        answered: Callable[[int, float], None],
        partition: Partition,
    ) -> "Lane":
        """Return the lane of a run's partition: it has its share of the KV caches."""
        share = 0.0 if settings.admission.mode == "fixed" else 1 / partition.count
        return cls(model, settings.lane, clock, answered=answered, kv_share=share)

    async def generate(self, request: GenerateRequest, order: tuple[float, ...]) -> Generation:
        """Return the answer to ``request``, issued when its turn by ``order`` comes.

        Smaller orders go first, equals in order of arrival. A try that fails or takes longer than
        ``call_timeout`` is repeated after a growing, jittered pause, on another replica where
        there is one.

        Raises:
            ModelUnavailable: every try failed; infrastructure's fault, never a reward.

        **Cancellation:** the call is withdrawn, or aborted on its replica; its room is free at
        once and goes to the next ready call.
        """
        async with self.parallelism.place(request.rollout_id):
            return await self._in_turn(request, order)

    async def _in_turn(self, request: GenerateRequest, order: tuple[float, ...]) -> Generation:
        course = Course(request, self._settings, self._jitter)
        while True:
            call = await self._room_for(course.request, order, course.avoid)
            try:
                generation = await self._try(call, course.request)
            except ModelUnavailable as error:
                course.failed(error, call.granted.result())
                self._meter.retries += 1
                await asyncio.sleep(course.pause(error, alone=len(self._replicas) == 1))
                continue
            if not is_aborted(generation):
                return course.whole(generation)
            kept = course.aborted(generation, call.granted.result())
            self._meter.continued += kept
            self._meter.anew += not kept

    async def take_back(self) -> TakenBack:
        """End the calls on replicas: each goes on, when calls are issued again, from what it had.

        Where the model cannot give that the turn is sampled anew. Pause first.

        **Cancellation:** calls that have not ended go on.
        """
        while self._granted:
            await asyncio.sleep(0)  # on their way to a replica
        return await self._tries.end()

    def pause(self, by: str = "model") -> None:
        """Hold new calls until ``by`` resumes; those in flight go on and are answered."""
        self._settle()
        self._held_by.add(by)
        self._settle()

    def resume(self, by: str = "model") -> None:
        """End the pause of ``by``; held calls are issued once nobody else holds them."""
        self._settle()
        self._held_by.discard(by)
        self.working.flush()  # new weights: what is cached under the old ones is worth nothing
        self._settle()

    async def until_idle(self) -> None:
        """Return once no call is on a replica or about to be; pause first, or that may be never."""
        await self._idle.wait()

    def share(self, parts: Mapping[int, tuple[float, float]]) -> None:
        """Use, by replica, these parts of window and KV cache from now on, one call at least.

        Calls in flight beyond it go on.
        """
        self._settle()
        for one in self.info.replicas:
            calls, memory = parts[one.replica]
            window = max(1, round(one.window * calls))
            self._replicas[one.replica].window = window
            self.working.share(one.replica, memory, window)
        self._window = sum(replica.window for replica in self._replicas.values())
        self._settle()

    @property
    def wanting(self) -> int:
        """Calls that run or would, were there room and memory."""
        return self._running + self._granted + len(self._ready) + self._ready.parked

    def may_start(self) -> bool:
        """Return whether there is room in the KV caches for a new rollout's contexts."""
        if not self.working.limits:
            return True
        now = self._settle()
        calls = self._running + self._granted + len(self._ready)
        ill = {r.index for r in self._replicas.values() if r.health is not Health.HEALTHY}
        held = self._ready.parked > 0 or not self.working.may_start(now, calls, ill)
        self._new_held = held and calls < self._window
        self._settle()
        return not held

    def none_held(self) -> None:
        """No new rollout is held back any more: nobody wants to start one."""
        self._settle()
        self._new_held = False

    def started(self, rollout: RolloutId) -> None:
        """A new rollout begins: its first call will want memory."""
        self.working.start(rollout)

    def ended(self, rollout: RolloutId) -> None:
        """A rollout is over: its contexts need no memory any more."""
        self._settle()
        self.working.finish(rollout)
        self._settle()

    def room(self) -> int:
        """Return how many calls could be issued now: free windows of replicas that are well."""
        if self._held_by:
            return 0
        return self._ready.room()

    def ready_depth(self) -> int:
        """Return how many calls wait for room; those that wait for memory are not counted."""
        return len(self._ready)

    def parked(self) -> int:
        """Return how many calls wait for memory in a KV cache."""
        return self._ready.parked

    def parked_seconds(self) -> float:
        """Return for how long the longest of those waits now; 0 without any; looks at each."""
        since = self._ready.parked_longest_since()
        return self._meter.at - since if since is not None else 0.0

    @property
    def running(self) -> int:
        """Calls on replicas."""
        return self._running

    def totals(self) -> LaneTotals:
        """Return the sums since the lane was made, up to now."""
        self._meter.charge(self._state())
        return self._meter.totals(self._loads(), self._loads_before)

    def figures(self, since: LaneTotals | None = None) -> LaneFigures:
        """Return the lane's figures since ``since`` (from ``totals``), or since it was made."""
        done = self.totals()
        if since is not None:
            done = done.since(since)
        loads = self._loads()
        capacity = LaneFigures.capacity(loads)
        tokens_per_call = share(done.device_tokens, done.calls)
        return LaneFigures(
            model=self.info.name,
            simulated=self.info.simulated,
            replicas=len(self._replicas),
            window=self._window,
            running=self._running,
            ready=len(self._ready),
            parked=self._ready.parked,
            healthy=sum(r.health is Health.HEALTHY for r in self._replicas.values()),
            paused=bool(self._held_by),
            active_share=share(done.active_seconds, done.seconds),
            throughput_share=share(done.device_tokens, capacity * done.seconds)
            if capacity
            else None,
            occupancy=share(done.call_seconds, done.active_window_seconds),
            idle_while_ready_share=share(done.idle_while_ready_seconds, done.seconds),
            kv_held_share=share(done.kv_held_seconds, done.seconds),
            room_share=share(done.room_seconds, done.window_seconds),
            calls=done.calls,
            tokens=done.tokens,
            retries=done.retries,
            service_seconds=done.service_seconds / done.calls if done.calls else None,
            wait_seconds=done.wait_seconds / done.issued if done.issued else None,
            capacity_calls_per_second=capacity / tokens_per_call
            if capacity and tokens_per_call
            else None,
            kv_share=self._kv_share(loads),
            preemptions=done.preemptions,
        )

    async def _room_for(
        self, request: GenerateRequest, order: tuple[float, ...], avoid: int | None
    ) -> ReadyCall:
        """Wait in the ready set; return the call with the replica whose room is now held for it."""
        since = self._settle()
        call = ReadyCall(
            order=order,
            rollout=request.rollout_id,
            avoid=avoid,
            since=since,
            history=f"{request.rollout_id}/{request.history}",
            tokens=self._sizes.estimate(request) if self.working.limits else 0,
        )
        self._ready.add(call, since)
        self._settle()
        try:
            await call.granted
        except BaseException:
            self._withdraw(call)
            raise
        return call

    def _withdraw(self, call: ReadyCall) -> None:
        """Take a call back that is no longer wanted, with the room it may have been given."""
        self._settle()
        self._ready.remove(call)
        granted = call.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self._granted -= 1
            self._replicas[granted.result()].held -= 1
            self.working.abort(call.number, call.history, granted.result())
        self._settle()

    async def _try(self, call: ReadyCall, request: GenerateRequest) -> Generation:
        """Run one try on the replica whose room is held; give the room back whatever happens."""
        replica = self._replicas[call.granted.result()]
        began = self._settle()
        self._granted -= 1
        self._running += 1
        batch = replica.held
        before = self._model.load(replica.index) if self.working.limits else None
        generation: Generation | None = None
        try:
            generation = await self._tries.run(replica.index, request)
        except ModelUnavailable:
            self._failed(replica)
            raise
        else:
            self._meter.tokens += fresh_tokens(request, generation)
            if is_aborted(generation):
                return generation  # says nothing about the replica, nor how long a call takes
            seconds = self._succeeded(replica) - began
            self._meter.service_seconds += seconds
            self._answered(batch, seconds)
            self._meter.calls += 1
            return generation
        finally:
            now = self._settle()
            self._running -= 1
            replica.held -= 1
            if before is not None:
                self._remember(call, request, generation, before, now - began)
            self._settle()

    def _remember(
        self,
        call: ReadyCall,
        request: GenerateRequest,
        generation: Generation | None,
        before: DeviceLoad,
        seconds: float,
    ) -> None:
        """Tell the working set how a call ended."""
        index = call.granted.result()
        if generation is None or is_aborted(generation):
            self.working.abort(call.number, call.history, index)
            return
        load = self._model.load(index)
        self.working.answer(
            call.number,
            call.history,
            index,
            prompt=self._sizes.learn(request, generation),
            sampled=generation.token_count,
            cached=None if generation.rerendered else generation.cached_tokens,
            now=self._meter.at,
        )
        memory = self.working.memory(index)
        if memory is not None:
            memory.costs.seen(
                steps=fresh_tokens(request, generation),  # of this try, as all the rest here
                sampled=load.tokens_sampled - before.tokens_sampled,
                prefilled=load.tokens_prefilled - before.tokens_prefilled,
                seconds=seconds,
            )

    def _failed(self, replica: LaneReplica) -> None:
        now = self._settle()
        self._meter.failures += 1
        rest = replica.failed()
        if rest is None:
            return
        loop = asyncio.get_running_loop()
        loop.call_later(self._jitter(rest), self._rested, replica, replica.spell)
        if any(one.health is Health.HEALTHY for one in self._replicas.values()):
            return
        if self._ill_since is None:
            self._ill_since = now
        self._give_up_hopeless(now, self._ill_since)

    def _succeeded(self, replica: LaneReplica) -> float:
        now = self._settle()
        replica.succeeded()
        self._ill_since = None
        return now

    def _rested(self, replica: LaneReplica, spell: int) -> None:
        self._settle()
        if replica.rested(spell):
            self._probe_later(replica, spell)
        self._settle()

    def _probe_later(self, replica: LaneReplica, spell: int) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._jitter(PROBE_SECONDS), self._probe_more, replica, spell)

    def _probe_more(self, replica: LaneReplica, spell: int) -> None:
        self._settle()
        if replica.probe_more(spell):
            self._probe_later(replica, spell)
        self._settle()

    def _give_up_hopeless(self, now: float, ill_since: float) -> None:
        """When no replica has answered anything for as long as a call may take, fail who waited."""
        timeout = self._settings.call_timeout
        if now - ill_since < timeout:
            return
        for call in self._ready.waiting_since(now - timeout):
            self._ready.remove(call)
            call.granted.set_exception(
                ModelUnavailable(
                    f"no replica has answered anything for {now - ill_since:.0f} s, and a model "
                    f"call of rollout {call.rollout} waited {now - call.since:.0f} s; it was "
                    "given up. Look at the model server, then resume.",
                    rollout_id=call.rollout,
                )
            )

    def _settle(self) -> float:
        """Charge the time since the last change, match ready calls with room; return this moment.

        Called before and after every change, so that time is charged to the state it passed in.
        """
        now = self._meter.charge(self._state())
        while not self._held_by and (match := self._ready.next(now)) is not None:
            call, replica = match
            self._ready.given(call, replica)
            replica.held += 1
            self._granted += 1
            self._calls += 1
            call.number = self._calls
            self.working.issue(call.number, call.history, replica.index)
            self._meter.issued += 1
            self._meter.wait_seconds += now - call.since
            call.granted.set_result(replica.index)
        if self._running + self._granted:
            self._idle.clear()
        else:
            self._idle.set()
        if not self._ready and self.room() > 0:
            self.wanted.set()
        else:
            self.wanted.clear()
        if self.working.limits:
            self._look_again(now)
        return now

    def _look_again(self, now: float) -> None:
        """Set the timer for when memory comes free of itself: a context was waited for too long."""
        waits = self._ready.parked > 0 or self._new_held
        # An old call returns at once when room comes; without room its age changes nothing.
        since = self._ready.parked_since if self.room() > 0 else None
        at = self.working.changes_at(now, since) if waits else None
        if self._recheck is not None:
            if at is not None and abs(self._recheck.when() - at) < _RECHECK_SECONDS:
                return
            self._recheck.cancel()
            self._recheck = None
        if at is not None:
            loop = asyncio.get_running_loop()
            self._recheck = loop.call_later(max(at - now, _RECHECK_SECONDS), self._rechecked)

    def _rechecked(self) -> None:
        self._recheck = None
        self.working.pass_to(self._settle())
        self._settle()

    def _state(self) -> LaneState:
        room = self.room()
        return LaneState(
            running=self._running,
            window=self._window,
            room=room,
            idle=self._granted > 0
            or (room > 0 and len(self._ready) > 0 and not self.working.limits),
            kv_held=room > 0 and (self._ready.parked > 0 or self._new_held or len(self._ready) > 0),
            paused=bool(self._held_by),
        )

    def _loads(self) -> list[DeviceLoad]:
        return [self._model.load(index) for index in self._replicas]

    def _kv_share(self, loads: list[DeviceLoad]) -> float | None:
        if all(one.kv_tokens is None for one in self.info.replicas):
            return None
        return max(load.kv_used_share for load in loads)
