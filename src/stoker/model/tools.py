"""Requests and results of the tools a worker carries out: one record pair per ``Action.tool``.

The input of an action is the canonical msgpack of its request record; its observation is the
msgpack of the result record. All output is bytes; text is a *view* of it.
"""

from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from stoker.model.checkpoint import Checkpoint
from stoker.model.execution import Baseline, ExecutionPolicy


class LimitKind(StrEnum):
    """Which limit stopped an action."""

    CPU = "cpu"
    MEMORY = "memory"
    PROCESSES = "pids"
    DISK = "disk"
    OUTPUT = "output"


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``environment.open``: make a box from a baseline and put files in it."""

    baseline: Baseline
    policy: ExecutionPolicy
    files: dict[str, bytes] = {}
    """Workspace-relative path → content."""
    checkpoint: Checkpoint | msgspec.UnsetType = msgspec.UNSET
    """The state it begins in, by its digest in the artifact store; unset: the baseline's."""


class OpenResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was made."""

    isolation: str
    rung: str
    baseline_digest: str


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``box.run``: run a program in the environment's box."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    """Given to the program, then end of file; a program that never reads it does not hang us."""
    environment: dict[str, str] = {}
    """Extra variables of this program."""
    directory: str = "."
    """Working directory, workspace-relative."""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One output stream: the first ``limits.output_bytes`` of it."""

    kept: bytes = b""
    total_bytes: int = 0
    """True count, kept or not; a lower bound when the program was stopped for flooding."""

    @property
    def truncated(self) -> bool:
        """Whether bytes are missing from ``kept``."""
        return self.total_bytes > len(self.kept)


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a program did. Data, whatever it is: nonzero, killed, over a limit, timed out."""

    exit_code: int | None = None
    """Exit status, or ``None`` when a signal ended it."""
    signal: int | None = None
    """Signal that ended the program, where one did."""
    stdout: Stream = Stream()
    stderr: Stream = Stream()
    timed_out: bool = False
    limit: LimitKind | None = None
    """The limit that stopped it, from the kernel's own counters, never guessed."""
    interrupted_before: bool = False
    """The environment had been interrupted by an earlier action (its files are kept)."""

    @property
    def ok(self) -> bool:
        """Whether it exited 0 within every limit."""
        return self.exit_code == 0 and self.limit is None and not self.timed_out

    @property
    def text(self) -> str:
        """Both streams as text for a model: lossy where bytes are not UTF-8, and says so."""
        return render_text(self)


class WriteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``box.write_files``: put files in the workspace."""

    files: dict[str, bytes]
    """Workspace-relative path → content; parents are made."""


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``box.read_file``: read one regular file of the workspace."""

    path: str
    bytes_max: int = 16 * 1024 * 1024


class ReadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Content of one file, or why it was refused."""

    content: bytes = b""
    total_bytes: int = 0
    refused: str | None = None
    """``None``, or the reason: a symlink, a device, not found …"""


class ExportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``box.export``: copy regular files out of the workspace."""

    paths: tuple[str, ...] = (".",)
    bytes_max: int = 64 * 1024 * 1024


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """Files that were copied, and every path that was refused with its reason."""

    files: dict[str, bytes] = {}
    refused: dict[str, str] = {}


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``call``: a stateless tool: a Python function or a program, in a fresh box of its class."""

    module: str | None = None
    """Absolute path of the Python file that holds the function, or ``None`` for a program."""
    function: str | None = None
    """Name of the function in ``module``; called with ``arguments`` as keywords."""
    argv: tuple[str, ...] = ()
    """The program, when there is no function."""
    arguments: dict[str, Any] = {}
    """JSON values."""
    key: str = ""
    """Idempotency key offered to the tool: as ``STOKER_ACTION_KEY`` in its environment."""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a stateless tool returned."""

    value: Any = None
    """The function's JSON value, or ``None`` for a program."""
    error: str | None = None
    """The exception the function raised, as text: an observation of the program."""
    run: RunResult | None = None
    """The process that ran it."""
    throttled_seconds: float | None = None
    """The function said that a remote service refused it, too many requests: the seconds that the
    service asked to wait, 0 where it named none."""


class Tests(msgspec.Struct, frozen=True, kw_only=True):
    """Tests that grade a solution from outside its process (docs/design/0003)."""

    __test__: ClassVar[bool] = False  # pytest would take it for a test class

    source: str
    """Python run by the *judge*, in a box of its own that the solution never enters."""
    entry_point: str
    """Function of ``solution`` that ``check(candidate)`` in ``source`` is called with."""
    solution: str = "solution.py"
    """Workspace-relative file that holds the answer."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``score``: grade a copy of the environment's files against tests."""

    tests: Tests
    in_branch: bool = True


class CheckpointRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``box.checkpoint``: keep the environment's state in the artifact store (``Checkpoint``)."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the judge decided."""

    passed: bool
    detail: str = ""
    """First failure as text, empty when passed."""
    run: RunResult | None = None
    """The judge's own process."""


def render_text(result: RunResult) -> str:
    """Return stdout, stderr and the ending of ``result`` as a model would be shown them."""
    parts = [_view(result.stdout), _view(result.stderr)]
    if result.timed_out:
        parts.append("[timed out; its processes were stopped]")
    elif result.limit is not None:
        parts.append(f"[stopped at the {result.limit} limit]")
    elif result.signal is not None:
        parts.append(f"[ended by signal {result.signal}]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(part for part in parts if part)


def _view(stream: Stream) -> str:
    text = stream.kept.decode(errors="replace").rstrip("\n")
    lossy = "�" in text and "�".encode() not in stream.kept
    marks = []
    if stream.truncated:
        marks.append(f"[truncated: {len(stream.kept)} of {stream.total_bytes} bytes]")
    if lossy:
        marks.append("[some bytes are not UTF-8]")
    return "\n".join([text, *marks]) if marks else text
