"""Run a rollout program in-process with scripted answers, and replay it at every prefix.

For tests of rollout programs: no processes, no boxes, no model. A *script* answers each verb; the
drive records the journal turns as the coordinator would, and ``replay_every_prefix`` then rebuilds
the program from each prefix and checks that it stands where it stood.

    result = drive(repair, script, task=Task(task_id="t"))
    assert result.outcome.reward == 1.0
    replay_every_prefix(repair, result)
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from stoker.errors import StokerError
from stoker.model.events import Verb
from stoker.model.faults import FaultRecord
from stoker.model.generation import GenerateArguments, Generation
from stoker.model.ids import CallPath, RolloutId
from stoker.model.task import Task
from stoker.model.tools import (
    CallResult,
    ExportRequest,
    ExportResult,
    OpenResult,
    ReadRequest,
    ReadResult,
    RunRequest,
    RunResult,
    ScoreRequest,
    Verdict,
    WriteRequest,
)
from stoker.model.value import Value, canonical_bytes, content_digest
from stoker.rollout.arguments import (
    BoxArguments,
    CallArguments,
    EnvironmentArguments,
    LocalArguments,
    TimerArguments,
)
from stoker.rollout.host import run_local
from stoker.rollout.messages import (
    Deliver,
    HostCall,
    ProgramOutcome,
    RecordedCall,
    RecordedResult,
    RecordedTurn,
    StartRollout,
    Turn,
)
from stoker.rollout.program import Rollout
from stoker.rollout.trampoline import Trampoline

_ARGUMENTS: dict[Verb, type[msgspec.Struct]] = {
    Verb.GENERATE: GenerateArguments,
    Verb.ENVIRONMENT: EnvironmentArguments,
    Verb.RUN: BoxArguments,
    Verb.WRITE: BoxArguments,
    Verb.READ: BoxArguments,
    Verb.EXPORT: BoxArguments,
    Verb.SCORE: BoxArguments,
    Verb.CALL: CallArguments,
    Verb.LOCAL: LocalArguments,
    Verb.SLEEP: TimerArguments,
    Verb.TIMER: TimerArguments,
}
_REQUESTS: dict[Verb, type[msgspec.Struct]] = {
    Verb.RUN: RunRequest,
    Verb.WRITE: WriteRequest,
    Verb.READ: ReadRequest,
    Verb.EXPORT: ExportRequest,
    Verb.SCORE: ScoreRequest,
}
_DELIVERIES_MAX = 100_000


class Never:
    """An answer that does not come."""


NEVER = Never()
"""Give this for a call that stays outstanding (a timer that does not fire)."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One verb a program awaited, as a script sees it."""

    path: CallPath
    verb: Verb
    arguments: Any
    """The verb's record of ``stoker.rollout.arguments`` (or ``GenerateArguments``)."""
    request: Any = None
    """For actions in an environment, the decoded request of ``stoker.model.tools``."""


Script = Callable[[Asked], Any]
"""Returns the verb's result record, a ``StokerError`` to raise there, ``NEVER``, or ``None`` for
the plain answer of the verb (``default_answer``). A ``str`` answers ``generate`` with that text."""
Choose = Callable[[Sequence[CallPath]], int]
"""Picks which outstanding call is answered next; the first by default."""


class Drive(msgspec.Struct, kw_only=True):
    """What a program did."""

    start: StartRollout
    outcome: ProgramOutcome | None = None
    """``None``: it waits for answers that never come."""
    history: tuple[RecordedTurn, ...] = ()
    """The journal turns."""
    tainted: tuple[FaultRecord, ...] = ()
    recovered: tuple[str, ...] = ()
    outstanding: tuple[CallPath, ...] = ()
    calls: tuple[Asked, ...] = ()
    """Every verb, in the order awaited."""


def drive(
    program: Rollout,
    script: Script | None = None,
    *,
    task: Task | None = None,
    epoch: str = "epoch-0",
    choose: Choose | None = None,
) -> Drive:
    """Run ``program`` to its end, or until nothing it waits for is answered."""
    task = task or Task(task_id="task-0")
    start = StartRollout(
        rollout_id=RolloutId("rol_driven"),
        task=task,
        epoch=epoch,
        index=0,
        group_id="grp_0",
        at=0.0,
    )
    trampoline = Trampoline(program, start)
    run = _Run(trampoline, script or (lambda _asked: None), choose or (lambda _paths: 0))
    try:
        return run.whole()
    finally:
        trampoline.close()


def replay(program: Rollout, drive: Drive, prefix: int | None = None) -> Turn:
    """Rebuild the program from the first ``prefix`` turns of ``drive`` (all when ``None``).

    Raises:
        NonDeterministicRollout: the program did something else.
    """
    history = drive.history[:prefix]
    trampoline = Trampoline(program, msgspec.structs.replace(drive.start, history=history))
    try:
        return trampoline.begin()
    finally:
        trampoline.close()


def replay_every_prefix(program: Rollout, drive: Drive) -> int:
    """Rebuild from each prefix, go on with the recorded results, and compare; return how many.

    Raises:
        NonDeterministicRollout: the program did something else.
    """
    for prefix in range(1, len(drive.history) + 1):
        start = msgspec.structs.replace(drive.start, history=drive.history[:prefix])
        trampoline = Trampoline(program, start)
        try:
            turn = trampoline.begin()
            assert not turn.calls, "a replay reports no calls of turns already journalled"
            for recorded in drive.history[prefix:]:
                assert recorded.result is not None, "only the first turn has no result"
                turn = trampoline.deliver(recorded.result)
                assert record_turn(turn, recorded.result) == recorded, f"after prefix {prefix}"
            assert turn.outcome == drive.outcome, f"after prefix {prefix}"
        finally:
            trampoline.close()
    return len(drive.history)


def record_turn(turn: Turn, result: RecordedResult | None) -> RecordedTurn:
    """Return the journal's form of a live turn."""
    calls = tuple(
        RecordedCall(
            path=call.path,
            verb=call.verb,
            digest=call.digest,
            arguments=Value(content_digest(call.arguments), len(call.arguments), call.arguments),
        )
        for call in turn.calls
    )
    return RecordedTurn(result=result, calls=calls, withdrawn=turn.withdrawn)


def asked(call: HostCall) -> Asked:
    """Return ``call`` decoded."""
    arguments: Any = msgspec.msgpack.decode(call.arguments, type=_ARGUMENTS[call.verb])
    kind = _REQUESTS.get(call.verb)
    request = None if kind is None else msgspec.msgpack.decode(arguments.request, type=kind)
    return Asked(path=call.path, verb=call.verb, arguments=arguments, request=request)


def default_answer(asked: Asked) -> Any:  # noqa: ANN401 - one record per verb
    """Return the plain good answer of a verb; a timer never fires."""
    answers: dict[Verb, Any] = {
        Verb.GENERATE: Generation(text=""),
        Verb.ENVIRONMENT: OpenResult(isolation="fake", rung="fake", baseline_digest=""),
        Verb.RUN: RunResult(exit_code=0),
        Verb.READ: ReadResult(),
        Verb.EXPORT: ExportResult(),
        Verb.SCORE: Verdict(passed=True),
        Verb.CALL: CallResult(),
        Verb.TIMER: NEVER,
    }
    return answers.get(asked.verb)


class _Run:
    """One drive in progress."""

    def __init__(self, trampoline: Trampoline, script: Script, choose: Choose) -> None:
        self._trampoline = trampoline
        self._script = script
        self._choose = choose
        self._drive = Drive(start=trampoline.start)
        self._answers: dict[CallPath, tuple[bytes | None, FaultRecord | None]] = {}

    def whole(self) -> Drive:
        self._take(self._trampoline.begin(), None)
        for number in range(_DELIVERIES_MAX):
            if self._drive.outcome is not None or not self._answers:
                return self._drive
            paths = list(self._answers)
            path = paths[self._choose(paths)]
            value, fault = self._answers.pop(path)
            result = RecordedResult(path=path, value=value, fault=fault, at=float(number + 1))
            turn = self._trampoline.deliver(
                Deliver(
                    rollout_id=self._drive.start.rollout_id,
                    path=path,
                    value=value,
                    fault=fault,
                    at=result.at,
                )
            )
            self._take(turn, result)
        raise AssertionError(f"the program still went on after {_DELIVERIES_MAX} results")

    def _take(self, turn: Turn, result: RecordedResult | None) -> None:
        drive = self._drive
        drive.history += (record_turn(turn, result),)
        drive.outcome = turn.outcome
        drive.tainted += (turn.tainted,) if turn.tainted is not None else ()
        drive.recovered += turn.recovered
        local = dict(self._trampoline.take_locals())
        for call in turn.calls:
            question = asked(call)
            drive.calls += (question,)
            drive.outstanding += (call.path,)
            given = self._script(question)
            if given is None and call.path in local:
                self._answers[call.path] = run_local(local[call.path])
                continue
            answer = _encoded(question, default_answer(question) if given is None else given)
            if answer is not None:
                self._answers[call.path] = answer
        gone = {*turn.withdrawn, *([result.path] if result is not None else [])}
        drive.outstanding = tuple(path for path in drive.outstanding if path not in gone)
        for path in gone:
            self._answers.pop(path, None)


def _encoded(asked: Asked, given: Any) -> tuple[bytes | None, FaultRecord | None] | None:  # noqa: ANN401
    if isinstance(given, Never):
        return None
    if isinstance(given, StokerError):
        return None, given.record()
    if asked.verb is Verb.GENERATE and isinstance(given, str):
        given = Generation(text=given)
    return canonical_bytes(given), None
