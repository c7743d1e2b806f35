"""Pausing, reloading and resuming the servers of a model; for whoever owns the weights.

The servers must offer it: vLLM with ``VLLM_SERVER_DEV_MODE=1``, SGLang by itself. Every server is
told, never a balancer before them. ``wait`` lets calls in flight finish first, so that no turn has
tokens of two versions; ``keep`` holds them where they are, which is faster for long turns, and a
turn that was held carries the older version unless the server says which tokens are of which.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from stoker.errors import ConfigInvalid, ModelRefused, ModelUnavailable
from stoker.inference.http.link import ServerLink
from stoker.inference.http.replica import Replica

Mode = Literal["wait", "keep"]
_SGLANG_MODES = {"keep": "retract"}
"""``in_place`` would keep the KV cache of the old weights, which then cannot be flushed."""


async def pause(replicas: Sequence[Replica], mode: Mode) -> None:
    """Pause every server; when this returns none samples.

    Raises:
        ConfigInvalid: one does not offer it.
        ModelUnavailable: one cannot be reached; call ``resume`` for those that were paused.
    """

    async def one(replica: Replica) -> None:
        if replica.offer.flavour == "sglang":
            if mode not in _SGLANG_MODES:
                raise ConfigInvalid("SGLang holds calls in flight: pause with mode keep")
            await replica.link.post("/pause_generation", {"mode": _SGLANG_MODES[mode]})
        else:
            await replica.link.post(f"/pause?mode={mode}&clear_cache=false", {})

    await _each(replicas, one)


async def resume(replicas: Sequence[Replica]) -> None:
    """Let every server sample again; raises as ``pause``."""

    async def one(replica: Replica) -> None:
        sglang = replica.offer.flavour == "sglang"
        await replica.link.post("/continue_generation" if sglang else "/resume", {})

    await _each(replicas, one)


async def reload(replicas: Sequence[Replica], version: str, folder: str | None) -> None:
    """Load the weights that lie in the model's folder, named ``version`` from now on.

    ``folder`` is another one, on the servers' disks (SGLang needs it). Cached prefixes of the old
    weights are dropped. Raises as ``pause``.
    """

    async def one(replica: Replica) -> None:
        link = replica.link
        if replica.offer.flavour == "sglang":
            if folder is None:
                raise ConfigInvalid("SGLang reloads from a folder: name it")
            body = {"model_path": folder, "weight_version": version, "flush_cache": True}
            await link.post("/update_weights_from_disk", body)
        else:
            await _reload_vllm(link, version, folder)
        replica.weights.version = version

    await _each(replicas, one)


async def rename(replicas: Sequence[Replica], version: str) -> None:
    """Name weights that somebody else has loaded, and drop cached prefixes of the old ones.

    Raises as ``pause``. SGLang names weights only as it loads them: its own route must have said
    ``weight_version``; its cache is flushed here all the same.
    """

    async def one(replica: Replica) -> None:
        if replica.offer.flavour == "sglang":
            await replica.link.post("/flush_cache", {})
        else:
            await _named_vllm(replica.link, version)
        replica.weights.version = version

    await _each(replicas, one)


async def _reload_vllm(link: ServerLink, version: str, folder: str | None) -> None:
    keywords = {"weights_path": folder} if folder is not None else {}
    await link.post("/collective_rpc", {"method": "reload_weights", "kwargs": keywords})
    await _named_vllm(link, version)


async def _named_vllm(link: ServerLink, version: str) -> None:
    # Calls held by ``keep`` hold their blocks; without the flag the reset is refused, with status
    # 200, and prefixes of the old weights would be served to new calls.
    answer = await link.post("/reset_prefix_cache?reset_running_requests=true", {})
    if not (isinstance(answer, dict) and answer.get("success", True)):
        raise ModelUnavailable(
            f"{link.url} keeps prefixes of the old weights in its cache ({answer!r:.200}); its "
            "weights are loaded, but what it samples may mix both. Update again"
        )
    await link.post("/update_weight_version", {"new_version": version})


async def _each(replicas: Sequence[Replica], one: Callable[[Replica], Awaitable[None]]) -> None:
    async def told(replica: Replica) -> None:
        try:
            await one(replica)
        except ModelRefused as error:
            raise ConfigInvalid(
                f"{replica.link.url} cannot be paused, resumed or reloaded ({error.message}); "
                "start vLLM with VLLM_SERVER_DEV_MODE=1"
            ) from error

    done = await asyncio.gather(*(told(replica) for replica in replicas), return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
