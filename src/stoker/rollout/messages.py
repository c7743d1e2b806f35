"""What coordinator and program host say to each other.

One rule carries all determinism: per rollout the coordinator delivers *one* result, the host runs
the program until nothing can move, and answers with one ``Turn``. Results for other rollouts may
travel in between; a second result for the same rollout is sent only after the turn before it.
"""

import msgspec

from stoker.model.events import Identity, Verb
from stoker.model.faults import FaultRecord
from stoker.model.ids import CallPath, RolloutId
from stoker.model.task import Task
from stoker.model.value import Value

# --- coordinator to host -------------------------------------------------------------------


class LoadProgram(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load the program; answered by ``Loaded`` or ``LoadFailed``. Sent once, first."""

    path: str
    """Absolute path of the Python file."""
    name: str | None
    """Which rollout in it; ``None`` when it holds just one."""
    stands_for: str | None = None
    """The recorded path whose place this file takes, for replays: tools and functions of
    ``ctx.local`` are journalled with the file they come from."""


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One journalled call, for replay: order is the journal's."""

    path: CallPath
    verb: Verb
    digest: str
    arguments: Value


class RecordedResult(msgspec.Struct, frozen=True, kw_only=True):
    """One journalled delivery, for replay."""

    path: CallPath
    value: bytes | None
    fault: FaultRecord | None
    at: float


class RecordedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A delivered result (``None`` for the start) and the calls that followed from it."""

    result: RecordedResult | None
    calls: tuple[RecordedCall, ...]
    withdrawn: tuple[CallPath, ...] = ()
    open: bool = False
    """The last result that a branch shares: what follows it is still to be asked for."""


class Became(msgspec.Struct, frozen=True, kw_only=True):
    """Who a branched rollout is from one turn on."""

    turn: int
    """Its place in the history; the length of it: after all of it."""
    identity: Identity


class StartRollout(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Begin, or rebuild by replay, one rollout.

    Answered by one ``Turn``: with an empty ``history`` the calls of the first turn; otherwise an
    empty turn once the program stands where it stood (or the outcome it reached there), or by
    ``Differed``. Turns are journalled whole, so a history never ends inside one, save at the result
    at which a branch begins (``open``): the turn tells what follows from it.
    """

    rollout_id: RolloutId
    task: Task
    epoch: str
    index: int
    group_id: str
    at: float
    history: tuple[RecordedTurn, ...] = ()
    became: tuple[Became, ...] = ()
    """Rising by turn; empty unless it is a branch."""
    checking: bool = False
    """Nothing comes of it but turns: ``ctx.local`` functions are not run either."""


class Deliver(msgspec.Struct, frozen=True, kw_only=True, tag="deliver"):
    """One result. ``fault`` set: it is raised at the awaiting verb."""

    rollout_id: RolloutId
    path: CallPath
    value: bytes | None
    """Canonical msgpack of the verb's result record."""
    fault: FaultRecord | None
    at: float
    """Recorded time of the delivery, wall seconds."""


class Evict(msgspec.Struct, frozen=True, kw_only=True, tag="evict"):
    """Throw the rollout's object away (guarded close); no answer."""

    rollout_id: RolloutId


class StopHost(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End the process."""


ToHost = LoadProgram | StartRollout | Deliver | Evict | StopHost

# --- host to coordinator -------------------------------------------------------------------


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The program is loaded."""

    name: str
    version: str
    source_digest: str
    python: str
    hash_seed: int
    boxes: int
    """Environments a rollout may hold at once; reserved at admission."""
    timeout_seconds: float
    """Wall time of a whole rollout."""
    pid: int


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="load_failed"):
    """The program cannot be loaded: the caller's fault."""

    message: str


class HostCall(msgspec.Struct, frozen=True, kw_only=True):
    """One verb the program awaited."""

    path: CallPath
    verb: Verb
    digest: str
    arguments: bytes
    """Canonical msgpack: the record for the verb in ``rollout.arguments``."""


class ProgramOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The program came to its end."""

    reward: float | None = None
    """The finite score it returned, or ``None`` with a fault or a truncation."""
    truncated: str = ""
    """Reason, when the program ended itself as truncated."""
    fault: FaultRecord | None = None
    """Why there is no reward: it raised, misused a verb, returned NaN …"""
    metrics: dict[str, float] = {}


class Turn(msgspec.Struct, frozen=True, kw_only=True, tag="turn"):
    """The program ran until nothing could move."""

    rollout_id: RolloutId
    calls: tuple[HostCall, ...] = ()
    """New calls in the order they were awaited."""
    withdrawn: tuple[CallPath, ...] = ()
    """Calls nobody waits for any more: cancel them."""
    outcome: ProgramOutcome | None = None
    tainted: FaultRecord | None = None
    """A fault was met in this turn that bars a reward (foreign awaitable); infrastructure faults
    taint on the coordinator's side."""
    recovered: tuple[str, ...] = ()
    """Codes of faults the program says it recovered from in this turn."""


class LocalDone(msgspec.Struct, frozen=True, kw_only=True, tag="local_done"):
    """A ``ctx.local`` call ended; the coordinator journals it and delivers it like any result."""

    rollout_id: RolloutId
    path: CallPath
    value: bytes | None
    fault: FaultRecord | None


class Differed(msgspec.Struct, frozen=True, kw_only=True, tag="differed"):
    """A replay asked for something else than the journal holds."""

    rollout_id: RolloutId
    fault: FaultRecord
    """``non_deterministic``, with both sides and program:line in the message."""


class Stuck(msgspec.Struct, frozen=True, kw_only=True, tag="stuck"):
    """Sent by the host's watchdog thread: the program has held the host for this long."""

    rollout_id: RolloutId
    seconds: float
    where: str
    """``file.py:12 in function``."""


FromHost = Loaded | LoadFailed | Turn | LocalDone | Differed | Stuck
