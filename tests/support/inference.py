"""Requests, simulated models and a model whose every answer the test decides."""

import asyncio
from collections.abc import Callable
from typing import Any

from stoker.config.tree import LaneSettings
from stoker.coordinator.lane import Lane
from stoker.inference.base import DeviceLoad, Model, ModelInfo, ReplicaInfo
from stoker.inference.policy import Answer, AnswerCall, FunctionPolicy
from stoker.inference.profile import SimProfile
from stoker.inference.sim import SimModel
from stoker.model.generation import (
    GenerateRequest,
    Generation,
    LogprobKind,
    Message,
    Role,
    Sampling,
    ToolSpec,
)
from stoker.model.ids import RolloutId
from stoker.testing.virtual_clock import VirtualClock

RUN_PYTHON = ToolSpec(
    name="run_python",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
    },
)


def request(
    rollout: str = "rol_a",
    *,
    step: int = 0,
    task: str = "t",
    messages: tuple[Message, ...] = (Message(role=Role.USER, content="hello"),),
    tools: tuple[ToolSpec, ...] = (),
    tokens_max: int = 100_000,
    stop: tuple[str, ...] = (),
    prompt_ids: bytes = b"",
    seed: int = 1,
    temperature: float = 1.0,
) -> GenerateRequest:
    """Return a request that is complete in every field."""
    return GenerateRequest(
        request_id=f"{rollout}/{step}",
        rollout_id=RolloutId(rollout),
        task_id=task,
        step=step,
        messages=messages,
        tools=tools,
        sampling=Sampling(temperature=temperature, tokens_max=tokens_max, stop=stop),
        seed=seed,
        prompt_ids=prompt_ids,
    )


def saying(text: str, *calls: AnswerCall) -> FunctionPolicy:
    """Return a policy that always says the same."""
    return FunctionPolicy("fixed", lambda _: Answer(text=text, tool_calls=calls))


def profile(**keys: object) -> SimProfile:
    """Return a profile; a step takes 1 s unless said otherwise."""
    return SimProfile.model_validate({"policy": "scripted:x", "a": 1.0, "window": 4, **keys})


def sim(text: str = "0123456789", **keys: object) -> SimModel:
    """Return a simulated model that always says ``text`` (and the end: one token more)."""
    return SimModel(profile(**keys), saying(text))


def lane_over(model: Model, **keys: object) -> Lane:
    """Return a lane in the running loop's time, without jitter."""
    settings = LaneSettings.model_validate(keys)
    return Lane(model, settings, VirtualClock(), jitter=lambda seconds: seconds)


class HandModel:
    """A model that answers when, and as, the test says."""

    def __init__(self, *, windows: tuple[int, ...] = (1,)) -> None:
        self._windows = windows
        self.calls: list[tuple[int, str]] = []
        """(replica, request id) in order of issue."""
        self.running: dict[int, int] = dict.fromkeys(range(len(windows)), 0)
        self.running_max: dict[int, int] = dict.fromkeys(range(len(windows)), 0)
        self.aborted: list[str] = []
        self.behave: Callable[[int, GenerateRequest], Any] = lambda _replica, _request: None
        """Returns an exception to raise, seconds to take, a future to wait for, or ``None``."""

    def info(self) -> ModelInfo:
        replicas = tuple(
            ReplicaInfo(replica=index, window=window) for index, window in enumerate(self._windows)
        )
        return ModelInfo(
            name="hand", replicas=replicas, logprob_kind=LogprobKind.NONE, simulated=True
        )

    async def generate(self, replica: int, request: GenerateRequest) -> Generation:
        self.calls.append((replica, request.request_id))
        self.running[replica] += 1
        self.running_max[replica] = max(self.running_max[replica], self.running[replica])
        try:
            asked = self.behave(replica, request)
            if isinstance(asked, Exception):
                raise asked
            if isinstance(asked, asyncio.Future):
                await asked
            elif asked is not None:
                await asyncio.sleep(asked)
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            raise
        finally:
            self.running[replica] -= 1
        return Generation(text=f"{replica}", replica=replica)

    def load(self, replica: int) -> DeviceLoad:
        return DeviceLoad(running=self.running[replica])

    async def close(self) -> None:
        pass


async def turns_of_loop(count: int = 5) -> None:
    """Let everything that is ready run, without time passing."""
    for _ in range(count):
        await asyncio.sleep(0)
