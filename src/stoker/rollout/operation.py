"""Operations: what a context verb returns, to be awaited once.

An operation takes its number when it is *awaited*, encodes its arguments then, and decodes its
result from the same bytes whether that result is live or replayed.
"""

from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stoker.errors import Evicted
from stoker.model.events import Verb
from stoker.model.ids import CallPath
from stoker.rollout.position import caller

if TYPE_CHECKING:
    from stoker.rollout.trampoline import Trampoline

T = TypeVar("T")


def _nothing() -> None:
    """Do nothing."""


class Operation(Generic[T]):
    """One awaitable verb of one rollout."""

    __slots__ = ("_awaited", "origin", "trampoline")

    def __init__(self, trampoline: "Trampoline") -> None:
        self.trampoline = trampoline
        self.origin = caller()
        self._awaited = False
        trampoline.unawaited.append(self)

    def __await__(self) -> Generator["Operation[Any]", Any, T]:
        """Hand the operation to the trampoline and return its result."""
        self._begin()
        result: T = yield self
        return result

    def _begin(self) -> None:
        """Count as awaited, which happens once."""
        if self.trampoline.evicting:
            raise Evicted
        if self._awaited:
            raise self.trampoline.misused(
                f"the verb made at {self.origin} was awaited twice; it ran once; "
                "keep its result in a variable"
            )
        self._awaited = True
        self.adopt()

    if not TYPE_CHECKING:  # else a type checker would believe in any name

        def __getattr__(self, name: str) -> object:
            """Say what was forgotten: results have attributes, a verb is awaited first."""
            if name == "origin" or name.startswith("__"):
                raise AttributeError(name)
            raise AttributeError(
                f"no {name!r} before the verb made at {self.origin} is awaited; write await"
            )

    def adopt(self) -> None:
        """Count as used: something will await it."""
        if self in self.trampoline.unawaited:
            self.trampoline.unawaited.remove(self)

    def discard(self) -> None:
        """Let go of it without awaiting it."""
        self.adopt()


class VerbOperation(Operation[T]):
    """A verb that leaves the rollout and comes back with a result."""

    __slots__ = ("arguments", "decode", "dropped", "local", "path", "verb")

    def __init__(
        self,
        trampoline: "Trampoline",
        verb: Verb,
        arguments: Callable[[], bytes],
        decode: Callable[[CallPath, bytes], T],
        dropped: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__(trampoline)
        self.verb = verb
        self.arguments = arguments
        """Encodes the arguments at issue; later mutation is harmless. May raise VerbMisused."""
        self.decode = decode
        """Turns the result's bytes into what the program sees; may raise into the program."""
        self.dropped = dropped
        """Called when no result will come to it: withdrawn, or a fault."""
        self.local: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        """What ``ctx.local`` runs."""
        self.path = CallPath("")


class JoinOperation(Operation[T]):
    """``gather`` or ``first``: child scopes that end before it does."""

    __slots__ = ("children", "first")

    def __init__(
        self, trampoline: "Trampoline", children: tuple[object, ...], *, first: bool
    ) -> None:
        self.first = first
        self.children = [_as_coroutine(trampoline, child) for child in children]
        if len({id(child) for child in children}) != len(children):
            self._close_children()
            raise trampoline.misused("the same coroutine was given twice to gather or first")
        super().__init__(trampoline)

    def discard(self) -> None:
        """Let go of it, and of the children that will never run."""
        super().discard()
        self._close_children()

    def _close_children(self) -> None:
        for child in self.children:
            child.close()


def close_all(children: tuple[object, ...]) -> None:
    """Close coroutines that will never run, so that Python does not report each of them."""
    for child in children:
        if isinstance(child, Operation):
            child.discard()
        elif isinstance(child, Coroutine):
            child.close()


def _as_coroutine(trampoline: "Trampoline", child: object) -> Coroutine[Any, Any, Any]:
    if isinstance(child, Operation):
        child.adopt()
        return _awaiting(child)
    if isinstance(child, Coroutine):
        return child
    raise trampoline.misused(
        f"gather and first take verbs and coroutines, not {type(child).__qualname__}; "
        "call the async function: ctx.gather(work(a), work(b))"
    )


async def _awaiting(operation: Operation[T]) -> T:
    return await operation
