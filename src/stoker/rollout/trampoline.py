"""The trampoline: drives one rollout program over a tree of scopes, and replays it.

Invariants:

- one result is put in, then the program runs until nothing is ready; then the turn is told;
- ready scopes run first in, first out; paths are taken when a verb is awaited;
- a scope has its own context variables; a join ends after all of its children;
- replayed calls are compared with the journal outside the program, which cannot swallow it;
- a coroutine thrown away is closed *guarded*: its verbs raise ``Evicted`` and issue nothing.

Nothing here does input or output. Measured rules and traps: ``docs/design/0004-replay.md``.
"""

import contextvars
import threading
from collections import deque
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from stoker.errors import Cancelled, Evicted, InternalError, StokerError, VerbMisused, from_record
from stoker.model.events import Verb
from stoker.model.ids import CallPath
from stoker.model.value import canonical_bytes
from stoker.rollout import guard
from stoker.rollout.arguments import decode_arguments
from stoker.rollout.context import Context
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
from stoker.rollout.scope import CANCELLED_RANK, Join, Scope, Timer
from stoker.rollout.score import outcome_of_error, outcome_of_return
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

    def __init__(self, program: Rollout, start: StartRollout) -> None:
        self.start = start
        self.program = program
        self.epoch = start.epoch
        self.now = start.at
        self.evicting = False
        self.outcome: ProgramOutcome | None = None
        self.unawaited: dict[int, Operation[Any]] = {}
        """Operations made and not yet awaited."""
        self.locals_waiting: dict[CallPath, VerbOperation[Any]] = {}
        """``ctx.local`` calls without a result that the host has not taken yet."""
        self.current: Scope | None = None
        self._thread = threading.get_ident()
        self._ready: deque[Scope] = deque()
        self._scopes: dict[int, Scope] = {}
        """Live scopes in order of creation: a child is always younger than its parent."""
        self._outstanding: dict[CallPath, tuple[Scope, VerbOperation[Any]]] = {}
        self._timers: dict[CallPath, Timer] = {}
        self._retired: set[CallPath] = set()
        """Withdrawn calls, whose late results change nothing."""
        self._environments = 0
        self._check: TurnCheck | None = None
        self._log = TurnLog()

    # --- what the host calls ---------------------------------------------------------------

    def begin(self) -> Turn:
        """Start the program, or rebuild it from the history; return the turn to report.

        Raises:
            NonDeterministicRollout: the program differs from its history; close this object.
        """
        if not self.start.history:
            self._start_root()
            return self._run()
        number = 0
        for turn in self.start.history:
            self._check = TurnCheck(turn, number=number)
            number += len(turn.calls)
            if turn.result is None:
                self._start_root()
            else:
                self._put(turn.result)
            self._run()
            self._check.complete(self._log.withdrawn, self.standing())
        self._check = None
        self._log.begin()
        return self._log.turn(self.start.rollout_id, self.outcome)

    def deliver(self, result: Deliver | RecordedResult) -> Turn:
        """Put one result in, run until nothing can move, and return what happened."""
        self._put(result)
        return self._run()

    def close(self) -> None:
        """Throw the rollout's object away, guarded: nothing is issued, nothing is released.

        A program that loops for ever over every exception keeps this from returning; the host's
        watchdog is there for that.
        """
        self.evicting = True
        before = guard.enter(self)
        try:
            for scope in reversed(list(self._scopes.values())):
                _close_guarded(scope)
            for operation in list(self.unawaited.values()):
                operation.discard()
        finally:
            guard.leave(before)
        self._scopes.clear()
        self._outstanding.clear()
        self._timers.clear()
        self.locals_waiting.clear()

    def take_locals(self) -> list[tuple[CallPath, VerbOperation[Any]]]:
        """Return the ``ctx.local`` calls to be run now; each is returned once."""
        taken = list(self.locals_waiting.items())
        self.locals_waiting.clear()
        return taken

    def rekey(self, epoch: str) -> None:
        """Follow ``epoch`` from now on: randomness, and every id made after this."""
        self.epoch = epoch
        for scope in self._scopes.values():
            if scope.randomness is not None:
                scope.randomness.rekey(epoch)

    def standing(self) -> str:
        """Return the line where the program waits; its root scope's where several wait."""
        root = next(iter(self._scopes.values()), None)
        return standing(root.coroutine) if root is not None else "its end"

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

    def timer(self, path: CallPath) -> Timer:
        """Return the armed timer at ``path``."""
        return self._timers[path]

    def disarm(self, timer: Timer) -> None:
        """Let go of a timer; an unfired one is withdrawn."""
        if self._timers.pop(timer.path, None) is not None:
            self._withdraw(timer.path)

    # --- stepping --------------------------------------------------------------------------

    def _start_root(self) -> None:
        assert not self._scopes, "a rollout is started once"
        coroutine = self.program.function(Context(self), self.start.task)
        root = Scope("", coroutine, contextvars.Context())
        self._scopes[id(root)] = root
        self._resume(root, None, None)

    def _run(self) -> Turn:
        before = guard.enter(self)
        try:
            while self._ready:
                self._step(self._ready.popleft())
        finally:
            self.current = None
            guard.leave(before)
        return self._log.turn(self.start.rollout_id, self.outcome)

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
            self._finish(scope, stop.value, None)
        except BaseException as raised:  # noqa: BLE001 - boundary: a program may raise anything
            self._finish(scope, None, raised)
        else:
            self._suspended(scope, yielded)

    def _suspended(self, scope: Scope, yielded: object) -> None:
        if not isinstance(yielded, Operation) or yielded.trampoline is not self:
            error = guard.describe_yielded(yielded, standing(scope.coroutine))
            self._resume(scope, None, error, at_once=True)
        elif isinstance(yielded, JoinOperation):
            self._fork(scope, yielded)
        else:
            assert isinstance(yielded, VerbOperation)
            try:
                self._issue(scope, yielded)
            except VerbMisused as error:
                yielded.dropped()
                self._resume(scope, None, error, at_once=True)

    def _issue(self, scope: Scope, operation: VerbOperation[Any]) -> None:
        arguments = self._arguments(operation)
        if operation.verb is Verb.ENVIRONMENT:
            self._reserve_environment()
        path = operation.path = scope.take_path()
        digest = call_digest(operation.verb, arguments)
        call = HostCall(path=path, verb=operation.verb, digest=digest, arguments=arguments)
        if self._check is not None:
            self._check.issued(call, standing(scope.coroutine))
        self._log.add(call)
        if operation.verb is Verb.TIMER:
            self._timers[path] = Timer(path, scope)
            self._resume(scope, path, None, at_once=True)
            return
        if operation.verb is Verb.LOCAL:
            self.locals_waiting[path] = operation
        scope.waiting = operation
        self._outstanding[path] = (scope, operation)

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

    def _reserve_environment(self) -> None:
        if self._environments >= self.program.boxes:
            raise self.misused(
                f"environment number {self._environments + 1} was asked for, and the program "
                f"declares boxes={self.program.boxes}; none was opened; "
                f"raise boxes= in @stoker.rollout"
            )
        self._environments += 1

    def _resume(
        self, scope: Scope, value: object, error: BaseException | None, *, at_once: bool = False
    ) -> None:
        if scope.resume is not None:  # it is ready already: the newer reason wins
            scope.resume = (value, error)
            return
        scope.resume = (value, error)
        if at_once:
            self._ready.appendleft(scope)
        else:
            self._ready.append(scope)

    # --- results ---------------------------------------------------------------------------

    def _put(self, result: Deliver | RecordedResult) -> None:
        self._log.begin()
        path = result.path
        if path in self._timers:
            self.now = result.at
            self._fire(self._timers.pop(path))
            return
        if path not in self._outstanding:
            self._stray(path)
            return
        self.now = result.at
        scope, operation = self._outstanding.pop(path)
        scope.waiting = None
        self.locals_waiting.pop(path, None)
        if result.fault is not None:
            if operation.verb is Verb.ENVIRONMENT:
                self._environments -= 1
            operation.dropped()
            self._resume(scope, None, from_record(result.fault))
            return
        try:
            self._resume(scope, operation.decode(path, result.value or _NONE), None)
        except Exception as error:  # noqa: BLE001 - boundary: bytes from outside
            self._resume(scope, None, self._undecodable(path, error))
        except BaseException as ending:  # noqa: BLE001 - Truncated ends the program from its await
            self._resume(scope, None, ending)

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
        if path not in self._retired and self.outcome is None:
            error = InternalError(
                f"a result came for call {path} of {self.start.rollout_id}, which never asked for "
                "it; the rollout was ended; please report it"
            )
            self.outcome = ProgramOutcome(fault=error.record())

    def _fire(self, timer: Timer) -> None:
        timer.fired = True
        self._interrupt(timer.scope, timer.error, timer.rank)

    # --- the tree --------------------------------------------------------------------------

    def _fork(self, scope: Scope, operation: JoinOperation[Any]) -> None:
        path = scope.take_path()
        join = Join(first=operation.first)
        join.remaining = len(operation.children)
        join.results = [None] * join.remaining
        scope.waiting = join
        for index, coroutine in enumerate(operation.children):
            context = scope.context.copy()
            child = Scope(f"{path}.{index}", coroutine, context, (join, scope), index)
            join.children.append(child)
            self._scopes[id(child)] = child
            self._resume(child, None, None)
        if not join.children:
            self._resume(scope, [], None, at_once=True)

    def _finish(self, scope: Scope, value: object, error: BaseException | None) -> None:
        del self._scopes[id(scope)]
        for timer in [timer for timer in self._timers.values() if timer.scope is scope]:
            self.disarm(timer)
        if scope.join is None:
            self._end(value, error)
            return
        join, parent = scope.join
        join.remaining -= 1
        if not join.settled:
            if error is not None or join.first:
                join.settled = True
                join.error = error
                join.results = [value]
                self._cancel_children(join)
            else:
                join.results[scope.index] = value
        if join.remaining == 0:
            self._joined(parent, join)

    def _joined(self, parent: Scope, join: Join) -> None:
        error = join.override or join.error
        results = join.results[0] if join.first and error is None else join.results
        parent.waiting = None
        self._resume(parent, results, error)

    def _cancel_children(self, join: Join) -> None:
        for child in join.children:
            if id(child) in self._scopes and not child.cancelled:
                child.cancelled = True
                self._interrupt(child, Cancelled(), CANCELLED_RANK)

    def _interrupt(self, scope: Scope, error: BaseException, rank: int) -> None:
        """Throw ``error`` into whatever ``scope`` awaits; the lowest ``rank`` outlives a join."""
        waiting = scope.waiting
        if isinstance(waiting, Join):
            if rank < waiting.override_rank:
                waiting.override, waiting.override_rank = error, rank
            waiting.settled = True
            self._cancel_children(waiting)
            return
        if waiting is not None:
            del self._outstanding[waiting.path]
            self.locals_waiting.pop(waiting.path, None)
            self._withdraw(waiting.path)
            waiting.dropped()
            scope.waiting = None
        self._resume(scope, None, error)

    def _withdraw(self, path: CallPath) -> None:
        self._retired.add(path)
        self._log.withdrawn.append(path)

    def _end(self, value: object, error: BaseException | None) -> None:
        if error is not None:
            self.outcome = outcome_of_error(error, self.program.file)
        else:
            self.outcome = outcome_of_return(value)
        if self.outcome.reward is None:
            return
        forgotten = next(iter(self.unawaited.values()), None)
        if forgotten is not None:
            self.misused(
                f"the verb made at {forgotten.origin} was never awaited, so it did nothing; "
                "no reward was taken; write `await` in front of it"
            )
        if self._log.taints:
            fault = next(iter(self._log.taints.values()))
            self.outcome = ProgramOutcome(fault=fault, metrics=self.outcome.metrics)


_NONE = canonical_bytes(None)


def _close_guarded(scope: Scope) -> None:
    for _ in range(_CLOSES_MAX):
        try:
            scope.context.run(scope.coroutine.close)
        except BaseException:  # noqa: BLE001, S112 - whatever cleanup raises, it must end
            continue
        return
