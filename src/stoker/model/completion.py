"""Completions: the one terminal result of an action, and what it cost."""

from enum import StrEnum

import msgspec

from stoker.model.faults import FaultRecord
from stoker.model.ids import ActionId, Fence, WorkerId
from stoker.model.value import Value


class CompletionStatus(StrEnum):
    """How an action ended. All but the last four are data that the program sees."""

    OK = "ok"
    """The tool ran to its end; a nonzero exit is part of the observation."""
    TIMED_OUT = "timed_out"
    """Its wall time or deadline passed; the box's processes were killed."""
    LIMIT = "limit"
    """A limit of its execution policy stopped it; the observation says which."""
    ERROR = "error"
    """It could not be carried out; ``fault`` says why and whose fault it was."""
    CANCELLED = "cancelled"
    """The coordinator cancelled it first."""
    AMBIGUOUS = "ambiguous"
    """An external effect may or may not have happened; never run again blindly."""
    DEAD = "dead"
    """A dead letter: it used up its attempts or deliveries."""


class EnvironmentState(StrEnum):
    """What the action left of its environment."""

    NONE = "none"
    """It acted in no environment."""
    CLEAN = "clean"
    """As the action left it."""
    INTERRUPTED = "interrupted"
    """Processes were killed; files are kept."""
    LOST = "lost"
    """Gone; only a restoration (next generation) can bring it back."""


class Timings(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Durations on the worker, seconds on its monotonic clock."""

    queue_seconds: float = 0.0
    """Accepted to leased, filled in by the ledger."""
    boot_seconds: float = 0.0
    """Making the box."""
    run_seconds: float = 0.0
    """The work itself."""
    collect_seconds: float = 0.0
    """Gathering and storing its result."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What the box used; ``None`` where the rung cannot measure it."""

    cpu_seconds: float | None = None
    memory_peak_bytes: int | None = None
    processes_peak: int | None = None
    output_bytes: int = 0
    """True count of bytes written to stdout and stderr, kept or not."""
    network_sent_bytes: int = 0
    """Carried out of the box by the egress proxy, TLS included."""
    network_received_bytes: int = 0
    """Carried into it."""


class Completion(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One result, as a worker reports it."""

    action_id: ActionId
    fence: Fence
    """Fence of the lease it ran under; 0 when the ledger itself ended the action."""
    status: CompletionStatus
    attempt: int = 0
    """Which execution produced it, from 1; 0 when none was started."""
    worker_id: WorkerId | None = None
    observation: Value | None = None
    """Canonical msgpack of the tool's result record (``stoker.model.tools``)."""
    fault: FaultRecord | None = None
    external_effect_possible: bool = False
    throttled_seconds: float | None = None
    """A remote service refused it, too many requests: the seconds it asked to wait, 0 where it
    named none. The ledger then decides what becomes of the action."""
    environment: EnvironmentState = EnvironmentState.NONE
    timings: Timings = Timings()
    usage: Usage = Usage()

    @property
    def box_gone(self) -> bool:
        """Whether the environment's box did not survive the action."""
        return self.environment is EnvironmentState.LOST

    @property
    def leaves_open(self) -> bool:
        """Whether it succeeded and its worker holds the environment now, as after an opening."""
        held = self.environment in {EnvironmentState.CLEAN, EnvironmentState.INTERRUPTED}
        return self.status is CompletionStatus.OK and held
