"""Scopes, joins and timers: the tree a running program forms.

A scope is one coroutine with its own context variables and its own numbers. A join is a scope's
wait for its children. Nothing here decides; ``trampoline`` does.
"""

import contextvars
import sys
from collections.abc import Coroutine
from typing import Any

from stoker.errors import Cancelled
from stoker.model.ids import CallPath
from stoker.rollout.operation import VerbOperation
from stoker.rollout.randomness import RolloutRandom

CANCELLED_RANK = -1
"""A cancelled scope stays cancelled whatever else it waits for; outer timers beat inner ones."""
_NO_RANK = sys.maxsize


class Join:
    """A scope waiting for all of its children."""

    __slots__ = (
        "children",
        "error",
        "first",
        "override",
        "override_rank",
        "remaining",
        "results",
        "settled",
    )

    def __init__(self, *, first: bool) -> None:
        self.first = first
        self.children: list[Scope] = []
        self.results: list[Any] = []
        """Values by index; for ``first`` the winner's alone."""
        self.remaining = 0
        self.settled = False
        """The siblings have been cancelled: the result is decided."""
        self.error: BaseException | None = None
        """First error of a child."""
        self.override: BaseException | None = None
        """Thrown into the parent instead of any result: it was cancelled or timed out itself."""
        self.override_rank = _NO_RANK


class Scope:
    """One coroutine of a rollout."""

    __slots__ = (
        "cancelled",
        "context",
        "coroutine",
        "count",
        "done",
        "index",
        "join",
        "path",
        "randomness",
        "resume",
        "waiting",
    )

    def __init__(
        self,
        path: str,
        coroutine: Coroutine[Any, Any, Any],
        context: contextvars.Context,
        join: tuple[Join, "Scope"] | None = None,
        index: int = 0,
    ) -> None:
        self.path = path
        self.coroutine = coroutine
        self.context = context
        self.join = join
        """The join it belongs to and the scope that waits there; ``None`` for the root."""
        self.index = index
        """Its place in that join."""
        self.count = 0
        """Numbers taken so far."""
        self.waiting: VerbOperation[Any] | Join | None = None
        self.resume: tuple[Any, BaseException | None] | None = None
        """What it is resumed with, while it is ready."""
        self.done = False
        self.cancelled = False
        """It was told to end; told once, so that its cleanup may await verbs."""
        self.randomness: RolloutRandom | None = None

    def take_path(self) -> CallPath:
        """Return the next path of this scope."""
        number = self.count
        self.count += 1
        return CallPath(f"{self.path}.{number}" if self.path else str(number))


class Timer:
    """An armed ``ctx.timeout``."""

    __slots__ = ("error", "fired", "path", "rank", "scope")

    def __init__(self, path: CallPath, scope: Scope) -> None:
        self.path = path
        self.scope = scope
        self.rank = scope.count
        """An outer timer of a scope took an earlier number."""
        self.error = Cancelled()
        """The very object thrown when it fires; compared by identity, which keeps nesting right."""
        self.fired = False
