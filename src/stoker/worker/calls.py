"""Stateless tools: what runs in the box for a ``call``, and what its answer means.

A program is run as it is. A Python function is run by ``callrunner.py``: in a process box by the
interpreter of this installation, so that the tool may import what its author installed; behind a
boundary by the baseline's interpreter, with the tool's directory and the installed packages mounted
read-only. What another uid cannot reach (a checkout in a 0700 home) is not mounted: the tool's file
is then copied in alone. The answer comes back as a file, never on the tool's own streams.
"""

import json
import os
import stat
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
_RUNNER_INSIDE = ".stoker-runner.py"
_RUNNER = Path(__file__).with_name("callrunner.py")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and under which policy."""

    policy: ExecutionPolicy
    run: RunRequest
    files: dict[str, bytes] = {}
    """Written into the box's workspace first."""


class Answer(msgspec.Struct, frozen=True):
    """What the runner leaves."""

    value: object = None
    error: str | None = None
    throttled_seconds: float | None = None


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
    if not module.is_file():
        raise ToolRefused(f"the tool's file {module} is not on this worker's machine; not run")
    if isolation is Isolation.PROCESS:
        command = (sys.executable, "-I", "-S", str(_RUNNER))
        run = RunRequest(argv=command, stdin=_order(request, module, ()), environment=extra)
        return Plan(policy=policy, run=run)
    files = {_RUNNER_INSIDE: _RUNNER.read_bytes()}
    mounts, paths = _mounts(module)
    inside = Path(_MOUNTED) / "tool" / module.name
    if not any(mount.target == str(inside.parent) for mount in mounts):
        inside = Path(".stoker-tool") / module.name
        files[str(inside)] = module.read_bytes()
    return Plan(
        policy=msgspec.structs.replace(policy, mounts=(*policy.mounts, *mounts)),
        run=RunRequest(
            argv=("python", "-I", "-S", _RUNNER_INSIDE),
            stdin=_order(request, inside, paths),
            environment=extra,
        ),
        files=files,
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
    return CallResult(
        value=known.value, error=known.error, run=run, throttled_seconds=known.throttled_seconds
    )


def _order(request: CallRequest, module: Path, paths: tuple[str, ...]) -> bytes:
    try:
        order = {
            "module": str(module),
            "function": request.function,
            "arguments": request.arguments,
            "answer": ANSWER,
            "paths": paths,
        }
        return json.dumps(order, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolRefused(f"the arguments of {request.function} are not JSON: {error}") from error


def _mounts(module: Path) -> tuple[tuple[Mount, ...], tuple[str, ...]]:
    """Return what a function may import from, all read-only, and where that is to be found."""
    source, packages = str(_RUNNER.parents[2]), sysconfig.get_paths()["purelib"]
    wanted = {"tool": str(module.resolve().parent), "packages": packages}
    if source != packages:
        wanted["source"] = source
    reached = {name: path for name, path in wanted.items() if reachable(Path(path))}
    mounts = (Mount(source=path, target=f"{_MOUNTED}/{name}") for name, path in reached.items())
    paths = (f"{_MOUNTED}/{name}" for name in ("source", "packages") if name in reached)
    return tuple(mounts), tuple(paths)


def reachable(path: Path) -> bool:
    """Return whether a box can come to ``path``: as root its uid is another than ours."""
    if os.geteuid() != 0:
        return True
    others = stat.S_IROTH | stat.S_IXOTH
    try:
        way = all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)
        return way and path.stat().st_mode & others == others
    except OSError:
        return False
