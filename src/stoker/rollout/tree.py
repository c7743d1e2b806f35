"""The tree of scopes: who is ready, who waits for what, and how cancellation runs through it.

Invariants: ready scopes run first in, first out; a join ends after all of its children; a scope is
told to end once, so that its cleanup may await verbs; what nobody waits for is withdrawn.

Plain lists where a deque or dictionary would be faster: they hold one element for most rollouts,
and a hundred thousand rollouts wait at once.
"""

import contextvars
from collections.abc import Coroutine
from typing import Any

from stoker.errors import Cancelled
from stoker.model.events import Verb
from stoker.model.ids import CallPath
from stoker.rollout.operation import JoinOperation, VerbOperation
from stoker.rollout.scope import CANCELLED_RANK, Join, Scope, Timer


class Tree:
    """The scopes of one rollout."""

    __slots__ = ("_retired", "_timers", "locals_waiting", "outstanding", "ready", "scopes")

    def __init__(self) -> None:
        self.ready: list[Scope] = []
        self.scopes: list[Scope] = []
        """Live scopes in order of creation: a child is always younger than its parent."""
        self.outstanding: dict[CallPath, tuple[Scope, VerbOperation[Any]]] = {}
        self.locals_waiting: dict[CallPath, VerbOperation[Any]] = {}
        """``ctx.local`` calls without a result that the host has not taken yet."""
        self._timers: list[Timer] = []
        self._retired: list[CallPath] = []
        """Withdrawn calls, in order; their late results change nothing."""

    @property
    def withdrawn_count(self) -> int:
        """Calls withdrawn so far."""
        return len(self._retired)

    def withdrawn_since(self, count: int) -> tuple[CallPath, ...]:
        """Return the calls withdrawn after the first ``count``."""
        return tuple(self._retired[count:])

    def is_withdrawn(self, path: CallPath) -> bool:
        """Whether ``path`` was withdrawn, and not since answered."""
        return path in self._retired

    def plant(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Make the root scope, with context variables of its own."""
        assert not self.scopes, "a rollout is started once"
        root = Scope("", coroutine, contextvars.Context())
        self.scopes.append(root)
        self.resume(root, None, None)

    def resume(
        self, scope: Scope, value: object, error: BaseException | None, *, at_once: bool = False
    ) -> None:
        """Make ``scope`` ready; where it is ready already, the newer reason wins."""
        ready = scope.resume is not None
        scope.resume = (value, error)
        if not ready:
            self.ready.insert(0 if at_once else len(self.ready), scope)

    # --- calls and timers ------------------------------------------------------------------

    def wait(self, scope: Scope, operation: VerbOperation[Any]) -> None:
        """Let ``scope`` wait for the result of ``operation``, which has its path."""
        if operation.verb is Verb.LOCAL:
            self.locals_waiting[operation.path] = operation
        scope.waiting = operation
        self.outstanding[operation.path] = (scope, operation)

    def answered(self, path: CallPath) -> tuple[Scope, VerbOperation[Any]] | None:
        """Take the call at ``path`` off the outstanding ones; ``None`` when it is none of them."""
        found = self.outstanding.pop(path, None)
        if found is not None:
            found[0].waiting = None
            self.locals_waiting.pop(path, None)
        return found

    def arm(self, scope: Scope, path: CallPath) -> None:
        """Arm a timer; it fires into whatever ``scope`` awaits then."""
        self._timers.append(Timer(path, scope))
        self.resume(scope, path, None, at_once=True)

    @property
    def armed(self) -> bool:
        """Whether a timer is armed."""
        return bool(self._timers)

    def timer(self, path: CallPath) -> Timer | None:
        """Return the armed timer at ``path``."""
        return next((timer for timer in self._timers if timer.path == path), None)

    def fire(self, timer: Timer) -> None:
        """Throw the timer's error into its scope."""
        self._timers.remove(timer)
        timer.fired = True
        self._interrupt(timer.scope, timer.error, timer.rank)

    def disarm(self, timer: Timer) -> None:
        """Let go of a timer; an unfired one is withdrawn."""
        if timer in self._timers:
            self._timers.remove(timer)
            self._retired.append(timer.path)

    # --- joins -----------------------------------------------------------------------------

    def fork(self, scope: Scope, operation: JoinOperation[Any]) -> None:
        """Start the children of a ``gather`` or ``first`` and let ``scope`` wait for them."""
        path = scope.take_path()
        join = Join(first=operation.first)
        join.remaining = len(operation.children)
        join.results = [None] * join.remaining
        scope.waiting = join
        for index, coroutine in enumerate(operation.children):
            context = scope.context.copy()
            child = Scope(f"{path}.{index}", coroutine, context, (join, scope), index)
            join.children.append(child)
            self.scopes.append(child)
            self.resume(child, None, None)
        if not join.children:
            self.resume(scope, [], None, at_once=True)

    def finish(self, scope: Scope, value: object, error: BaseException | None) -> bool:
        """Note that ``scope`` ended; return whether it was the root."""
        scope.done = True
        self.scopes.remove(scope)
        for timer in [timer for timer in self._timers if timer.scope is scope]:
            self.disarm(timer)
        if scope.join is None:
            return True
        join, parent = scope.join
        join.remaining -= 1
        if not join.settled and (error is not None or join.first):
            join.settled = True
            join.error = error
            join.results = [value]
            self._cancel_children(join)
        elif not join.settled:
            join.results[scope.index] = value
        if join.remaining == 0:
            self._joined(parent, join)
        return False

    def _joined(self, parent: Scope, join: Join) -> None:
        error = join.override or join.error
        results = join.results[0] if join.first and error is None else join.results
        parent.waiting = None
        self.resume(parent, results, error)

    def _cancel_children(self, join: Join) -> None:
        for child in join.children:
            if not child.done and not child.cancelled:
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
            self.answered(waiting.path)
            self._retired.append(waiting.path)
            waiting.dropped()
        self.resume(scope, None, error)

    # --- the end ---------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything; the coroutines have been closed."""
        self.ready.clear()
        self.scopes.clear()
        self.outstanding.clear()
        self.locals_waiting.clear()
        self._timers.clear()
