"""A model that spends a device's time and samples no text: sizes alone, for policies' sake.

A call prefills as many tokens as its ``prompt_ids`` has and samples exactly ``tokens_max``. A
rollout has one history and each turn goes on with it, so a prefix is found by its owner alone.
"""

from collections.abc import Callable

from stoker.inference.base import DeviceLoad, ModelInfo, ReplicaInfo
from stoker.inference.device import Device, DeviceCall
from stoker.inference.device_timer import TimedDevice
from stoker.inference.profile import SimProfile
from stoker.model.generation import GenerateRequest, Generation, LogprobKind

_ID_BYTES = 4
_IDS_MAX = 100_000
_IDS = bytes(_ID_BYTES * _IDS_MAX)


def ids(tokens: int) -> bytes:
    """Return the packed ids of a prompt of so many tokens."""
    return _IDS[: _ID_BYTES * tokens] if tokens <= _IDS_MAX else bytes(_ID_BYTES * tokens)


class DeviceModel:
    """Replicas of one profile; see the module."""

    def __init__(self, profile: SimProfile) -> None:
        self._profile = profile
        self._devices: dict[int, TimedDevice] = {}
        self.prefilled_again = 0
        """Prompt tokens prefilled that an earlier turn had."""
        self.running = 0
        """Calls on devices."""
        self.changed: Callable[[], None] = lambda: None
        """Called before ``running`` changes."""
        self.preemptions = 0
        """Of calls that were answered."""
        self._whole: dict[str, int] = {}

    def info(self) -> ModelInfo:
        """Return what it is."""
        profile = self._profile
        return ModelInfo(
            name=f"sim:{profile.name or 'device'}",
            replicas=tuple(
                ReplicaInfo(replica=index, window=profile.window, kv_tokens=profile.kv_tokens)
                for index in range(profile.replicas)
            ),
            logprob_kind=LogprobKind.NONE,
            simulated=True,
        )

    async def generate(self, replica: int, request: GenerateRequest) -> Generation:
        """Spend the time of one call.

        **Cancellation:** the device forgets the call; its room and memory are free at once.
        """
        sampled = request.sampling.tokens_max
        prompt = len(request.prompt_ids) // _ID_BYTES
        call = DeviceCall(
            owner=request.rollout_id,
            prompt=b"",
            context=b"",
            prompt_tokens=prompt,
            sample_tokens=sampled,
        )
        self.changed()
        self.running += 1
        try:
            await self._device(replica).run(call)
        finally:
            self.changed()
            self.running -= 1
        self.preemptions += call.preemptions
        whole = self._whole.get(request.rollout_id, 0)
        self.prefilled_again += max(0, whole - call.cached_tokens)
        self._whole[request.rollout_id] = prompt + sampled
        return Generation(
            text="",
            prompt_ids=request.prompt_ids,
            token_ids=ids(sampled),
            replica=replica,
            cached_tokens=call.cached_tokens,
        )

    def load(self, replica: int) -> DeviceLoad:
        """Return what the replica's device has done so far; exact."""
        started = self._devices.get(replica)
        return started.load() if started is not None else Device(self._profile, 0.0).load()

    async def close(self) -> None:
        """Stop every timer."""
        for device in self._devices.values():
            device.close()

    def _device(self, replica: int) -> TimedDevice:
        if replica not in self._devices:
            self._devices[replica] = TimedDevice(self._profile)
        return self._devices[replica]


def without_memory_limit(profile: SimProfile) -> SimProfile:
    """Return ``profile`` with a KV cache that never fills."""
    return profile.model_copy(update={"kv_tokens": None})
