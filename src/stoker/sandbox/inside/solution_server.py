"""Serves the answer under test, in the solution's own box: loads it, calls it, sends plain data.

Everything here may be subverted by the answer; nothing it says is believed beyond being the value
of one call. Descriptor 3 is the channel to the judge.
"""

import importlib.util
import json
import os
import socket
import sys
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - starts fast

import crossing  # type: ignore[import-not-found]  # beside this file, not in a package

_CHANNEL = 3
_TEXT_MAX = 4000
_FRAMES_MAX = 20


def main() -> None:
    """Say hello, load the answer when told to, serve calls until the judge is gone."""
    config = json.load(sys.stdin)
    channel = socket.socket(fileno=_CHANNEL)
    crossing.send(channel, {"hello": True})
    crossing.receive(channel)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000))
    try:
        function = _load(config["path"], config["entry_point"])
    except BaseException as error:  # noqa: BLE001 - exit() while loading is the answer's doing
        crossing.send(channel, _raised(error))
        return
    crossing.send(channel, {"loaded": True})
    while True:
        try:
            call = crossing.receive(channel)
        except EOFError:
            return
        crossing.send(channel, _called(function, call))


def _load(path: str, entry_point: str) -> object:
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # noqa: PTH100, PTH120 - starts fast
    spec = importlib.util.spec_from_file_location("solution", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["solution"] = module
    spec.loader.exec_module(module)
    if not hasattr(module, entry_point):
        raise NameError(f"{path} defines no {entry_point!r}")
    return getattr(module, entry_point)


def _called(function: object, call: dict[str, object]) -> dict[str, object]:
    try:
        positional = crossing.decode(call["positional"])
        named = crossing.decode(call["named"])
        result = function(*positional, **named)  # type: ignore[operator]
    except BaseException as error:  # noqa: BLE001 - exit() in a call is the answer's doing
        return _raised(error)
    try:
        reply = {"result": crossing.encode(result)}
        if len(json.dumps(reply)) <= crossing.MESSAGE_BYTES_MAX:
            return reply
        problem = f"more than {crossing.MESSAGE_BYTES_MAX} bytes of data"
    except BaseException as error:  # noqa: BLE001 - iterating a result runs the answer's code
        problem = str(error)[:_TEXT_MAX]
    return {"raised": "TypeError", "message": f"the solution returned {problem}", "traceback": ""}


def _raised(error: BaseException) -> dict[str, object]:
    try:
        message = str(error)[:_TEXT_MAX]
        text = "".join(traceback.format_exception(error, limit=-_FRAMES_MAX))[-_TEXT_MAX:]
    except BaseException:  # noqa: BLE001 - a hostile __str__
        message = text = ""
    return {"raised": type(error).__name__, "message": message, "traceback": text}


if __name__ == "__main__":
    main()
