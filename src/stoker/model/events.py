"""Journal events: the append-only record from which a rollout is rebuilt, resumed or branched.

Order is the meaning: one delivered result, then the calls the program issued on receiving it, then
the next result. The ledger stores them as opaque bytes; only these types give them meaning.
"""

from enum import StrEnum

import msgspec

from stoker.model.faults import FaultRecord
from stoker.model.ids import ActionId, CallPath, GroupId, RolloutId, RunId, WorkerId
from stoker.model.outcome import Outcome
from stoker.model.task import Task
from stoker.model.value import Value


class Verb(StrEnum):
    """What a program can ask of its context; each asking takes one number of its scope."""

    GENERATE = "generate"
    ENVIRONMENT = "environment"
    RUN = "run"
    WRITE = "write"
    READ = "read"
    EXPORT = "export"
    SCORE = "score"
    CHECKPOINT = "checkpoint"
    CALL = "call"
    LOCAL = "local"
    SLEEP = "sleep"
    TIMER = "timer"
    """The clock of ``ctx.timeout``; resumes at once, fires later."""
    BRANCH = "branch"
    """Of the rollout itself (``ctx.branch``)."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a program can see of who it is."""

    rollout_id: RolloutId
    group_id: GroupId
    index: int
    epoch: str
    at: float
    """Wall time at which it was admitted, or branched off."""


class BranchedFrom(msgspec.Struct, frozen=True, kw_only=True):
    """Whose past a branched rollout shares, and how much of it."""

    parent: RolloutId
    step: int
    """Model calls that are shared."""
    entries: int
    """Entries of the parent's journal that are shared."""
    digest: str
    """Of those entries (``model.value.content_digest`` of all together)."""
    generation: int
    """Branches between it and a rollout that the run itself began."""
    root: Identity
    """Of the rollout at the beginning of that line: the program was this one at first."""
    sample: RolloutId | msgspec.UnsetType = msgspec.UNSET
    """By its own program (``ctx.branch``): the rollout that it counts with in their group. Unset:
    by a person (``stoker branch``); it counts for itself."""


class Admitted(msgspec.Struct, frozen=True, kw_only=True, tag="admitted"):
    """The rollout exists; everything that fixes its behaviour."""

    run_id: RunId
    rollout_id: RolloutId
    group_id: GroupId
    index: int
    """Which rollout of its group, from 0."""
    task: Task
    program: str
    """Name of the rollout function."""
    program_version: str
    program_digest: str
    """Digest of the source file."""
    python: str
    """``major.minor`` of the interpreter."""
    hash_seed: int
    epoch: str
    """Identity that randomness and ids follow; a branch has another."""
    at: float
    """Wall time, seconds since the epoch."""
    timeout_seconds: float
    policy_digests: dict[str, str] = {}
    """Worker class → digest of its execution policy; empty in journals that do not say."""
    branched: BranchedFrom | msgspec.UnsetType = msgspec.UNSET
    """Unset: the run itself began it."""

    @property
    def place(self) -> tuple[str, int]:
        """Task and index among those that the run itself begins; a branch takes none of these."""
        return self.task.task_id, self.index if self.branched is msgspec.UNSET else -1

    @property
    def sample(self) -> RolloutId:
        """The rollout that it counts with in its group: itself, unless a program branched it."""
        of = msgspec.UNSET if self.branched is msgspec.UNSET else self.branched.sample
        return self.rollout_id if of is msgspec.UNSET else of


class Issued(msgspec.Struct, frozen=True, kw_only=True, tag="issued"):
    """The program asked for something."""

    path: CallPath
    verb: Verb
    digest: str
    """Digest of verb and arguments; a replay must issue the same."""
    arguments: Value
    """Canonical msgpack of the verb's arguments."""
    action_id: ActionId | None = None
    """The action it became, for verbs that go to a worker."""
    dropped: bool = False
    """Issued by a cancelled scope's cleanup after the rollout's outcome was known."""


class Delivered(msgspec.Struct, frozen=True, kw_only=True, tag="delivered"):
    """One result was put into the program. ``fault`` set: it was raised there."""

    path: CallPath
    value: Value | None = None
    """Canonical msgpack of the verb's result record."""
    fault: FaultRecord | None = None
    at: float = 0.0
    """Recorded time; ``ctx.now()`` until the next result."""
    action_id: ActionId | None = None
    attempt: int = 0
    worker_id: WorkerId | None = None
    """Who ran it; for an opened environment, who holds it."""
    status: str = ""
    """Completion status for actions."""
    changed: bool = False
    """It ran in its environment and the box survived: a rebuild must run it again."""
    paused_seconds: float | msgspec.UnsetType = msgspec.UNSET
    """Between the turn before and the coordinator that took the rollout up again; unset: none."""
    queue_seconds: float = 0.0
    run_seconds: float = 0.0
    latency_seconds: float = 0.0
    """Issued → delivered."""


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    """A result that no scope waits for any more (its scope was cancelled); changes nothing."""

    path: CallPath
    status: str = ""
    action_id: ActionId | None = None


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True, tag="withdrawn"):
    """The program stopped waiting for a call (cancelled scope, unfired timer)."""

    path: CallPath


class Late(msgspec.Struct, frozen=True, kw_only=True, tag="late"):
    """A result came under a stale fence; recorded with what was decided."""

    action_id: ActionId
    status: str
    disposition: str


BRANCHED = "branched"
"""Why a branch's box is made: nothing was lost, and its parent's box is not its own."""


class Restored(msgspec.Struct, frozen=True, kw_only=True, tag="restored"):
    """An environment was rebuilt as a new generation by running replayable actions again."""

    path: CallPath
    """Where the environment was opened."""
    generation: int
    worker_id: WorkerId
    """Who holds it now."""
    reason: str
    """Code of the fault it was lost with, or ``BRANCHED``."""


class Branched(msgspec.Struct, frozen=True, kw_only=True, tag="branched"):
    """What stands before is shared with the parent; the next result is, what follows it is not."""

    identity: Identity
    """The program's from here on."""


class Reissued(msgspec.Struct, frozen=True, kw_only=True, tag="reissued"):
    """A model call or action in flight at a crash was sent again."""

    path: CallPath


class Tainted(msgspec.Struct, frozen=True, kw_only=True, tag="tainted"):
    """An infrastructure fault or foreign awaitable was met; no reward until recovered."""

    path: CallPath
    fault: FaultRecord


class Recovered(msgspec.Struct, frozen=True, kw_only=True, tag="recovered"):
    """The program vouched for its result in spite of the faults met so far with this code."""

    code: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The outcome; nothing follows."""

    outcome: Outcome
    at: float
    steps: int = 0
    actions: int = 0
    tokens: int = 0
    """Sampled."""
    box_seconds: float = 0.0
    """How long its actions ran, added up."""


JournalEvent = (
    Admitted
    | Issued
    | Delivered
    | Dropped
    | Withdrawn
    | Late
    | Restored
    | Branched
    | Reissued
    | Tainted
    | Recovered
    | Finished
)
"""Any journal event, told apart by its tag."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[JournalEvent] = msgspec.msgpack.Decoder(JournalEvent)


def encode_event(event: JournalEvent) -> bytes:
    """Return the stored form of ``event``."""
    return _encoder.encode(event)


def decode_event(stored: bytes) -> JournalEvent:
    """Return the event stored as ``stored``; ``msgspec.ValidationError`` when it is none."""
    return _decoder.decode(stored)
