"""Every error Stoker raises, named after the boundary that broke.

One base carries a stable ``code``, the ``side`` at fault, whether a retry can help, and typed,
redacted context. The class docstring is the default message. Errors turn into a ``FaultRecord``
to cross wires and disks and back into the same class on the other side (``from_record``).

A rollout that failed is data; it never cancels its siblings. Which errors may become an outcome
with a reward: none.
"""

import asyncio
from typing import ClassVar, Self

from stoker.model.faults import FaultRecord, FaultSide

EXIT_BAD_INPUT = 2


class StokerError(Exception):
    """Something in Stoker went wrong."""

    code: ClassVar[str] = "stoker_error"
    side: ClassVar[FaultSide] = FaultSide.INTERNAL
    retryable: ClassVar[bool] = False

    def __init__(self, message: str = "", /, **context: object) -> None:
        self.message = message or (type(self).__doc__ or "").strip().splitlines()[0]
        self.context = {key: str(value) for key, value in context.items()}
        super().__init__(self.message)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by code, so that the error survives a process border."""
        return (from_record, (self.record(),))

    def record(self) -> FaultRecord:
        """Return this error as data."""
        return FaultRecord(
            code=self.code,
            side=self.side,
            message=self.message,
            retryable=self.retryable,
            context=self.context,
        )

    @classmethod
    def rebuilt(cls, record: FaultRecord) -> Self:
        """Return an instance that says what ``record`` says."""
        error = cls(record.message)
        error.context = dict(record.context)
        return error


class BadInput(StokerError):
    """The input cannot be used."""

    code = "bad_input"
    side = FaultSide.CALLER


class ConfigInvalid(BadInput):
    """A setting is unknown or has a value that cannot be used."""

    code = "config_invalid"


class TaskInvalid(BadInput):
    """A line of the task file is not a task."""

    code = "task_invalid"


class ProgramInvalid(BadInput):
    """The rollout program cannot be loaded."""

    code = "program_invalid"


class RunNotFound(BadInput):
    """There is no such run."""

    code = "run_not_found"


class RunOwned(BadInput):
    """Another living process owns this run."""

    code = "run_owned"


class RunDirectoryUnusable(BadInput):
    """The run directory cannot hold a run."""

    code = "run_directory_unusable"


class RunChanged(BadInput):
    """The run was made with another program, model or limits."""

    code = "run_changed"


class GroupMixed(BadInput):
    """Rollouts of one group were made with different programs, baselines or policies."""

    code = "group_mixed"


class DeliveryUnknown(BadInput):
    """What is committed is no hand-out of a group that can be answered now."""

    code = "delivery_unknown"


class StateRefused(BadInput):
    """The trainer's state does not belong to this run and ledger; nothing was changed."""

    code = "state_refused"


class BackupInvalid(BadInput):
    """A backup cannot be used; nothing was restored."""

    code = "backup_invalid"


class IsolationUnavailable(BadInput):
    """This host cannot give the isolation that was asked for; nothing was weakened."""

    code = "isolation_unavailable"


class BranchUnavailable(BadInput):
    """This kind of box cannot be checkpointed, branched or restored; nothing was done."""

    code = "branch_unavailable"


class ToolRefused(StokerError):
    """A tool request cannot be carried out as written."""

    code = "tool_refused"
    side = FaultSide.ENVIRONMENT


class ProgramRaised(StokerError):
    """The rollout program raised an exception."""

    code = "program_raised"
    side = FaultSide.ENVIRONMENT


class ProgramStuck(StokerError):
    """The rollout program blocked its host past the bound; it was ended."""

    code = "program_stuck"
    side = FaultSide.ENVIRONMENT


class NonDeterministicRollout(StokerError):
    """On replay the program asked for something else than the journal holds."""

    code = "non_deterministic"
    side = FaultSide.ENVIRONMENT


class ForeignAwaitable(StokerError):
    """The program awaited something that does not come from its context."""

    code = "foreign_awaitable"
    side = FaultSide.ENVIRONMENT


class VerbMisused(StokerError):
    """A context verb was used in a way that cannot be replayed."""

    code = "verb_misused"
    side = FaultSide.ENVIRONMENT


class LocalRaised(StokerError):
    """A function run by ctx.local raised, or returned what cannot be journalled."""

    code = "local_raised"
    side = FaultSide.ENVIRONMENT


class RewardInvalid(StokerError):
    """The program returned something that is not a finite score."""

    code = "reward_invalid"
    side = FaultSide.ENVIRONMENT


class Infrastructure(StokerError):
    """Machines, processes, disks or servers failed."""

    code = "infrastructure"
    side = FaultSide.INFRASTRUCTURE
    retryable = True


class ServiceBusy(Infrastructure):
    """A remote service refused an action again and again: too many requests."""

    code = "service_busy"


class LedgerUnavailable(Infrastructure):
    """The ledger cannot be reached."""

    code = "ledger_unavailable"


class LedgerFenced(Infrastructure):
    """A newer coordinator owns this partition; nothing was changed."""

    code = "ledger_fenced"
    retryable = False


class LedgerRefused(Infrastructure):
    """The ledger refused a request that does not fit its state."""

    code = "ledger_refused"
    retryable = False


class LedgerTooNew(BadInput):
    """A newer Stoker made this ledger; nothing was changed."""

    code = "ledger_too_new"


class LedgerStorageFailed(Infrastructure):
    """A commit or sync failed; nothing was promised and the ledger reopens."""

    code = "ledger_storage_failed"


class ArtifactDamaged(Infrastructure):
    """Stored content is missing or does not match its digest."""

    code = "artifact_damaged"
    retryable = False


class ArtifactNotStored(Infrastructure):
    """Content too large for a row could not be written to the artifact store."""

    code = "artifact_not_stored"


class WorkerLost(Infrastructure):
    """The worker that ran the action is gone."""

    code = "worker_lost"


class EnvironmentLost(Infrastructure):
    """The environment's box is gone and could not be restored."""

    code = "environment_lost"
    retryable = False


class BoxFailed(Infrastructure):
    """A box could not be made or torn down; nothing of it was left behind."""

    code = "box_failed"


class DeadLetter(Infrastructure):
    """The action used up its attempts or deliveries; every cause is kept."""

    code = "dead_letter"
    retryable = False


class EffectAmbiguous(Infrastructure):
    """An external effect may or may not have happened; it is not run again."""

    code = "effect_ambiguous"
    retryable = False


class ModelUnavailable(Infrastructure):
    """The model server did not answer within its retries."""

    code = "model_unavailable"


class ModelRefused(Infrastructure):
    """The model server refused the call as it is; sending it again would not help."""

    code = "model_refused"
    retryable = False


class HostLost(Infrastructure):
    """The program host ended; its rollouts are replayed elsewhere."""

    code = "host_lost"


class WireViolation(Infrastructure):
    """A peer sent something that is not our protocol; the connection was closed."""

    code = "wire_violation"
    retryable = False


class InternalError(StokerError):
    """A bug of ours; please report it."""

    code = "internal"


class Cancelled(asyncio.CancelledError):
    """Thrown into a scope that is no longer wanted; ``except Exception`` lets it pass."""


class Evicted(BaseException):
    """The rollout object is being thrown away in this process; the rollout itself lives on."""


def from_record(record: FaultRecord) -> StokerError:
    """Return the error that ``record`` describes; an unknown code gives the side's base class."""
    known = _classes().get(record.code)
    if known is None:
        known = Infrastructure if record.side is FaultSide.INFRASTRUCTURE else StokerError
    return known.rebuilt(record)


def _classes() -> dict[str, type[StokerError]]:
    found: dict[str, type[StokerError]] = {}
    waiting: list[type[StokerError]] = [StokerError]
    while waiting:
        cls = waiting.pop()
        found[cls.code] = cls
        waiting.extend(cls.__subclasses__())
    return found
