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
from stoker.model.checkpoint import Checkpoint
from stoker.model.events import Verb
from stoker.model.faults import FaultRecord
from stoker.model.generation import Generation
from stoker.model.ids import CallPath, RolloutId
from stoker.model.task import Task
from stoker.model.tools import (
    CallResult,
    ExportResult,
    OpenResult,
    ReadResult,
    RunResult,
    Verdict,
)
from stoker.model.value import Value, canonical_bytes, content_digest
from stoker.rollout.arguments import decode_arguments
from stoker.rollout.host import run_local
from stoker.rollout.messages import (
    HostCall,
    ProgramOutcome,
    RecordedCall,
    RecordedResult,
    RecordedTurn,
    StartRollout,
    Turn,
)
from stoker.rollout.operation import VerbOperation
from stoker.rollout.program import Rollout
from stoker.rollout.trampoline import Trampoline

_DELIVERIES_MAX = 10_000


class Never:
    """An answer that does not come."""


class Fire:
    """A timer that fires."""


FIRE = Fire()
"""Give this for a ``timer`` whose block is to be cut; by default a timer never fires."""
NEVER = Never()
"""Give this for a call that stays outstanding (a timer that does not fire)."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One verb a program awaited, as a script sees it."""

    path: CallPath
    verb: Verb
    arguments: Any
    """The verb's record of ``stoker.rollout.arguments`` (``GenerateArguments`` for generate)."""
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
    deliveries_max: int = _DELIVERIES_MAX,
) -> Drive:
    """Run ``program`` to its end, or until nothing it waits for is answered.

    Raises:
        AssertionError: it still goes on after ``deliveries_max`` results.
    """
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
        return run.whole(deliveries_max)
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
    arguments, request = decode_arguments(call.verb, call.arguments)
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
        Verb.CHECKPOINT: Checkpoint(digest="", parent="", generation=0),
        Verb.CALL: CallResult(),
        Verb.TIMER: NEVER,
        Verb.BRANCH: 0,
    }
    return answers.get(asked.verb)


class _Run:
    """One drive in progress."""

    def __init__(self, trampoline: Trampoline, script: Script, choose: Choose) -> None:
        self._trampoline = trampoline
        self._script = script
        self._choose = choose
        self._history: list[RecordedTurn] = []
        self._calls: list[Asked] = []
        self._outstanding: dict[CallPath, None] = {}
        self._tainted: list[FaultRecord] = []
        self._recovered: list[str] = []
        self._outcome: ProgramOutcome | None = None
        self._answers: dict[CallPath, tuple[bytes | None, FaultRecord | None]] = {}

    def whole(self, deliveries_max: int) -> Drive:
        self._take(self._trampoline.begin(), None)
        for number in range(deliveries_max):
            if self._outcome is not None or not self._answers:
                return self._result()
            paths = list(self._answers)
            path = paths[self._choose(paths)]
            value, fault = self._answers.pop(path)
            result = RecordedResult(path=path, value=value, fault=fault, at=float(number + 1))
            self._take(self._trampoline.deliver(result), result)
        raise AssertionError(f"the program still went on after {deliveries_max} results")

    def _result(self) -> Drive:
        return Drive(
            start=self._trampoline.start,
            outcome=self._outcome,
            history=tuple(self._history),
            tainted=tuple(self._tainted),
            recovered=tuple(self._recovered),
            outstanding=tuple(self._outstanding),
            calls=tuple(self._calls),
        )

    def _take(self, turn: Turn, result: RecordedResult | None) -> None:
        self._history.append(record_turn(turn, result))
        self._outcome = turn.outcome
        self._tainted += [turn.tainted] if turn.tainted is not None else []
        self._recovered += turn.recovered
        local = dict(self._trampoline.take_locals())
        for call in turn.calls:
            self._answer(asked(call), local.get(call.path))
        for path in (*turn.withdrawn, *([result.path] if result is not None else [])):
            self._outstanding.pop(path, None)
            self._answers.pop(path, None)

    def _answer(self, question: Asked, local: VerbOperation[Any] | None) -> None:
        self._calls.append(question)
        self._outstanding[question.path] = None
        given = self._script(question)
        if given is None and local is not None:
            self._answers[question.path] = run_local(local)
            return
        answer = _encoded(question, default_answer(question) if given is None else given)
        if answer is not None:
            self._answers[question.path] = answer


def _encoded(asked: Asked, given: Any) -> tuple[bytes | None, FaultRecord | None] | None:  # noqa: ANN401 - any, by purpose
    if isinstance(given, Never):
        return None
    if isinstance(given, Fire):
        return canonical_bytes(None), None
    if isinstance(given, StokerError):
        return None, given.record()
    if asked.verb is Verb.GENERATE and isinstance(given, str):
        given = Generation(text=given)
    return canonical_bytes(given), None
