"""Environments: a box that keeps its files between actions.

Its actions form one serial queue at the worker that holds it. The coordinator releases it when the
rollout ends; a program never needs to.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from stoker.model.checkpoint import Checkpoint
from stoker.model.events import Verb
from stoker.model.given import argv_of, contents_of, duration
from stoker.model.ids import CallPath
from stoker.model.tools import (
    CheckpointRequest,
    ExportRequest,
    ExportResult,
    OpenResult,
    ReadRequest,
    ReadResult,
    RunRequest,
    RunResult,
    ScoreRequest,
    Tests,
    Verdict,
    WriteRequest,
)
from stoker.model.value import canonical_bytes
from stoker.rollout.arguments import BoxArguments, BranchedOff, EnvironmentArguments
from stoker.rollout.operation import JoinOperation, Operation, VerbOperation

if TYPE_CHECKING:
    from stoker.rollout.trampoline import Trampoline

T = TypeVar("T")
_FILE_BYTES_MAX = 16 * 1024 * 1024
_EXPORT_BYTES_MAX = 64 * 1024 * 1024


class Environment:
    """One open environment."""

    __slots__ = ("_asked", "_trampoline", "opened", "path")

    def __init__(
        self,
        trampoline: "Trampoline",
        path: CallPath,
        asked: EnvironmentArguments,
        opened: OpenResult,
    ) -> None:
        self._trampoline = trampoline
        self._asked = asked
        """Without its files."""
        self.path = path
        """Path of the call that opened it."""
        self.opened = opened
        """Which isolation and baseline it got."""
        trampoline.environments.append(self)

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float | str | None = None,
        stdin: bytes | str = b"",
        environment: Mapping[str, str] | None = None,
        directory: str = ".",
        replayable: bool = True,
    ) -> Operation[RunResult]:
        """Run a program in the box; nonzero, killed, over a limit and timed out are data.

        ``replayable=False`` says it must not be run again to rebuild a lost environment.
        """
        self._trampoline.scope()
        try:
            request = RunRequest(
                argv=argv_of(argv),
                stdin=stdin.encode() if isinstance(stdin, str) else bytes(stdin),
                environment=dict(environment or {}),
                directory=directory,
            )
        except (TypeError, ValueError) as error:
            raise self._trampoline.misused(f"run: {error}; nothing was run") from error
        return self._action(Verb.RUN, request, RunResult, timeout, replayable=replayable)

    def write_files(self, files: Mapping[str, bytes | str]) -> Operation[None]:
        """Put files in the workspace; text is written as UTF-8.

        Raises (awaited):
            ToolRefused: a path leaves the workspace or meets a link, or the disk limit is reached.
        """
        self._trampoline.scope()
        return self._action(
            Verb.WRITE, WriteRequest(files=files_of(self._trampoline, files)), None, None
        )

    def read_file(self, path: str, *, bytes_max: int = _FILE_BYTES_MAX) -> Operation[ReadResult]:
        """Read one regular file of the workspace; a refusal is data."""
        self._trampoline.scope()
        return self._action(
            Verb.READ, ReadRequest(path=path, bytes_max=bytes_max), ReadResult, None
        )

    def export(self, *paths: str, bytes_max: int = _EXPORT_BYTES_MAX) -> Operation[ExportResult]:
        """Copy regular files out of the workspace: all of it when no path is named."""
        self._trampoline.scope()
        return self._action(
            Verb.EXPORT,
            ExportRequest(paths=paths or (".",), bytes_max=bytes_max),
            ExportResult,
            None,
        )

    def score(
        self, tests: Tests, *, in_branch: bool = True, timeout: float | str | None = None
    ) -> Operation[Verdict]:
        """Grade the environment's files against ``tests``."""
        self._trampoline.scope()
        if not isinstance(tests, Tests):
            raise self._trampoline.misused(f"score takes stoker.Tests, not {tests!r:.100}")
        return self._action(
            Verb.SCORE, ScoreRequest(tests=tests, in_branch=in_branch), Verdict, timeout
        )

    def checkpoint(self, *, timeout: float | str | None = None) -> Operation[Checkpoint]:
        """Keep what the environment holds, by its content, in the run's artifact store.

        An environment that is lost later begins there again, on any worker, and runs only what
        came after; so what is not replayable before it no longer matters.

        Raises (awaited):
            BranchUnavailable: this kind of box has no checkpoints; the rollout is tainted.
            ToolRefused: what it holds cannot be kept whole; it goes on as it was.
        """
        self._trampoline.scope()
        return self._action(Verb.CHECKPOINT, CheckpointRequest(), Checkpoint, timeout)

    def branch(
        self, count: int, *, timeout: float | str | None = None
    ) -> Operation[tuple["Environment", ...]]:
        """Open ``count`` environments that begin with what this one holds, each then on its own.

        A checkpoint, of which each of them is made: on any worker, and made again from there when
        one is lost. All are opened, or an error is raised. Each counts as one of the program's
        ``boxes``. ``timeout`` is the checkpoint's.

        Raises (awaited):
            BranchUnavailable: this kind of box has no checkpoints; the rollout is tainted.
            ToolRefused: what it holds cannot be kept whole; it goes on as it was.
        """
        self._trampoline.scope()
        if not isinstance(count, int) or count < 1:
            raise self._trampoline.misused(
                f"branch({count!r:.100}): the number of branches is at least 1; nothing was done"
            )
        return _Branching(self._trampoline, self, count, timeout)

    def _open_from(self, saved: Checkpoint) -> Operation["Environment"]:
        asked = msgspec.structs.replace(
            self._asked, begins=BranchedOff(environment=self.path, checkpoint=saved)
        )
        return opening(self._trampoline, asked)

    def __repr__(self) -> str:
        return f"Environment({self.path}, {self.opened.isolation})"

    def _action(
        self,
        verb: Verb,
        request: msgspec.Struct,
        result: type[T] | None,
        timeout: float | str | None,
        *,
        replayable: bool = True,
    ) -> Operation[Any]:
        try:
            timeout_seconds = None if timeout is None else duration(timeout, "timeout")
        except ValueError as error:
            raise self._trampoline.misused(f"{verb}: {error}; nothing was run") from error
        arguments = BoxArguments(
            environment=self.path,
            request=canonical_bytes(request),
            timeout_seconds=timeout_seconds,
            replayable=replayable,
        )
        kind: Any = result
        return VerbOperation[Any](
            self._trampoline,
            verb,
            lambda: canonical_bytes(arguments),
            lambda _path, value: msgspec.msgpack.decode(value, type=kind),
        )


class _Branching(Operation[tuple[Environment, ...]]):
    """A checkpoint, then openings side by side, in the scope that awaits it."""

    __slots__ = ("_count", "_environment", "_timeout")

    def __init__(
        self,
        trampoline: "Trampoline",
        environment: Environment,
        count: int,
        timeout: float | str | None,
    ) -> None:
        super().__init__(trampoline)
        self._environment = environment
        self._count = count
        self._timeout = timeout

    def __await__(self) -> Generator[Operation[Any], Any, tuple[Environment, ...]]:
        self._begin()
        self.trampoline.require_boxes(self._count)
        saved = yield from self._environment.checkpoint(timeout=self._timeout).__await__()
        opens = tuple(self._environment._open_from(saved) for _ in range(self._count))  # noqa: SLF001 - its own class
        opened: list[Environment]
        opened = yield from JoinOperation(self.trampoline, opens, first=False).__await__()
        return tuple(opened)


def opening(trampoline: "Trampoline", asked: EnvironmentArguments) -> Operation[Environment]:
    """Return the verb that opens what was ``asked`` for."""
    kept = msgspec.structs.replace(asked, files={})  # they may be large, and it is kept for long
    return VerbOperation(
        trampoline,
        Verb.ENVIRONMENT,
        lambda: canonical_bytes(asked),
        lambda path, value: Environment(
            trampoline, path, kept, msgspec.msgpack.decode(value, type=OpenResult)
        ),
    )


def files_of(trampoline: "Trampoline", files: Mapping[str, bytes | str]) -> dict[str, bytes]:
    """Return ``files`` with text as UTF-8."""
    try:
        return contents_of(files)
    except ValueError as error:
        raise trampoline.misused(f"{error}; nothing was written") from error
