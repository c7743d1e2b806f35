"""The contract of a model: replicas with windows, and one call that samples.

A replica takes up to ``window`` calls at once and batches them itself. Waiting for room is the
lane's business, never the model's.
"""

from typing import Protocol

import msgspec

from stoker.model.generation import GenerateRequest, Generation, LogprobKind


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One replica."""

    replica: int
    window: int
    """Calls it takes at once."""
    kv_tokens: int | None = None
    """Capacity of its KV cache in tokens, where known."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is."""

    name: str
    replicas: tuple[ReplicaInfo, ...]
    logprob_kind: LogprobKind
    simulated: bool
    """Shown wherever its figures are shown."""
    policy_version: int = 0


class DeviceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica has done since it started; seconds on its own clock."""

    active_seconds: float = 0.0
    """Time with at least one sequence running."""
    tokens_sampled: int = 0
    tokens_prefilled: int = 0
    running: int = 0
    kv_used_share: float = 0.0
    sequence_seconds: float = 0.0
    """Integral of running sequences over time; over ``active_seconds`` it is the mean batch."""
    capacity_tokens_per_second: float | None = None
    """Tokens a second at a full window, where known: the bound of throughput."""


class Model(Protocol):
    """Something that samples tokens."""

    def info(self) -> ModelInfo:
        """Return what it is; constant for a run."""
        ...

    async def generate(self, replica: int, request: GenerateRequest) -> Generation:
        """Sample one completion on ``replica``.

        Raises:
            ModelUnavailable: refused, broken or hung; retryable.

        **Cancellation:** the call is aborted on the replica and its room is free again.
        """
        ...

    def load(self, replica: int) -> DeviceLoad:
        """Return what the replica has done so far."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...
