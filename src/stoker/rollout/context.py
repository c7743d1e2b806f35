"""What a rollout program sees of the world: the verbs of its context.

Each verb returns an operation to be awaited once, inside the program; only these are journalled and
count exactly once. Plain side effects of a program happen never, once or several times.
"""

import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from stoker.errors import StokerError
from stoker.model.action import Effect
from stoker.model.events import Verb
from stoker.model.faults import FaultRecord
from stoker.model.generation import GenerateArguments, Generation, Message, Sampling, ToolSpec
from stoker.model.given import argv_of, duration
from stoker.model.ids import CallPath, RolloutId, derive_id
from stoker.model.tools import CallRequest, CallResult, Tests, Verdict
from stoker.model.value import canonical_bytes
from stoker.rollout.arguments import (
    CallArguments,
    EnvironmentArguments,
    LocalArguments,
    OnTimeout,
    TimerArguments,
)
from stoker.rollout.branching import RolloutBranching
from stoker.rollout.chat import Chat, ModelTurn, Prompt, messages_of, tools_of
from stoker.rollout.environment import Environment, files_of, opening
from stoker.rollout.operation import JoinOperation, Operation, VerbOperation, close_all
from stoker.rollout.plain import json_value, on_timeout_of
from stoker.rollout.program import Tool
from stoker.rollout.randomness import RolloutRandom
from stoker.rollout.score import Truncated

if TYPE_CHECKING:
    from stoker.rollout.scope import Timer
    from stoker.rollout.trampoline import Trampoline

T = TypeVar("T")
Child = Operation[T] | Coroutine[Any, Any, T]
"""What runs side by side: a verb or a coroutine of the program."""


class Context:
    """The context of one rollout."""

    __slots__ = ("_trampoline",)

    def __init__(self, trampoline: "Trampoline") -> None:
        self._trampoline = trampoline

    # --- who it is -------------------------------------------------------------------------

    @property
    def rollout_id(self) -> RolloutId:
        """Identity of this rollout."""
        return self._trampoline.identity.rollout_id

    @property
    def group_id(self) -> str:
        """Identity of the group of rollouts of the same task."""
        return self._trampoline.identity.group_id

    @property
    def index(self) -> int:
        """Which rollout of its group this is, from 0."""
        return self._trampoline.identity.index

    # --- the model -------------------------------------------------------------------------

    def chat(
        self, prompt: Prompt = (), *, tools: Sequence[ToolSpec] = (), system: str = ""
    ) -> Chat:
        """Return a new history: ``system`` first, then ``prompt`` (text is a user message)."""
        self._trampoline.scope()
        try:
            before = messages_of([{"role": "system", "content": system}] if system else ())
            return Chat(self._trampoline.misused, (*before, *messages_of(prompt)), tools_of(tools))
        except ValueError as error:
            raise self._trampoline.misused(f"chat: {error}") from error

    def generate(
        self,
        chat: Chat | str,
        *,
        temperature: float = 1.0,
        tokens_max: int = 1024,
        stop: Sequence[str] = (),
    ) -> Operation[ModelTurn]:
        """Sample the model's next turn of ``chat``; its answer is added to the chat.

        Text instead of a chat is a chat of one message. Sampling seeds are derived by the
        coordinator; there is no ``seed``.

        Raises (awaited):
            ModelUnavailable: no replica answered within the retries; the rollout is tainted.

        **Cancellation:** the chat is as it was before the call.
        """
        self._trampoline.scope()
        history = self.chat(chat) if isinstance(chat, str) else chat
        if not isinstance(history, Chat):
            raise self._trampoline.misused(f"generate takes a chat or text, not {chat!r:.100}")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not (isinstance(tokens_max, int) and tokens_max > 0 and 0 <= temperature < math.inf):
            raise self._trampoline.misused(
                f"generate: tokens_max={tokens_max!r} must be at least 1 and "
                f"temperature={temperature!r} finite and at least 0; nothing was issued"
            )
        sampling = Sampling(temperature=float(temperature), tokens_max=tokens_max, stop=stops)

        def arguments() -> bytes:
            parent, suffix = history.begin()
            tools = history.tools if parent is None else ()
            return canonical_bytes(
                GenerateArguments(parent=parent, suffix=suffix, tools=tools, sampling=sampling)
            )

        def decode(path: CallPath, value: bytes) -> ModelTurn:
            return history.answered(path, msgspec.msgpack.decode(value, type=Generation))

        return VerbOperation(self._trampoline, Verb.GENERATE, arguments, decode, history.abandon)

    # --- boxes and tools -------------------------------------------------------------------

    def environment(
        self,
        baseline: str = "python",
        *,
        files: Mapping[str, bytes | str] | None = None,
        worker_class: str | None = None,
    ) -> Operation[Environment]:
        """Open an environment from ``baseline`` with ``files`` in its workspace.

        At most ``boxes`` (of ``@stoker.rollout``) per rollout; released when the rollout ends.
        """
        trampoline = self._trampoline
        trampoline.scope()
        asked = EnvironmentArguments(
            baseline=baseline,
            worker_class=worker_class,
            files=files_of(trampoline, files or {}),
        )
        return opening(trampoline, asked)

    def score(
        self,
        box: Environment,
        tests: Tests,
        *,
        in_branch: bool = True,
        timeout: float | str | None = None,
    ) -> Operation[Verdict]:
        """Grade the files of ``box`` against ``tests``; a program may return the verdict.

        With ``in_branch`` the environment stays untouched.
        """
        return box.score(tests, in_branch=in_branch, timeout=timeout)

    def call(
        self,
        tool: Tool[..., Any] | Sequence[str],
        /,
        *args: Any,  # noqa: ANN401 - the tool's own parameters
        effect: Effect | str | None = None,
        worker_class: str | None = None,
        timeout: float | str | None = None,
        on_timeout: OnTimeout | str | None = None,
        **kwargs: Any,  # noqa: ANN401 - the tool's own parameters
    ) -> Operation[CallResult]:
        """Run a stateless tool on a worker: a ``@stoker.tool`` function, or a list of strings.

        ``on_timeout`` is what a timed-out call becomes: ``"observe"`` (data), ``retry(n)`` or
        ``"truncate"`` (the rollout ends). Arguments are JSON values.

        Raises (awaited):
            Infrastructure: it could not be run, or its effect is ambiguous; the rollout is tainted.
        """
        self._trampoline.scope()
        declared = tool if isinstance(tool, Tool) else None
        try:
            record = CallArguments(
                request=_call_request(tool, args, kwargs),
                effect=Effect(effect or (declared.effect if declared else Effect.PURE)),
                worker_class=worker_class or (declared.worker_class if declared else None),
                timeout_seconds=duration(timeout, "timeout")
                if timeout is not None
                else (declared.timeout_seconds if declared else None),
                on_timeout=on_timeout_of(
                    on_timeout or (declared.on_timeout if declared else "observe")
                ),
            )
            encoded = canonical_bytes(record)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._trampoline.misused(f"call: {error}; nothing was run") from error

        def decode(_path: CallPath, value: bytes) -> CallResult:
            result = msgspec.msgpack.decode(value, type=CallResult)
            timed_out = result.run is not None and result.run.timed_out
            if timed_out and record.on_timeout.kind == "truncate":
                raise Truncated("a tool call timed out")
            return result

        return VerbOperation(self._trampoline, Verb.CALL, lambda: encoded, decode)

    def local(self, function: Callable[..., T], *args: Any) -> Operation[T]:  # noqa: ANN401 - the function's own
        """Run any synchronous function in a thread of the program host; its result is journalled.

        The result comes back as msgpack would bring it (tuples as lists), now and on replay. Run
        again only when the host died before the result was journalled.

        Raises (awaited):
            LocalRaised: the function raised; the message holds its type and text.
        """
        self._trampoline.scope()
        name = getattr(function, "__qualname__", type(function).__qualname__)
        name = f"{getattr(function, '__module__', '')}.{name}"
        record = LocalArguments(function=name, arguments=tuple(_told(value) for value in args))
        operation: VerbOperation[T] = VerbOperation(
            self._trampoline,
            Verb.LOCAL,
            lambda: canonical_bytes(record),
            lambda _path, value: msgspec.msgpack.decode(value),
        )
        operation.local = (function, args)
        return operation

    # --- side by side ----------------------------------------------------------------------

    def gather(self, *children: Child[Any]) -> Operation[list[Any]]:
        """Run verbs and coroutines side by side; return their results in order.

        The first error cancels the others, waits for them to end, and is raised.
        """
        self._admit(children)
        return JoinOperation(self._trampoline, children, first=False)

    def first(self, *children: Child[T]) -> Operation[T]:
        """Run verbs and coroutines side by side; return what the first to end returns, or raises.

        The others are cancelled and waited for: their ``finally`` blocks may await verbs.
        """
        self._admit(children)
        if not children:
            raise self._trampoline.misused("ctx.first() of nothing would wait for ever")
        return JoinOperation(self._trampoline, children, first=True)

    def timeout(self, limit: float | str) -> "Timeout":
        """Return an ``async with`` block that ends with ``TimeoutError`` after ``limit``."""
        self._admit(())
        try:
            return Timeout(self._trampoline, duration(limit, "timeout"))
        except ValueError as error:
            raise self._trampoline.misused(str(error)) from error

    def sleep(self, pause: float | str) -> Operation[None]:
        """Wait, without holding anything but memory."""
        self._trampoline.scope()
        try:
            record = TimerArguments(seconds=duration(pause, "sleep"))
        except ValueError as error:
            raise self._trampoline.misused(str(error)) from error
        return VerbOperation(
            self._trampoline, Verb.SLEEP, lambda: canonical_bytes(record), lambda _p, _v: None
        )

    def branch(self, count: int, *, timeout: float | str | None = None) -> Operation[int]:
        """Let ``count`` rollouts go on from here; return which of them this is, from 0.

        0 is the rollout that asks; 1 to ``count`` - 1 are new ones of its group that share its past
        and have ids, randomness and sampling of their own. Their environments begin with what each
        of its own holds now: a checkpoint each, of which ``timeout`` is the limit. They begin as
        there is room for them, and the group is complete when they have ended too.

        Raises (awaited):
            VerbMisused: inside gather, first or timeout, or past ``run.branches_max``; no branch.
            BranchUnavailable: this kind of box has no checkpoints; the rollout is tainted.
            Infrastructure: an environment is lost, or could not be kept; the rollout is tainted.
            ToolRefused: what one holds cannot be kept whole.
        """
        self._trampoline.scope()
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise self._trampoline.misused(
                f"branch({count!r:.100}): the number of rollouts that go on is at least 1, this "
                "one included; nothing was done"
            )
        return RolloutBranching(self._trampoline, count, timeout)

    # --- recorded time, randomness, ids, faults ----------------------------------------------

    def now(self) -> float:
        """Return the recorded time of the last result, wall seconds; it stands between awaits."""
        self._trampoline.scope()
        return self._trampoline.now

    @property
    def random(self) -> RolloutRandom:
        """Seeded randomness of the running scope; the same on every replay."""
        return self._trampoline.randomness()

    def new_id(self, prefix: str = "id_") -> str:
        """Return an id that no other call of any rollout returns, the same on every replay."""
        path = self._trampoline.scope().take_path()
        return derive_id(prefix, self._trampoline.epoch, path)

    def recovered(self, fault: StokerError | FaultRecord | str) -> None:
        """Vouch for the rollout's result in spite of the faults met so far with this code."""
        self._trampoline.scope()
        if not isinstance(fault, StokerError | FaultRecord | str):
            raise self._trampoline.misused(f"recovered takes a fault or its code, not {fault!r}")
        self._trampoline.recovered(fault if isinstance(fault, str) else fault.code)

    def _admit(self, children: tuple[object, ...]) -> None:
        try:
            self._trampoline.scope()
        except BaseException:
            close_all(children)
            raise


class Timeout:
    """The block of ``ctx.timeout``; ``fired`` says afterwards whether it was cut."""

    __slots__ = ("_seconds", "_timer", "_trampoline")

    def __init__(self, trampoline: "Trampoline", seconds: float) -> None:
        self._trampoline = trampoline
        self._seconds = seconds
        self._timer: Timer | None = None

    @property
    def fired(self) -> bool:
        """Whether the limit was reached."""
        return self._timer is not None and self._timer.fired

    async def __aenter__(self) -> Self:
        record = TimerArguments(seconds=self._seconds)
        path: CallPath = await VerbOperation[Any](
            self._trampoline, Verb.TIMER, lambda: canonical_bytes(record), lambda _p, _v: None
        )
        self._timer = self._trampoline.timer(path)
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        raised: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._trampoline.evicting or self._timer is None:
            return
        self._trampoline.disarm(self._timer)
        if raised is self._timer.error:
            raise TimeoutError(f"the limit of {self._seconds:g} s was reached") from raised


def _call_request(tool: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRequest:
    if isinstance(tool, Tool):
        bound = tool.bind(args, kwargs)
        arguments = {name: json_value(value, f"argument {name!r}") for name, value in bound.items()}
        return CallRequest(module=tool.module, function=tool.name, arguments=arguments)
    if callable(tool):
        raise ValueError(  # noqa: TRY004 - one kind of refusal
            f"{getattr(tool, '__name__', tool)!r} is not decorated with @stoker.tool; "
            "decorate it, or use ctx.local for a function that needs no worker"
        )
    if args or kwargs:
        raise ValueError("a program takes no arguments beside its list of strings")
    if not isinstance(tool, list | tuple):
        raise ValueError(f"{tool!r:.100} is neither a @stoker.tool nor a list of strings")  # noqa: TRY004 - one kind of refusal
    return CallRequest(argv=argv_of(tool))


def _told(value: object) -> object:
    """Return what the journal holds of an argument of ``ctx.local``; objects by their type."""
    try:
        canonical_bytes(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return {"object": f"{type(value).__module__}.{type(value).__qualname__}"}
    return value


__all__ = ["Chat", "Child", "Context", "Environment", "Message", "ModelTurn", "Timeout"]
