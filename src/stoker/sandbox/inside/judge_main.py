"""Runs the tests, in the judge's own box, which the solution never enters.

``check(candidate)`` is called with a proxy: arguments and results cross as plain data. Whether it
returned is told on descriptor 4, which only this box has, and confirmed with a nonce that we are
told only afterwards. A solution that died or sent anything malformed has failed, whatever
``check`` made of it.
"""

import builtins
import json
import linecache
import os
import socket
import sys
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - starts fast

import crossing  # type: ignore[import-not-found]  # beside this file, not in a package

_CHANNEL, _VERDICT = 3, 4
_TESTS = "tests.py"
_DETAIL_MAX = 4000


class SolutionError(Exception):
    """The solution raised something that is no built-in exception."""


class SolutionGoneError(Exception):
    """The solution's process ended or broke the protocol."""


class TestsUnusableError(Exception):
    """The tests themselves cannot be run."""


class Candidate:
    """Calls the solution's function in its box."""

    def __init__(self, channel: socket.socket, name: str) -> None:
        self._channel = channel
        self.__name__ = name
        self.failed = ""
        """Why the solution can no longer pass, or empty."""
        self.traceback = ""
        """The solution's own traceback of its last exception."""

    def begin(self) -> None:
        """Wait for the server; nothing of the solution runs yet."""
        crossing.receive(self._channel)

    def load(self) -> None:
        """Let the solution be loaded."""
        reply = self._ask({"load": True})
        if "loaded" not in reply:
            self.failed = "the solution could not be loaded"
            self._raise(reply)

    def __call__(self, *positional: object, **named: object) -> object:
        """Call the solution."""
        try:
            call = {
                "positional": crossing.encode(list(positional)),
                "named": crossing.encode(named),
            }
        except crossing.CannotCrossError as error:
            raise TestsUnusableError(
                f"the tests pass something that cannot cross: {error}"
            ) from error
        reply = self._ask(call)
        if "result" not in reply:
            self._raise(reply)
        try:
            return crossing.decode(reply["result"])
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            self.failed = "the solution sent something that is not plain data"
            raise SolutionGoneError(self.failed) from error

    def _ask(self, message: dict[str, object]) -> dict[str, object]:
        if self.failed:
            raise SolutionGoneError(self.failed)
        try:
            crossing.send(self._channel, message)
            reply: dict[str, object] = crossing.receive(self._channel)
        except (EOFError, OSError) as error:
            self.failed = "the solution's process ended"
            raise SolutionGoneError(self.failed) from error
        except ValueError as error:
            self.failed = f"the solution broke the protocol: {error}"
            raise SolutionGoneError(self.failed) from error
        return reply

    def _raise(self, reply: dict[str, object]) -> None:
        name, message = str(reply.get("raised")), str(reply.get("message"))
        self.traceback = str(reply.get("traceback"))
        known = getattr(builtins, name, None)
        if isinstance(known, type) and issubclass(known, Exception):
            try:
                raised = known(message)
            except TypeError:  # one that wants more arguments (UnicodeDecodeError)
                raised = SolutionError(f"{name}: {message}")
            raise raised
        raise SolutionError(f"{name}: {message}")


def main() -> None:
    """Compile the tests, run them, report, confirm."""
    config = json.load(sys.stdin)
    verdict = socket.socket(fileno=_VERDICT)
    lines = verdict.makefile("r", encoding="utf-8")
    candidate = Candidate(socket.socket(fileno=_CHANNEL), config["entry_point"])
    try:
        check = _tests(config["source"])
        candidate.begin()
    except TestsUnusableError as error:
        _tell(verdict, {"event": "unusable", "detail": str(error)})
        return
    except (EOFError, ValueError):
        _tell(verdict, {"event": "absent", "detail": "the solution's server did not start"})
        return
    _tell(verdict, {"event": "ready"})
    try:
        passed, detail = _run(check, candidate)
    except TestsUnusableError as error:
        _tell(verdict, {"event": "unusable", "detail": str(error)})
        return
    _tell(verdict, {"event": "checked"})
    nonce = json.loads(lines.readline())["nonce"]
    _tell(verdict, {"event": "verdict", "nonce": nonce, "passed": passed, "detail": detail})


def _tests(source: str) -> object:
    namespace: dict[str, object] = {"__name__": "tests"}
    linecache.cache[_TESTS] = (len(source), None, source.splitlines(keepends=True), _TESTS)
    try:
        exec(compile(source, _TESTS, "exec"), namespace)  # noqa: S102 - the tests are the task's, not the policy's
    except BaseException as error:
        raise TestsUnusableError(f"the tests cannot be loaded: {error!r}") from error
    check = namespace.get("check")
    if not callable(check):
        raise TestsUnusableError("the tests define no check(candidate)")
    return check


def _run(check: object, candidate: Candidate) -> tuple[bool, str]:
    try:
        candidate.load()
        check(candidate)  # type: ignore[operator]
    except TestsUnusableError:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever ends the check is a failure of it
        return False, _detail(error, candidate)
    return not candidate.failed, candidate.failed


def _detail(error: BaseException, candidate: Candidate) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != _TESTS:
        trace = trace.tb_next
    shown = trace
    last = None
    while shown is not None and shown.tb_frame.f_code.co_filename == _TESTS:
        last, shown = shown, shown.tb_next
    if last is not None:
        last.tb_next = None  # the proxy's own frames say nothing to a reader
    lines = traceback.format_exception(type(error), error, trace, chain=False)
    text = "".join(lines)[-_DETAIL_MAX // 2 :]
    if candidate.traceback:
        text += f"\nIn the solution:\n{candidate.traceback[-_DETAIL_MAX // 2 :]}"
    return text.strip()


def _tell(verdict: socket.socket, message: dict[str, object]) -> None:
    verdict.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
