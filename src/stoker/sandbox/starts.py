"""Whether a program was reached, and if not: whose fault it is, and whether to try once more.

Behind a launcher nobody but the launcher knows: it reports (an exit code, a process id) only for a
program it really started. A launcher that *ended by itself* without such a report started nothing;
one that was killed may have, and nothing is claimed then.
"""

import contextlib
import errno
import os
import signal
from collections.abc import Callable

import msgspec

from stoker.errors import BoxFailed
from stoker.model.tools import LimitKind, RunResult
from stoker.sandbox.making import WorkOrder
from stoker.sandbox.supervise import Ended, ending
from stoker.sandbox.warm import WarmServer

_TOO_LONG = frozenset({errno.E2BIG})
_MISSING_PROGRAM = _TOO_LONG | {errno.ENOENT, errno.ENOEXEC, errno.EACCES, errno.ENOTDIR}
"""The program's fault, an observation."""
_PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""What a busy host answers; a moment later it may have room."""


class Prepared(msgspec.Struct, kw_only=True):
    """An action ready to be started, with the descriptors to close once it is."""

    order: WorkOrder
    mounts: list[int] = []
    """Detached mounts for ``order.place``."""
    passed: list[int] = []
    opened: list[int] = []
    """Closed as soon as the process exists."""
    began: Callable[[], bool] | None = None
    """Whether the launcher really started the program, asked after its end; ``None``: there is no
    launcher."""
    status: int = -1
    """Read end that ``began`` reads, or -1."""
    reported: int = -1
    """Read end on which the program's raw wait status is reported, or -1."""
    server: WarmServer | None = None
    """What starts it instead of the maker."""


class Unstarted(msgspec.Struct, frozen=True, kw_only=True):
    """Why a program was not reached."""

    text: str
    program_missing: bool = False
    """The caller named something that cannot be run."""
    certain: bool = True
    """Nothing of the program ran."""
    passing: bool = False
    """A shortage that may be over by now; only ever with ``certain``."""

    def sentence(self, box_id: str, program: str) -> str:
        """Say it of a box."""
        ran = "nothing was run" if self.certain else "the program may have run in part"
        return f"box {box_id} could not start {program!r}: {self.text}; {ran}"


def unstarted(ended: Ended, began: Callable[[], bool] | None) -> Unstarted | None:
    """Return why the program was not reached, or ``None``; ``began``: see ``local.Prepared``."""
    if ended.error:
        # Behind a launcher only too long arguments are the program's; else the launcher failed.
        return Unstarted(
            text=ended.error,
            program_missing=ended.errno in (_TOO_LONG if began else _MISSING_PROGRAM),
            passing=ended.errno in _PASSING,
        )
    if began is None or ended.stopped or ended.result.limit is not None or began():
        return None
    return _launcher_problem(ended.result)


def launcher_told(status: int) -> bool:
    """Return whether bubblewrap told the exit code of a program, on ``status``."""
    os.set_blocking(status, False)
    try:
        return b'"exit-code"' in os.read(status, 4096)
    except BlockingIOError:
        return False


def _launcher_problem(result: RunResult) -> Unstarted:
    text = result.stderr.kept.decode(errors="replace").strip()
    if result.signal is not None:
        return Unstarted(text=f"its launcher was killed by signal {result.signal}", certain=False)
    return Unstarted(
        text=text or f"the launcher ended with {result.exit_code}",
        program_missing="execvp" in text or "Can't chdir" in text,
        passing=any(os.strerror(code) in text for code in _PASSING),
    )


def as_reported(reported: int, result: RunResult, box_id: str) -> RunResult:
    """Return ``result`` with the program's own ending, where it was reported.

    Raises:
        BoxFailed: it was not, and no limit says why: what ended is not the program.
    """
    os.set_blocking(reported, False)
    said = b""
    with contextlib.suppress(BlockingIOError):
        said = os.read(reported, 4)
    if len(said) != 4:  # noqa: PLR2004 - one C int
        if result.limit is not None:
            return result
        ended = (result.signal and f"signal {result.signal}") or f"exit code {result.exit_code}"
        raise BoxFailed(
            f"the launcher of box {box_id} ended by {ended} and did not tell how its program did; "
            "that may have run in part"
        )
    code, number = ending(int.from_bytes(said, "little"), wrapped=False)
    limit = result.limit
    if limit is None and number in (signal.SIGXCPU, signal.SIGXFSZ):
        limit = LimitKind.CPU if number == signal.SIGXCPU else LimitKind.DISK
    return msgspec.structs.replace(result, exit_code=code, signal=number, limit=limit)
