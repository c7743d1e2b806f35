"""The contract of a model: replicas with windows, and one call that samples.

A replica takes up to ``window`` calls at once and batches them itself. Waiting for room is the
lane's business, never the model's.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from stoker.model.generation import GenerateRequest, Generation, LogprobKind


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One replica."""

    replica: int
    window: int
    """Calls it takes at once."""
    kv_tokens: int | None = None
    """Capacity of its KV cache in tokens, where known."""
    kv_by_slot: bool = False
    """Each call has a fixed part of that cache: memory never binds before the window does."""
    server: str = ""
    """Name, the same in all runs, of a server they may share; empty: it is this run's alone."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is."""

    name: str
    replicas: tuple[ReplicaInfo, ...]
    logprob_kind: LogprobKind
    simulated: bool
    """Shown wherever its figures are shown."""
    policy_version: int = 0
    notices: tuple[str, ...] = ()
    """What a user must know before trusting the run: what this model cannot give."""


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a model server says about itself: all its callers together, as of the last look."""

    running: int = 0
    waiting: int = 0
    waiting_by_reason: dict[str, int] = {}
    """``capacity``, ``deferred`` …, where the server tells them apart."""
    kv_used_share: float = 0.0
    preemptions: int = 0
    """Sequences put back for lack of KV memory, since the server started."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Of those, found there."""
    iterations: int = 0
    """Steps of its batch."""
    iteration_tokens: int = 0
    """Tokens of all those steps; over ``iterations`` it is the mean batch."""
    tokens_prefilled: int = 0
    tokens_sampled: int = 0
    paused: bool = False
    """It takes calls and answers none: a weight update."""
    weight_version: str = ""
    """The weights it serves, as it names them; empty where it does not say."""


class DeviceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica has done since it started; seconds on its own clock."""

    active_seconds: float = 0.0
    """Time with at least one sequence running."""
    tokens_sampled: int = 0
    tokens_prefilled: int = 0
    running: int = 0
    kv_used_share: float = 0.0
    preemptions: int = 0
    """Sequences put back for lack of KV memory since the model was started; only grows."""
    sequence_seconds: float = 0.0
    """Integral of running sequences over time; over ``active_seconds`` it is the mean batch."""
    capacity_tokens_per_second: float | None = None
    """Tokens a second at a full window, where known: the bound of throughput."""
    server: ServerLoad | None = None
    """What the server behind it reports, where there is one."""


@runtime_checkable
class Starting(Protocol):
    """A model that must be reached before it can say what it is: start it before ``info``."""

    async def start(self) -> None:
        """Reach it and learn what it offers.

        Raises:
            ConfigInvalid: it cannot be used as configured; the message says what to change.
        """
        ...


@runtime_checkable
class Pausing(Protocol):
    """A model whose replicas can stop answering for a weight update."""

    def watch_pauses(self, paused: Callable[[], None], resumed: Callable[[], None]) -> None:
        """Call ``paused`` when the last working replica pauses, ``resumed`` when one works again.

        Called at once when that is so already.
        """
        ...


Weights = str | Path | Callable[[], Awaitable[None]]
"""Where new weights lie, or what loads them while the model is held."""


@runtime_checkable
class Updating(Protocol):
    """A model that takes new weights under way."""

    async def take_policy(self, version: int, weights: Weights) -> None:
        """Sample by ``weights`` from now on and stamp tokens with ``version``.

        Calls in flight are held, or go on, and finish under the new weights; their spans say so
        where the engine does.

        Raises:
            ConfigInvalid: it cannot take them so; nothing has changed.
            ModelUnavailable: a server cannot be reached; calls go on under what it serves.
        """
        ...


@runtime_checkable
class Interrupting(Protocol):
    """A model whose calls can be ended early without losing what they have sampled."""

    async def interrupt(self) -> None:
        """End the calls in flight; return once those that can be ended so have ended.

        Each returns what it has sampled, with the finish reason *aborted*, or raises
        ``ModelUnavailable`` where nothing of it can be gone on from. Issue no calls meanwhile.

        Raises:
            ModelUnavailable: whoever had to be asked gave no answer; calls may go on.

        **Cancellation:** calls that have not ended go on.
        """
        ...


class Model(Protocol):
    """Something that samples tokens."""

    def info(self) -> ModelInfo:
        """Return what it is; constant for a run."""
        ...

    async def generate(self, replica: int, request: GenerateRequest) -> Generation:
        """Sample one completion on ``replica``.

        A request with ``begun`` is answered with the whole turn: what was begun and what follows
        it. A model that cannot go on from tokens samples the turn anew. A turn that the replica
        ended early is returned with the finish reason *aborted* where it holds more than was
        begun and can be gone on from.

        Raises:
            ModelUnavailable: refused, broken or hung, or aborted with nothing to go on from;
                retryable.
            ModelRefused: the call itself is not acceptable; another try would not help.

        **Cancellation:** the call is aborted on the replica and its room is free again.
        """
        ...

    def load(self, replica: int) -> DeviceLoad:
        """Return what the replica has done so far."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...
