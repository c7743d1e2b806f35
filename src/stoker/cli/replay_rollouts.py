"""Replaying journals against a program: in a host process, with nothing carried out.

The host compares every call with the journal. What is compared here is what it cannot see: the
outcome, and, at every prefix, the one turn that the program takes on its own after a rebuild.
A host that dies or is held by the program is replaced; the rollout it had is told as failed.
"""

import enum
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from stoker.cli.output import counted
from stoker.coordinator.outcomes import outcome_of
from stoker.coordinator.rebuild import Fetch, Standing, check_of, rebuild
from stoker.errors import ArtifactDamaged, HostLost, ProgramInvalid, WireViolation
from stoker.model.events import Admitted, Delivered, Issued, JournalEvent
from stoker.model.ids import CallPath, RolloutId
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.value import canonical_digest
from stoker.rollout.hosts import HostProcess
from stoker.rollout.messages import (
    Deliver,
    Differed,
    Evict,
    FromHost,
    HostCall,
    Loaded,
    LoadFailed,
    ProgramOutcome,
    RecordedCall,
    RecordedTurn,
    StartRollout,
    Stuck,
    Turn,
)


class Verdict(enum.StrEnum):
    """What came of a replay."""

    SAME = "same"
    """The program did what the journal says."""
    DIFFERS = "differs"
    """It did something else; the message shows both."""
    FAILED = "failed"
    """It could not be replayed to its end; the message says why."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout, replayed."""

    rollout_id: RolloutId
    task_id: str
    index: int
    verdict: Verdict
    calls: int
    """In its journal."""
    prefixes: int
    """Results that were also delivered live, after a rebuild from the turns before."""
    message: str = ""


class _Difference(Exception):
    """The program did something else."""


class Replayer:
    """A program host that replays rollouts one after the other."""

    def __init__(
        self, program: Path, name: str | None, recorded: Path, *, log: Path, stuck_seconds: float
    ) -> None:
        self._program = program
        self._name = name
        self._recorded = recorded
        """Where the program lay when it was journalled."""
        self._log = log
        self._stuck_seconds = stuck_seconds
        self._host: HostProcess | None = None
        self._messages: AsyncIterator[FromHost] | None = None
        self._hash_seed = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self._end()

    async def load(self, hash_seed: int) -> Loaded:
        """Have a host that orders sets of strings by ``hash_seed``; return what it loaded.

        Raises:
            ProgramInvalid: the program cannot be loaded.
            HostLost: loading it ended the process.
        """
        await self._end()
        self._hash_seed = hash_seed
        self._host = await HostProcess.start(
            self._program,
            log=self._log,
            name=self._name,
            hash_seed=hash_seed,
            stuck_seconds=self._stuck_seconds,
            stands_for=self._recorded,
        )
        self._messages = self._host.messages()
        async for message in self._messages:
            if isinstance(message, Loaded):
                return message
            if isinstance(message, LoadFailed):
                raise ProgramInvalid(message.message)
        raise HostLost(f"loading {self._program} ended its process: {self._host.log_tail()}")

    async def replay(
        self,
        events: Sequence[JournalEvent],
        fetch: Fetch,
        *,
        hash_seed: int,
        every_prefix: bool = False,
    ) -> Replayed:
        """Replay one journal; with ``every_prefix`` also from each of its first turns on.

        Raises:
            ProgramInvalid: the program cannot be loaded any more.
        """
        admitted = events[0]
        assert isinstance(admitted, Admitted), "the ledger admits rollouts by this event"
        verdict, message = Verdict.SAME, ""
        try:
            if self._host is None or hash_seed != self._hash_seed:
                await self.load(hash_seed)
            standing = rebuild(events, fetch)
            await self._whole(standing)
            if every_prefix:
                await self._prefixes(standing)
        except _Difference as difference:
            verdict, message = Verdict.DIFFERS, str(difference)
        except (HostLost, WireViolation) as error:
            verdict, message = Verdict.FAILED, error.message
            await self._end()
        except ArtifactDamaged as error:
            verdict, message = Verdict.FAILED, error.message
        if self._host is not None:
            self._say(Evict(rollout_id=admitted.rollout_id))
        return Replayed(
            rollout_id=admitted.rollout_id,
            task_id=admitted.task.task_id,
            index=admitted.index,
            verdict=verdict,
            calls=sum(isinstance(event, Issued) for event in events),
            prefixes=sum(isinstance(event, Delivered) for event in events) if every_prefix else 0,
            message=message,
        )

    async def _whole(self, standing: Standing) -> None:
        turn = await self._turn(check_of(standing, standing.turns))
        if not standing.turns:
            if standing.finished is None:
                return  # admitted and never begun: the journal says nothing yet
            _compare(RecordedTurn(result=None, calls=()), turn, 0)
        _compare_outcome(standing, turn.outcome)

    async def _prefixes(self, standing: Standing) -> None:
        for count, recorded in enumerate(standing.turns):
            turn = await self._turn(check_of(standing, standing.turns[:count]))
            if count:
                assert recorded.result is not None, "only the first turn has no result"
                turn = await self._turn(
                    Deliver(
                        rollout_id=standing.admitted.rollout_id,
                        path=recorded.result.path,
                        value=recorded.result.value,
                        fault=recorded.result.fault,
                        at=recorded.result.at,
                    )
                )
            _compare(recorded, turn, count)
        _compare_outcome(standing, turn.outcome if standing.turns else None)

    async def _turn(self, message: StartRollout | Deliver) -> Turn:
        self._say(message)
        assert self._messages is not None, "a host is loaded first"
        async for heard in self._messages:
            if isinstance(heard, Turn):
                return heard
            if isinstance(heard, Differed):
                raise _Difference(heard.fault.message)
            if isinstance(heard, Stuck):
                raise HostLost(
                    f"the program held its host for {heard.seconds:.0f} s at {heard.where}; "
                    "the host was ended and the rollout is not replayed"
                )
        tail = self._host.log_tail() if self._host is not None else ""
        raise HostLost(f"the program ended its host process; what it printed last: {tail}")

    def _say(self, message: msgspec.Struct) -> None:
        assert self._host is not None, "a host is loaded first"
        self._host.send(message)

    async def _end(self) -> None:
        if self._host is not None:
            await self._host.end()
        self._host = self._messages = None


def _compare(recorded: RecordedTurn, turn: Turn, count: int) -> None:
    turns = counted(count, "turn")
    where = f"rebuilt from the first {turns} and given the next result, " if count else ""
    if _shape(turn.calls) != _shape(recorded.calls):
        raise _Difference(
            f"{where}the program asks for other calls\n"
            f"  journal: {_listed(recorded.calls)}\n  program: {_listed(turn.calls)}"
        )
    if turn.withdrawn != recorded.withdrawn:
        raise _Difference(
            f"{where}the program stops waiting for other calls\n"
            f"  journal: {_paths(recorded.withdrawn)}\n  program: {_paths(turn.withdrawn)}"
        )


def _compare_outcome(standing: Standing, ended: ProgramOutcome | None) -> None:
    """Compare how the program ended; a rollout that was cut from outside has not ended by itself.

    Messages of faults may name lines and times; what must agree is what a trainer would be told.
    """
    recorded = standing.finished.outcome if standing.finished is not None else None
    if ended is None:
        if recorded is not None and recorded.kind is OutcomeKind.COMPLETED:
            raise _Difference(
                f"the program goes on where it had ended\n  journal: {_told(recorded)}\n"
                "  program: waits"
            )
        return
    replayed = outcome_of(ended, standing.tainted)
    if recorded is None or _essence(replayed) != _essence(recorded):
        raise _Difference(
            f"the outcome differs\n  journal: {_told(recorded)}\n  program: {_told(replayed)}"
        )


def _essence(outcome: Outcome) -> str:
    fault = outcome.fault.code if outcome.fault else None
    return canonical_digest([outcome.kind, outcome.reward, fault, outcome.metrics])


def _told(outcome: Outcome | None) -> str:
    if outcome is None:
        return "has no outcome"
    parts = [str(outcome.kind)]
    parts += [f"reward {outcome.reward!r}"] if outcome.reward is not None else []
    parts += [outcome.fault.code] if outcome.fault else []
    parts += [f"{name} {value!r}" for name, value in sorted(outcome.metrics.items())]
    return ", ".join(parts)


def _shape(calls: tuple[HostCall, ...] | tuple[RecordedCall, ...]) -> list[tuple[str, str, str]]:
    return [(call.path, call.verb, call.digest) for call in calls]


def _listed(calls: tuple[HostCall, ...] | tuple[RecordedCall, ...]) -> str:
    told = [f"{call.path} {call.verb} ({call.digest[:8]})" for call in calls]
    return ", ".join(told) or "none"


def _paths(paths: tuple[CallPath, ...]) -> str:
    return ", ".join(paths) or "none"
