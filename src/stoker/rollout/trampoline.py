"""The trampoline: drives one rollout program over a tree of scopes, and replays it.

Invariants:

- one result is put in, then the program runs until nothing is ready; then the turn is told;
- paths are taken when a verb is awaited; order and cancellation are the ``tree``'s;
- replayed calls are compared with the journal outside the program, which cannot swallow it;
- a coroutine thrown away is closed *guarded*: its verbs raise ``Evicted`` and issue nothing.

Nothing here does input or output. Measured rules and traps: ``docs/design/0004-replay.md``.
"""

import threading
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from stoker.errors import (
    Evicted,
    ForeignAwaitable,
    InternalError,
    StokerError,
    VerbMisused,
    from_record,
)
from stoker.model.events import Identity, Verb
from stoker.model.ids import CallPath, GroupId
from stoker.model.value import canonical_bytes
from stoker.rollout import guard
from stoker.rollout.arguments import decode_arguments
from stoker.rollout.context import Context
from stoker.rollout.environment import Environment
from stoker.rollout.history import TurnCheck, unknown_result
from stoker.rollout.messages import (
    Deliver,
    HostCall,
    ProgramOutcome,
    RecordedResult,
    StartRollout,
    Turn,
)
from stoker.rollout.operation import JoinOperation, Operation, VerbOperation
from stoker.rollout.position import standing
from stoker.rollout.program import Rollout
from stoker.rollout.randomness import RolloutRandom
from stoker.rollout.scope import Scope, Timer
from stoker.rollout.score import outcome_of_error, outcome_of_return
from stoker.rollout.tree import Tree
from stoker.rollout.turnlog import TURN_BYTES_MAX, TurnLog

T = TypeVar("T")

_UNUSABLE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
_CLOSES_MAX = 100
"""A coroutine that survives this many closes is left to the collector."""


def call_digest(verb: Verb, arguments: bytes) -> str:
    """Return the digest by which a replayed call is compared with the journal."""
    return blake2b(verb.encode() + b"\0" + arguments, digest_size=16).hexdigest()


class Trampoline:
    """One rollout in this process."""

    __slots__ = (
        "_check",
        "_environments",
        "_log",
        "_thread",
        "_tree",
        "current",
        "environments",
        "epoch",
        "evicting",
        "identity",
        "now",
        "outcome",
        "program",
        "start",
        "unawaited",
    )

    def __init__(self, program: Rollout, start: StartRollout) -> None:
        self.start = start
        self.program = program
        self.identity = Identity(
            rollout_id=start.rollout_id,
            group_id=GroupId(start.group_id),
            index=start.index,
            epoch=start.epoch,
            at=start.at,
        )
        """Who the program is now: until its branch point a branch is who it was branched off."""
        self.epoch = start.epoch
        self.now = start.at
        self.evicting = False
        self.outcome: ProgramOutcome | None = None
        self.unawaited: list[Operation[Any]] = []
        """Operations made and not yet awaited."""
        self.environments: list[Environment] = []
        """What it has opened."""
        self.current: Scope | None = None
        self._thread = threading.get_ident()
        self._tree = Tree()
        self._environments = 0
        self._check: TurnCheck | None = None
        self._log = TurnLog()

    # --- what the host calls ---------------------------------------------------------------

    def begin(self) -> Turn:
        """Start the program, or rebuild it from the history; return the turn to report.

        Raises:
            NonDeterministicRollout: the program differs from its history; close this object.
        """
        self._become(0)
        if not self.start.history:
            self._start_root()
            self._run()
            return self._turn()
        number = 0
        for place, turn in enumerate(self.start.history):
            self._become(place)
            if turn.open and turn.result is not None:
                self._check = None
                return self.deliver(turn.result)
            self._check = TurnCheck(turn, number=number)
            number += len(turn.calls)
            if turn.result is None:
                self._start_root()
            else:
                self._put(turn.result)
            self._run()
            withdrawn = self._log.withdrawn(self._tree)
            self._check.complete(withdrawn, self.standing)
            self._log.begin(self._tree)
        self._check = None
        self._become(len(self.start.history))
        return self._turn()

    def deliver(self, result: Deliver | RecordedResult) -> Turn:
        """Put one result in, run until nothing can move, and return what happened."""
        self._put(result)
        self._run()
        return self._turn()

    def close(self) -> None:
        """Throw the rollout's object away, guarded: nothing is issued, nothing is released.

        A program that loops for ever over every exception keeps this from returning; the host's
        watchdog is there for that.
        """
        self.evicting = True
        before = guard.enter(self)
        try:
            for scope in reversed(self._tree.scopes):
                _close_guarded(scope)
            for operation in list(self.unawaited):
                operation.discard()
        finally:
            guard.leave(before)
        self._tree.clear()

    def take_locals(self) -> list[tuple[CallPath, VerbOperation[Any]]]:
        """Return the ``ctx.local`` calls to be run now; each is returned once."""
        taken = list(self._tree.locals_waiting.items())
        self._tree.locals_waiting.clear()
        return taken

    def rekey(self, epoch: str) -> None:
        """Follow ``epoch`` from now on: randomness, and every id made after this."""
        self.epoch = epoch
        for scope in self._tree.scopes:
            if scope.randomness is not None:
                scope.randomness.rekey(epoch)

    def _become(self, turn: int) -> None:
        """Follow the identity that begins with ``turn``, where one does."""
        for became in self.start.became:
            if became.turn == turn:
                self.identity = became.identity
                self.rekey(became.identity.epoch)
                self.now = became.identity.at

    def standing(self) -> str:
        """Return the line where the program waits; its root scope's where several wait."""
        scopes = self._tree.scopes
        return standing(scopes[0].coroutine) if scopes else "its end"

    # --- what the context calls ------------------------------------------------------------

    def scope(self) -> Scope:
        """Return the scope that is running; a verb begins here.

        Raises:
            Evicted: the object is being thrown away.
            VerbMisused: called from outside the running program.
        """
        if self.evicting:
            raise Evicted
        generator = guard.sweeping()
        if generator is not None:
            guard.report_generator(self, generator)
            raise Evicted
        if self.current is None or threading.get_ident() != self._thread:
            raise VerbMisused(
                "a context verb was used outside its running rollout (another thread, another "
                "rollout, or after its end); nothing was issued; use ctx only inside the program"
            )
        return self.current

    def misused(self, message: str) -> VerbMisused:
        """Return the error for a verb used wrongly, and bar a reward."""
        return self._log.misused(message)

    def taint(self, error: StokerError) -> None:
        """Bar a reward until the program says it recovered from errors of this code."""
        self._log.taint(error)

    def recovered(self, code: str) -> None:
        """Vouch for the result in spite of the faults met so far with ``code``."""
        self._log.recover(code)

    def randomness(self) -> RolloutRandom:
        """Return the generator of the running scope."""
        scope = self.scope()
        if scope.randomness is None:
            scope.randomness = RolloutRandom(self.epoch, scope.path)
        return scope.randomness

    def timer(self, path: CallPath) -> Timer | None:
        """Return the armed timer at ``path``."""
        return self._tree.timer(path)

    def disarm(self, timer: Timer) -> None:
        """Let go of a timer; an unfired one is withdrawn."""
        self._tree.disarm(timer)

    # --- stepping --------------------------------------------------------------------------

    def _start_root(self) -> None:
        self._tree.plant(self.program.function(Context(self), self.start.task))

    def _run(self) -> None:
        ready = self._tree.ready
        before = guard.enter(self)
        try:
            while ready:
                self._step(ready.pop(0))
        finally:
            self.current = None
            guard.leave(before)

    def _turn(self) -> Turn:
        turn = self._log.turn(self.start.rollout_id, self.outcome, self._tree)
        self._log.begin(self._tree)
        return turn

    def _step(self, scope: Scope) -> None:
        assert scope.resume is not None, "a ready scope has something to resume with"
        value, error = scope.resume
        scope.resume = None
        scope.waiting = None
        self.current = scope
        try:
            if error is not None:
                yielded = scope.context.run(scope.coroutine.throw, error)
            else:
                yielded = scope.context.run(scope.coroutine.send, value)
        except StopIteration as stop:
            if self._tree.finish(scope, stop.value, None):
                self._end(outcome_of_return(stop.value))
        except BaseException as raised:  # noqa: BLE001 - boundary: a program may raise anything
            if self._tree.finish(scope, None, raised):
                self._end(outcome_of_error(raised, self.program.file))
        else:
            self._suspended(scope, yielded)

    def _suspended(self, scope: Scope, yielded: object) -> None:
        if not isinstance(yielded, Operation) or yielded.trampoline is not self:
            error = guard.describe_yielded(yielded, scope.coroutine)
            self._tree.resume(scope, None, error, at_once=True)
        elif isinstance(yielded, JoinOperation):
            self._tree.fork(scope, yielded)
        else:
            assert isinstance(yielded, VerbOperation)
            try:
                self._issue(scope, yielded)
            except VerbMisused as error:
                yielded.dropped()
                self._tree.resume(scope, None, error, at_once=True)

    def _issue(self, scope: Scope, operation: VerbOperation[Any]) -> None:
        arguments = self._arguments(operation)
        if operation.verb is Verb.ENVIRONMENT:
            self._reserve_environment()
        path = operation.path = scope.take_path()
        digest = call_digest(operation.verb, arguments)
        call = HostCall(path=path, verb=operation.verb, digest=digest, arguments=arguments)
        if self._check is not None:
            self._check.issued(call, scope.coroutine)
        self._log.add(call)
        if operation.verb is Verb.TIMER:
            self._tree.arm(scope, path)
        else:
            self._tree.wait(scope, operation)

    def _arguments(self, operation: VerbOperation[Any]) -> bytes:
        """Return the encoded arguments, checked here so that no peer ever sees a bad record."""
        verb = operation.verb
        try:
            arguments = operation.arguments()
            decode_arguments(verb, arguments)
        except _UNUSABLE as error:
            raise self.misused(f"{verb}: {error}; nothing was issued") from error
        if not self._log.room_for(arguments):
            raise self.misused(
                f"{verb}: the calls made at once hold more than {TURN_BYTES_MAX} bytes; this one "
                "was not issued; give less at once, or put large files in a baseline or a mount"
            )
        return arguments

    def require_boxes(self, count: int) -> None:
        """Refuse what would open more environments than the program declares.

        Raises:
            VerbMisused: there is no room for ``count`` more.
        """
        if self._environments + count > self.program.boxes:
            raise self.misused(
                f"branch: {count} more environments were asked for beside the {self._environments} "
                f"there are, and the program declares boxes={self.program.boxes}; nothing was "
                "done; raise boxes= in @stoker.rollout"
            )

    def require_alone(self, verb: str) -> None:
        """Refuse ``verb`` where other calls of the rollout may be outstanding.

        Raises:
            VerbMisused: it was awaited in a scope of gather or first, or under a timeout.
        """
        if self.scope().path or self._tree.armed:
            raise self.misused(
                f"{verb} was awaited inside ctx.gather, ctx.first or ctx.timeout, where other "
                "calls are outstanding; nothing was done; await it outside of them"
            )

    def _reserve_environment(self) -> None:
        if self._environments >= self.program.boxes:
            raise self.misused(
                f"environment number {self._environments + 1} was asked for, and the program "
                f"declares boxes={self.program.boxes}; none was opened; "
                f"raise boxes= in @stoker.rollout"
            )
        self._environments += 1

    # --- results ---------------------------------------------------------------------------

    def _put(self, result: Deliver | RecordedResult) -> None:
        path = result.path
        timer = self._tree.timer(path)
        if timer is not None:
            self.now = result.at
            self._tree.fire(timer)
            return
        found = self._tree.answered(path)
        if found is None:
            self._stray(path)
            return
        self.now = result.at
        scope, operation = found
        if result.fault is not None:
            if operation.verb is Verb.ENVIRONMENT:
                self._environments -= 1
            operation.dropped()
            self._tree.resume(scope, None, from_record(result.fault))
            return
        try:
            self._tree.resume(scope, operation.decode(path, result.value or _NONE), None)
        except Exception as error:  # noqa: BLE001 - boundary: bytes from outside
            self._tree.resume(scope, None, self._undecodable(path, error))
        except BaseException as ending:  # noqa: BLE001 - Truncated ends the program from its await
            self._tree.resume(scope, None, ending)

    def _undecodable(self, path: CallPath, error: Exception) -> StokerError:
        if isinstance(error, StokerError):
            return error
        wrong = InternalError(
            f"the result of call {path} of {self.start.rollout_id} could not be read ({error}); "
            "it was raised in the program; please report it"
        )
        self.taint(wrong)
        return wrong

    def _stray(self, path: CallPath) -> None:
        if self._check is not None:
            raise unknown_result(path, self.standing())
        if not self._tree.is_withdrawn(path) and self.outcome is None:
            error = InternalError(
                f"a result came for call {path} of {self.start.rollout_id}, which never asked for "
                "it; the rollout was ended; please report it"
            )
            self.outcome = ProgramOutcome(fault=error.record())

    def _end(self, outcome: ProgramOutcome) -> None:
        self.outcome = outcome
        if outcome.reward is None:
            self._name_the_cause(outcome)
            return
        if self.unawaited:
            self.misused(
                f"the verb made at {self.unawaited[0].origin} was never awaited and did nothing; "
                "no reward was taken; write `await` in front of it"
            )
        if self._log.taints:
            fault = next(iter(self._log.taints.values()))
            self.outcome = ProgramOutcome(fault=fault, metrics=outcome.metrics)

    def _name_the_cause(self, outcome: ProgramOutcome) -> None:
        """A library's cleanup may raise something of its own over a foreign awaitable."""
        cause = self._log.taints.get(ForeignAwaitable.code)
        if cause is not None and outcome.fault is not None and outcome.fault.code != cause.code:
            self.outcome = ProgramOutcome(fault=cause, metrics=outcome.metrics)


_NONE = canonical_bytes(None)


def _close_guarded(scope: Scope) -> None:
    for _ in range(_CLOSES_MAX):
        try:
            scope.context.run(scope.coroutine.close)
        except BaseException:  # noqa: BLE001, S112 - whatever cleanup raises, it must end
            continue
        return
