"""``sim:PROFILE``: a simulated continuous-batching server, in real or virtual time.

The policy supplies the text, ``Device`` the time it takes, ``FaultScript`` what goes wrong. One
timer per replica is set for the device's next change; nothing polls and no token costs a wake-up.
Figures of the device are exact. A context that reaches the KV cache's size is cut there with
``length``, as a server cuts at its longest context.
"""

import asyncio
import math
from array import array

from stoker.errors import ModelUnavailable
from stoker.inference.base import DeviceLoad, ModelInfo, ReplicaInfo
from stoker.inference.byte_tokens import prompt_of
from stoker.inference.device import Device, DeviceCall
from stoker.inference.fault_script import FaultScript, InjectedFault
from stoker.inference.policy import Policy
from stoker.inference.profile import SimProfile
from stoker.inference.sampling import Sampled, lay_out, read_back
from stoker.model.generation import GenerateRequest, Generation, LogprobKind

_BEGIN_TURNS = 4
"""Turns of the loop, not time, between a step's answers and the next step: a lane that hands a
place on to the next ready call needs two. A server that begins at once would lose that place for a
whole step, which is right for distant clients and wrong for the step times people measure."""
_STATUS = {InjectedFault.TOO_MANY: 429, InjectedFault.BROKEN: 500}


class _Replica:
    """One device and the timer that drives it; made on the loop that uses it."""

    def __init__(self, profile: SimProfile) -> None:
        self._loop = asyncio.get_running_loop()
        self._device = Device(profile, self._loop.time())
        self._waiters: dict[DeviceCall, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._turns_left = 0

    async def run(self, call: DeviceCall) -> None:
        """Return when the device has finished ``call``."""
        self._pump()
        done = self._waiters[call] = self._loop.create_future()
        self._device.submit(call, self._loop.time())
        self._set_timer()
        try:
            await done
        finally:
            if self._waiters.pop(call, None) is not None:
                self._pump()
                self._device.abort(call, self._loop.time())
                self._set_timer()

    def load(self) -> DeviceLoad:
        self._pump()
        return self._device.load()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for done in self._waiters.values():
            if not done.done():
                done.set_exception(ModelUnavailable("the simulated server was closed"))

    def _pump(self) -> None:
        for call in self._device.advance(self._loop.time()):
            done = self._waiters.pop(call, None)
            if done is not None and not done.done():
                done.set_result(None)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._device.start_at is not None and not self._turns_left:
            self._turns_left = _BEGIN_TURNS
            self._loop.call_soon(self._count_down)
        at = self._device.next_event()
        if self._timer is not None:
            if self._timer.when() == at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._fired) if at is not None else None

    def _count_down(self) -> None:
        self._turns_left -= 1
        if self._turns_left:
            self._loop.call_soon(self._count_down)
            return
        self._device.begin()
        self._pump()

    def _fired(self) -> None:
        self._timer = None
        self._pump()


class SimModel:
    """A simulated model server; see the module."""

    def __init__(self, profile: SimProfile, policy: Policy) -> None:
        self._profile = profile
        self._policy = policy
        self._faults = FaultScript(profile.faults, profile.seed)
        self._replicas: dict[int, _Replica] = {}

    def info(self) -> ModelInfo:
        """Return what it is; a scaled clock stands in the name."""
        profile = self._profile
        scaled = f" (time x{profile.time_scale:g})" if profile.time_scale != 1 else ""
        return ModelInfo(
            name=f"sim:{profile.name or 'device'}{scaled}",
            replicas=tuple(
                ReplicaInfo(replica=index, window=profile.window, kv_tokens=profile.kv_tokens)
                for index in range(profile.replicas)
            ),
            logprob_kind=LogprobKind.SAMPLED,
            simulated=True,
        )

    async def generate(self, replica: int, request: GenerateRequest) -> Generation:
        """Sample one completion in the time the device takes.

        Raises:
            ModelUnavailable: an injected fault; retryable.

        **Cancellation:** the device forgets the call; its room and memory are free at once.
        """
        fault = self._faults.draw(replica, request)
        if fault in _STATUS:
            status = _STATUS[fault]
            raise ModelUnavailable(
                f"replica {replica} refused call {request.request_id} with {status} (injected)",
                status=status,
                replica=replica,
            )
        if fault is InjectedFault.HANG:
            await asyncio.get_running_loop().create_future()
        answer = self._policy.answer(request)
        prompt = prompt_of(request)
        room = self._room(prompt)
        sampled = lay_out(request, answer, prompt, tokens_max=room)
        await self._spend(replica, request, sampled, halved=fault is InjectedFault.CLOSED)
        if fault is InjectedFault.CLOSED:
            raise ModelUnavailable(
                f"replica {replica} closed call {request.request_id} mid-stream (injected)",
                replica=replica,
            )
        if fault is InjectedFault.LATE:
            await asyncio.sleep(self._profile.faults.late_by * self._profile.time_scale)
        return read_back(request, answer, sampled, replica=replica, policy_version=0)

    def load(self, replica: int) -> DeviceLoad:
        """Return what the replica's device has done so far; exact."""
        started = self._replicas.get(replica)
        return started.load() if started is not None else Device(self._profile, 0.0).load()

    async def close(self) -> None:
        """Stop every timer; calls in flight are cancelled."""
        for replica in self._replicas.values():
            replica.close()
        self._replicas.clear()

    async def _spend(
        self, replica: int, request: GenerateRequest, sampled: Sampled, *, halved: bool
    ) -> None:
        """Let the device run for what was laid out, or for half of it."""
        prompt_tokens = self._tokens(len(sampled.prompt))
        steps = self._tokens(len(sampled.tokens))
        if steps and self._profile.tokens_per_turn is not None:
            steps = self._profile.tokens_per_turn
        if self._profile.kv_tokens is not None:
            steps = min(steps, self._profile.kv_tokens - prompt_tokens)
        if steps <= 0:
            return
        if halved:
            steps = max(1, steps // 2)
        prompt = sampled.prompt.tobytes()
        call = DeviceCall(
            owner=request.rollout_id,
            prompt=prompt,
            context=prompt + sampled.tokens.tobytes(),
            prompt_tokens=prompt_tokens,
            sample_tokens=steps,
        )
        await self._replica(replica).run(call)

    def _room(self, prompt: "array[int]") -> int | None:
        """Return how many ids fit behind ``prompt``; ``None`` without a bound."""
        kv_tokens = self._profile.kv_tokens
        if kv_tokens is None:
            return None
        left = kv_tokens - self._tokens(len(prompt))
        return max(0, int(left * self._profile.bytes_per_token))

    def _tokens(self, ids: int) -> int:
        return math.ceil(ids / self._profile.bytes_per_token)

    def _replica(self, replica: int) -> _Replica:
        assert 0 <= replica < self._profile.replicas
        if replica not in self._replicas:
            self._replicas[replica] = _Replica(self._profile)
        return self._replicas[replica]
