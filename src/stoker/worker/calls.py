"""Stateless tools: what runs in the box for a ``call``, and what its answer means.

A program is run as it is. A Python function is run by ``callrunner.py``: in a process box by the
interpreter of this installation, so that the tool may import what its author installed; behind a
namespace by the baseline's interpreter, with the tool's directory and the installed packages
mounted read-only. The answer comes back as a file, never on the tool's own streams.
"""

import sys
import sysconfig
from pathlib import Path

import msgspec

from stoker.errors import ToolRefused
from stoker.model.action import Action
from stoker.model.execution import ExecutionPolicy, Isolation, Mount
from stoker.model.tools import CallRequest, CallResult, ReadResult, RunRequest, RunResult

from .callrunner import BYTES_MAX

ANSWER = ".stoker-answer.json"
"""Workspace-relative; the box is fresh, so the name is free."""
_MOUNTED = "/opt/stoker-call"
_RUNNER = Path(__file__).with_name("callrunner.py")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and under which policy."""

    policy: ExecutionPolicy
    run: RunRequest


class Answer(msgspec.Struct, frozen=True):
    """What the runner leaves."""

    value: object = None
    error: str | None = None


def plan(
    request: CallRequest,
    action: Action,
    attempt: int,
    *,
    policy: ExecutionPolicy,
    isolation: Isolation,
) -> Plan:
    """Return how ``request`` is carried out in a box of ``isolation``.

    Raises:
        ToolRefused: it names neither a program nor a function, or arguments that are not JSON.
    """
    extra = {"STOKER_ACTION_KEY": request.key or action.action_id, "STOKER_ATTEMPT": str(attempt)}
    if request.module is None or request.function is None:
        if not request.argv:
            raise ToolRefused(
                f"action {action.action_id} names neither a program nor a function; not run"
            )
        return Plan(policy=policy, run=RunRequest(argv=request.argv, environment=extra))
    module = Path(request.module)
    paths: tuple[str, ...] = ()
    if not module.is_file():
        raise ToolRefused(f"the tool's file {module} is not on this worker's machine; not run")
    if isolation is Isolation.PROCESS:
        command = (sys.executable, "-I", "-S", str(_RUNNER))
    else:
        command = ("python3", "-I", "-S", f"{_MOUNTED}/runner/{_RUNNER.name}")
        policy, paths = _with_mounts(policy, module)
        module = Path(_MOUNTED) / "tool" / module.name
    return Plan(
        policy=policy,
        run=RunRequest(argv=command, stdin=_order(request, module, paths), environment=extra),
    )


def result(request: CallRequest, run: RunResult, answer: ReadResult | None) -> CallResult:
    """Return what the call is worth, given the process and the file it left (if it was read)."""
    if request.function is None or run.timed_out or run.limit is not None:
        return CallResult(run=run)
    if answer is None or answer.refused is not None:
        ending = f"signal {run.signal}" if run.signal is not None else f"exit code {run.exit_code}"
        return CallResult(error=f"the tool ended without a result ({ending})", run=run)
    if answer.total_bytes > len(answer.content):
        return CallResult(error=f"the tool's result is over {BYTES_MAX} bytes", run=run)
    try:
        known = msgspec.json.decode(answer.content, type=Answer)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return CallResult(error=f"the tool's result is not usable JSON: {error}", run=run)
    return CallResult(value=known.value, error=known.error, run=run)


def _order(request: CallRequest, module: Path, paths: tuple[str, ...]) -> bytes:
    try:
        return msgspec.json.encode(
            {
                "module": str(module),
                "function": request.function,
                "arguments": request.arguments,
                "answer": ANSWER,
                "paths": paths,
            }
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolRefused(f"the arguments of {request.function} are not JSON: {error}") from error


def _with_mounts(policy: ExecutionPolicy, module: Path) -> tuple[ExecutionPolicy, tuple[str, ...]]:
    """Add what the runner needs to see, all of it read-only."""
    packages = sysconfig.get_paths()["purelib"]
    source = str(_RUNNER.parents[2])
    mounts = {
        f"{_MOUNTED}/runner": str(_RUNNER.parent),
        f"{_MOUNTED}/tool": str(module.resolve().parent),
        f"{_MOUNTED}/packages": packages,
        f"{_MOUNTED}/source": source,
    }
    added = tuple(Mount(source=source, target=target) for target, source in mounts.items())
    return (
        msgspec.structs.replace(policy, mounts=(*policy.mounts, *added)),
        (f"{_MOUNTED}/source", f"{_MOUNTED}/packages"),
    )
