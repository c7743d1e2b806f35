"""One execution of one action: what is left of its time, how it went, what is reported."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from stoker.errors import InternalError, StokerError
from stoker.model.action import Action, Effect
from stoker.model.completion import (
    Completion,
    CompletionStatus,
    EnvironmentState,
    Timings,
    Usage,
)
from stoker.model.faults import FaultRecord
from stoker.model.ids import Fence, WorkerId
from stoker.model.value import Value
from stoker.seams.clock import Clock

MESSAGE_CHARACTERS_MAX = 4000
"""Longest fault message: a hostile tool may put megabytes into an exception."""


@dataclass(slots=True)
class Done:
    """How a tool ended."""

    status: CompletionStatus = CompletionStatus.OK
    result: object = None
    """The tool's result record; encoded as the observation."""
    environment: EnvironmentState = EnvironmentState.NONE
    usage: Usage = field(default_factory=Usage)
    throttled_seconds: float | None = None
    """A remote service refused it: see ``Completion``."""


@dataclass(slots=True)
class Attempt:
    """One execution under one fence."""

    action: Action
    fence: Fence
    attempt: int
    worker_id: WorkerId
    queue_seconds: float
    clock: Clock
    limit_seconds: float
    """The action's timeout, or less where its deadline is nearer."""
    trusted: Callable[[], bool] = lambda: True
    """Whether the lease may still be believed: asked again just before a program begins."""
    effect_began: bool = False
    """Work that may touch the world has begun."""
    boot_seconds: float = 0.0
    run_seconds: float = 0.0
    began_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_at = self.clock.monotonic()

    @property
    def left_seconds(self) -> float:
        """What is left of the limit: boot, run and collection share it."""
        return self.limit_seconds - (self.clock.monotonic() - self.began_at)

    def booted(self) -> None:
        """Note that the box stands."""
        self.boot_seconds = self.clock.monotonic() - self.began_at

    def ran(self) -> None:
        """Note that the work itself is over."""
        self.run_seconds = self.clock.monotonic() - self.began_at - self.boot_seconds

    def completion(
        self, done: Done, observation: Value | None, fault: FaultRecord | None = None
    ) -> Completion:
        """Return what the ledger is told."""
        total = self.clock.monotonic() - self.began_at
        external = self.action.effect is Effect.EXTERNAL and self.effect_began
        return Completion(
            action_id=self.action.action_id,
            fence=self.fence,
            status=done.status,
            attempt=self.attempt,
            worker_id=self.worker_id,
            observation=observation,
            fault=fault,
            external_effect_possible=external,
            throttled_seconds=done.throttled_seconds,
            environment=done.environment,
            timings=Timings(
                queue_seconds=self.queue_seconds,
                boot_seconds=self.boot_seconds,
                run_seconds=self.run_seconds,
                collect_seconds=max(0.0, total - self.boot_seconds - self.run_seconds),
            ),
            usage=done.usage,
        )


def fault_of(error: Exception, action: Action, worker_id: WorkerId) -> FaultRecord:
    """Return ``error`` as data: ours as it is, anything else as a bug of ours; bounded."""
    if not isinstance(error, StokerError):
        name = type(error).__name__
        error = InternalError(
            f"action {action.action_id} ({action.tool}) met an unexpected {name}: {error}; "
            "the worker goes on; please report it"
        )
    record = error.record()
    context = {**record.context, "action": action.action_id, "worker": worker_id}
    return msgspec.structs.replace(
        record,
        message=record.message[:MESSAGE_CHARACTERS_MAX].encode(errors="replace").decode(),
        context={key: value[:MESSAGE_CHARACTERS_MAX] for key, value in context.items()},
    )
