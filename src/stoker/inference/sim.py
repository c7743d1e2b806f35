"""``sim:PROFILE``: a simulated continuous-batching server, in real or virtual time.

The policy supplies the text, ``Device`` the time it takes, ``FaultScript`` what goes wrong.
Figures of the device are exact. A context that reaches the KV cache's size is cut there with
``length``, as a server cuts at its longest context.
"""

import asyncio
import math
from array import array

import msgspec

from stoker.errors import ModelUnavailable
from stoker.inference.base import DeviceLoad, ModelInfo, ReplicaInfo
from stoker.inference.byte_tokens import prompt_of
from stoker.inference.device import Device, DeviceCall
from stoker.inference.device_timer import TimedDevice
from stoker.inference.fault_script import FaultScript, InjectedFault
from stoker.inference.policy import Policy
from stoker.inference.profile import SimProfile
from stoker.inference.sampling import Sampled, lay_out, read_back
from stoker.model.generation import GenerateRequest, Generation, LogprobKind

_STATUS = {InjectedFault.TOO_MANY: 429, InjectedFault.BROKEN: 500}


class SimModel:
    """A simulated model server; see the module."""

    def __init__(self, profile: SimProfile, policy: Policy) -> None:
        self._profile = profile
        self._policy = policy
        self._faults = FaultScript(profile.faults, profile.seed)
        self._replicas: dict[int, TimedDevice] = {}

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
        cached = await self._spend(replica, request, sampled, halved=fault is InjectedFault.CLOSED)
        if fault is InjectedFault.CLOSED:
            raise ModelUnavailable(
                f"replica {replica} closed call {request.request_id} mid-stream (injected)",
                replica=replica,
            )
        if fault is InjectedFault.LATE:
            await asyncio.sleep(self._profile.faults.late_by * self._profile.time_scale)
        said = read_back(request, answer, sampled, replica=replica, policy_version=0)
        return msgspec.structs.replace(said, cached_tokens=cached)

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
    ) -> int:
        """Let the device run for what was laid out, or half of it; return what it had cached."""
        prompt_tokens = self._tokens(len(sampled.prompt))
        steps = self._tokens(len(sampled.tokens))
        if steps and self._profile.tokens_per_turn is not None:
            steps = self._profile.tokens_per_turn
        if self._profile.kv_tokens is not None:
            steps = min(steps, self._profile.kv_tokens - prompt_tokens)
        if steps <= 0:
            return 0
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
        return call.cached_tokens

    def _room(self, prompt: "array[int]") -> int | None:
        """Return how many ids fit behind ``prompt``; ``None`` without a bound."""
        kv_tokens = self._profile.kv_tokens
        if kv_tokens is None:
            return None
        left = kv_tokens - self._tokens(len(prompt))
        return max(0, int(left * self._profile.bytes_per_token))

    def _tokens(self, ids: int) -> int:
        return math.ceil(ids / self._profile.bytes_per_token)

    def _replica(self, replica: int) -> TimedDevice:
        assert 0 <= replica < self._profile.replicas
        if replica not in self._replicas:
            self._replicas[replica] = TimedDevice(self._profile)
        return self._replicas[replica]
