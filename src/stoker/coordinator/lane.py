"""The inference lane: which ready model call goes to which replica, and when.

Work-conserving by construction: whenever a call becomes ready, room comes free, a replica recovers
or a pause ends, ready calls are matched with room in the same turn of the loop; time in which a
call waited that could have run is measured all the same. A call holds room from the moment it is
given some until it is answered, fails, is withdrawn or its task is cancelled, and never while its
rollout waits for a tool or between two tries.

Knows nothing of rollouts, admission or journals. A pause holds new calls only: calls in flight and
everything outside the lane go on. (Not yet here: holding calls back for room in the KV cache.)
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from stoker.config.tree import LaneSettings
from stoker.coordinator.lane_figures import LaneFigures, LaneMeter, LaneState, LaneTotals, share
from stoker.coordinator.lane_replica import PROBE_SECONDS, Health, LaneReplica
from stoker.coordinator.ready_set import ReadyCall, ReadySet
from stoker.errors import ModelUnavailable
from stoker.inference.base import DeviceLoad, Model
from stoker.model.generation import GenerateRequest, Generation
from stoker.model.ids import RolloutId
from stoker.seams.clock import Clock
from stoker.seams.entropy import jittered

RETRY_SECONDS_MAX = 30.0
"""No pause between two tries is longer, before jitter."""
_HOMES_MAX = 65_536
"""Rollouts whose replica is remembered for its cached prefix."""


class Lane:
    """The way from ready calls to replicas; all methods belong to one event loop.

    ``answered`` is told of every answer: calls on its replica when it was issued, and its seconds.
    ``wanted`` is set while the lane has room and nothing is ready: admission may add rollouts.
    """

    def __init__(
        self,
        model: Model,
        settings: LaneSettings,
        clock: Clock,
        *,
        jitter: Callable[[float], float] = jittered,
        answered: Callable[[int, float], None] = lambda _calls, _seconds: None,
    ) -> None:
        info = model.info()
        self._model = model
        self._info = info
        self._settings = settings
        self._jitter = jitter
        self._answered = answered
        self._replicas = {one.replica: LaneReplica(one) for one in info.replicas}
        self._window = sum(replica.window for replica in self._replicas.values())
        self._ready = ReadySet()
        self._homes: OrderedDict[RolloutId, int] = OrderedDict()
        self._paused = False
        self._running = 0
        self._granted = 0
        self._ill_since: float | None = None
        self._meter = LaneMeter(clock)
        self._device_tokens_before = self._device_tokens()
        self.wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._settle()

    async def generate(self, request: GenerateRequest, order: tuple[int, ...]) -> Generation:
        """Return the answer to ``request``, issued when its turn by ``order`` comes.

        Smaller orders go first, equals in order of arrival. A try that fails or takes longer than
        ``call_timeout`` is repeated after a growing, jittered pause, on another replica where
        there is one.

        Raises:
            ModelUnavailable: every try failed; infrastructure's fault, never a reward.

        **Cancellation:** the call is withdrawn, or aborted on its replica; its room is free at
        once and goes to the next ready call.
        """
        avoid: int | None = None
        failed: ModelUnavailable | None = None
        for number in range(self._settings.retries + 1):
            if number:
                self._meter.retries += 1
                await asyncio.sleep(self._pause_before(number, failed))
            replica = await self._room_for(request, order, avoid)
            try:
                return await self._try(replica, request)
            except ModelUnavailable as error:
                avoid, failed = replica.index, error
        assert failed is not None
        raise ModelUnavailable(
            f"model call {request.request_id} (rollout {request.rollout_id}, step {request.step}) "
            f"failed {self._settings.retries + 1} times, last on replica {avoid}: "
            f"{failed.message}. The call was given up; look at the model server, then resume.",
            request_id=request.request_id,
            rollout_id=request.rollout_id,
            replica=avoid,
        ) from failed

    def pause(self) -> None:
        """Hold new calls from now on; those in flight go on and are answered."""
        self._settle()
        self._paused = True
        self._settle()

    def resume(self) -> None:
        """Issue held calls again."""
        self._settle()
        self._paused = False
        self._settle()

    async def until_idle(self) -> None:
        """Return once no call is on a replica or about to be; pause first, or that may be never."""
        await self._idle.wait()

    def room(self) -> int:
        """Return how many calls could be issued now: free windows of replicas that are well."""
        if self._paused:
            return 0
        return sum(replica.room for replica in self._replicas.values())

    def ready_depth(self) -> int:
        """Return how many calls wait for room."""
        return len(self._ready)

    def totals(self) -> LaneTotals:
        """Return the sums since the lane was made, up to now."""
        self._meter.charge(self._state())
        return self._meter.totals(self._device_tokens() - self._device_tokens_before)

    def figures(self, since: LaneTotals | None = None) -> LaneFigures:
        """Return the lane's figures since ``since`` (from ``totals``), or since it was made."""
        done = self.totals()
        if since is not None:
            done = done.since(since)
        loads = self._loads()
        capacity = _capacity(loads)
        tokens_per_call = share(done.device_tokens, done.calls)
        return LaneFigures(
            model=self._info.name,
            simulated=self._info.simulated,
            replicas=len(self._replicas),
            window=self._window,
            running=self._running,
            ready=len(self._ready),
            healthy=sum(r.health is Health.HEALTHY for r in self._replicas.values()),
            paused=self._paused,
            active_share=share(done.active_seconds, done.seconds),
            throughput_share=share(done.device_tokens, capacity * done.seconds)
            if capacity
            else None,
            occupancy=share(done.call_seconds, done.active_seconds * self._window),
            idle_while_ready_share=share(done.idle_while_ready_seconds, done.seconds),
            room_share=share(done.room_seconds, done.seconds * self._window),
            calls=done.calls,
            tokens=done.tokens,
            retries=done.retries,
            service_seconds=done.service_seconds / done.calls if done.calls else None,
            wait_seconds=done.wait_seconds / done.issued if done.issued else None,
            capacity_calls_per_second=capacity / tokens_per_call
            if capacity and tokens_per_call
            else None,
            kv_share=self._kv_share(loads),
        )

    async def _room_for(
        self, request: GenerateRequest, order: tuple[int, ...], avoid: int | None
    ) -> LaneReplica:
        """Wait in the ready set; return the replica whose room is now held for the caller."""
        since = self._settle()
        call = ReadyCall(order=order, rollout=request.rollout_id, avoid=avoid, since=since)
        self._ready.add(call)
        self._settle()
        try:
            index = await call.granted
        except BaseException:
            self._withdraw(call)
            raise
        return self._replicas[index]

    def _withdraw(self, call: ReadyCall) -> None:
        """Take a call back that is no longer wanted, with the room it may have been given."""
        self._settle()
        self._ready.remove(call)
        granted = call.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self._granted -= 1
            self._replicas[granted.result()].held -= 1
        self._settle()

    async def _try(self, replica: LaneReplica, request: GenerateRequest) -> Generation:
        """Run one try on ``replica``, whose room is held; give the room back whatever happens."""
        began = self._settle()
        self._granted -= 1
        self._running += 1
        batch = replica.held
        try:
            generation = await self._bounded(replica, request)
        except ModelUnavailable:
            self._failed(replica)
            raise
        else:
            seconds = self._succeeded(replica) - began
            self._meter.service_seconds += seconds
            self._answered(batch, seconds)
            self._meter.calls += 1
            self._meter.tokens += generation.token_count
            return generation
        finally:
            self._settle()
            self._running -= 1
            replica.held -= 1
            self._settle()

    async def _bounded(self, replica: LaneReplica, request: GenerateRequest) -> Generation:
        timeout = self._settings.call_timeout
        try:
            async with asyncio.timeout(timeout) as bound:
                return await self._model.generate(replica.index, request)
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise ModelUnavailable(
                f"replica {replica.index} did not answer call {request.request_id} within "
                f"{timeout:g} s (lane.call_timeout); it was aborted",
                replica=replica.index,
                request_id=request.request_id,
            ) from error

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
        while not self._paused and (first := self._ready.first()) is not None:
            replica = self._choose(first)
            if replica is None:
                break
            self._ready.remove(first)
            replica.held += 1
            self._granted += 1
            self._remember(first.rollout, replica)
            self._meter.issued += 1
            self._meter.wait_seconds += now - first.since
            first.granted.set_result(replica.index)
        if self._running + self._granted:
            self._idle.clear()
        else:
            self._idle.set()
        if not self._ready and self.room() > 0:
            self.wanted.set()
        else:
            self.wanted.clear()
        return now

    def _choose(self, call: ReadyCall) -> LaneReplica | None:
        """Return the replica for ``call``: where its prefix lies, else the one with most room."""
        open_ones = [replica for replica in self._replicas.values() if replica.room > 0]
        others = [replica for replica in open_ones if replica.index != call.avoid]
        choice = others or open_ones
        if not choice:
            return None
        home = self._homes.get(call.rollout)
        return next(
            (replica for replica in choice if replica.index == home),
            max(choice, key=lambda replica: replica.room / replica.window),
        )

    def _remember(self, rollout: RolloutId, replica: LaneReplica) -> None:
        self._homes[rollout] = replica.index
        self._homes.move_to_end(rollout)
        if len(self._homes) > _HOMES_MAX:
            self._homes.popitem(last=False)

    def _state(self) -> LaneState:
        room = self.room()
        return LaneState(
            running=self._running,
            room=room,
            idle=self._granted > 0 or (room > 0 and len(self._ready) > 0),
            paused=self._paused,
        )

    def _pause_before(self, number: int, failed: ModelUnavailable | None) -> float:
        doubled = self._settings.retry_delay * 2.0 ** (number - 1)
        if failed is not None and len(self._replicas) == 1:
            # Where there is nobody else to ask, the server's own Retry-After is heeded.
            doubled = max(doubled, float(failed.context.get("retry_after_seconds", 0.0)))
        return self._jitter(min(RETRY_SECONDS_MAX, doubled))

    def _loads(self) -> list[DeviceLoad]:
        return [self._model.load(index) for index in self._replicas]

    def _device_tokens(self) -> int:
        return sum(load.tokens_sampled for load in self._loads())

    def _kv_share(self, loads: list[DeviceLoad]) -> float | None:
        if all(one.kv_tokens is None for one in self._info.replicas):
            return None
        return max(load.kv_used_share for load in loads)


def _capacity(loads: list[DeviceLoad]) -> float | None:
    """Return tokens a second of all replicas at full windows; ``None`` when one does not say."""
    known = [load.capacity_tokens_per_second for load in loads]
    return sum(one for one in known if one is not None) if None not in known else None
