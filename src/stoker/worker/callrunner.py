"""Runs one tool function inside a box: ``python callrunner.py``, request as JSON on stdin.

Standard library only, since it runs on the interpreter of the box. The function's stdout and stderr
stay its own; its result goes to a file beside them, whole or not at all. It never decides anything:
what it writes is as untrusted as the tool, and the worker bounds and checks it.

Start-up is kept lean. Installed packages are turned on when an import needs them, not before. A
tool that says ``import stoker`` for its decorator gets a stand-in, which becomes the real package
when more is asked of it: the real one costs ten times what an interpreter costs.
"""

import importlib.util
import json
import math
import os
import sys
import time
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BYTES_MAX = 16 * 1024 * 1024
"""Largest result written; a larger one is an error of the tool."""
REFUSED = 429
"""HTTP status of "too many requests"."""
TEXT_MAX = 4000
"""Longest error text."""
EAGER = frozenset({"StokerError", "Infrastructure", "Cancelled"})
"""Names of classes that stand in ``except`` clauses, where a stand-in will not do."""


class TooManyRequests(Exception):
    """A tool says: the remote service it uses refused it for now, and nothing was done.

    ``retry_after``: seconds the service asked to wait; 0 where it named none.
    """

    status_code = 429

    def __init__(self, message: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message or "the service said: too many requests")
        self.retry_after = retry_after


class SiteWhenNeeded:
    """Last finder: turns installed packages on at the first import nothing else could satisfy."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.used = False

    def find_spec(self, name: str, path: object = None, _target: object = None) -> object:
        """Return what the import system finds once installed packages are on."""
        if self.used or path is not None:
            return None
        self.used = True
        if self.paths:
            sys.path.extend(self.paths)
        else:
            import site  # noqa: PLC0415 - only when needed, that is the point

            site.main()
        importlib.invalidate_caches()
        return importlib.util.find_spec(name)


class Later:
    """A name of the real package that nobody has used yet, save in an annotation."""

    def __init__(self, name: str) -> None:
        self.name = name

    def real(self) -> "Any":  # noqa: ANN401 - whatever the package has there
        """Return what it stands for, importing the package."""
        return getattr(real_stoker(), self.name)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)  # somebody only looks, as typing does
        return getattr(self.real(), name)

    def __call__(self, *args: object, **kwargs: object) -> object:  # noqa: D102 - as the real one
        return self.real()(*args, **kwargs)

    def __mro_entries__(self, _bases: object) -> tuple[object, ...]:
        return (self.real(),)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self.real())

    def __getitem__(self, _key: object) -> object:
        return self

    def __or__(self, _other: object) -> object:
        return self

    __ror__ = __or__


def decorator(function: object = None, /, **_options: object) -> object:
    """Leave the function as it is: here it is only called."""
    return function if function is not None else lambda target: target


def stand_in() -> ModuleType:
    """Return a module to be found under the name of the package."""
    module = ModuleType("stoker")
    module.tool = decorator  # type: ignore[attr-defined]
    module.rollout = decorator  # type: ignore[attr-defined]
    module.TooManyRequests = TooManyRequests  # type: ignore[attr-defined]

    def missing(name: str) -> object:
        if name in EAGER or name.startswith("_") or sys.modules["stoker"] is not module:
            return getattr(real_stoker(), name)
        return Later(name)

    module.__getattr__ = missing  # type: ignore[method-assign]
    return module


def real_stoker() -> ModuleType:
    """Put the real package in the stand-in's place and return it."""
    if sys.modules["stoker"].__dict__.get("tool") is decorator:
        del sys.modules["stoker"]
    return importlib.import_module("stoker")


def load(path: str) -> object:
    """Return the module in the file ``path``; what lies beside it can be imported."""
    sys.path.insert(0, os.path.dirname(path))  # noqa: PTH120 - pathlib would cost start-up time
    name = os.path.splitext(os.path.basename(path))[0]  # noqa: PTH119, PTH122 - see above
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def where(error: BaseException, path: str) -> str:
    """Return the innermost line of the tool's own file that ``error`` passed, or nothing."""
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (at {os.path.basename(path)}:{line})" if line else ""  # noqa: PTH119 - see above


def refusal(error: BaseException) -> "float | None":
    """Return the seconds a service asked to wait if ``error`` is its "too many requests".

    Known by shape, since every HTTP client has a class of its own: a status of 429 on the exception
    or its response, and a ``Retry-After`` of seconds or a date in the headers there.
    """
    response = getattr(error, "response", None)
    sides = [error] if response is None else [error, response]
    names = ("status_code", "status", "code")
    if all(getattr(side, name, None) != REFUSED for side in sides for name in names):
        return None
    for side in sides:
        waits = getattr(side, "retry_after", None)
        if waits is None:
            headers = getattr(side, "headers", None)
            waits = headers.get("Retry-After") if headers is not None else None
        if waits is not None:
            return seconds(waits)
    return 0.0


def refused(error: BaseException) -> "float | None":
    """Return ``refusal`` of an exception whose attributes may themselves raise."""
    try:
        return refusal(error)
    except Exception:  # noqa: BLE001 - the tool's own class may do anything
        return None


def seconds(waits: object) -> float:
    """Return a ``Retry-After`` in seconds: a number, or a date; 0 for anything else."""
    try:
        found = float(waits)  # type: ignore[arg-type]  # whatever it is
    except (TypeError, ValueError):
        from email.utils import parsedate_to_datetime  # noqa: PLC0415 - hardly ever needed

        try:
            found = parsedate_to_datetime(str(waits)).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return 0.0
    return max(0.0, found) if math.isfinite(found) else 0.0


def call(request: dict) -> str:  # type: ignore[type-arg]  # decoded JSON
    """Return the answer to ``request``: its value, or the error as text; always JSON."""
    try:
        function = getattr(load(request["module"]), request["function"])
        value = function(**request["arguments"])
        if hasattr(value, "__await__"):
            import asyncio  # noqa: PLC0415 - only for asynchronous tools

            value = asyncio.run(value)
    except BaseException as error:  # noqa: BLE001 - whatever the tool raised is its result
        import traceback  # noqa: PLC0415 - only when something broke

        traceback.print_exc()
        place = where(error, request["module"])
        text = f"{type(error).__name__}: {error}"[: TEXT_MAX - len(place)]
        return json.dumps({"error": text + place, "throttled_seconds": refused(error)})
    try:
        text = json.dumps({"value": value}, allow_nan=False)
    except (TypeError, ValueError, RecursionError, MemoryError) as error:
        return json.dumps({"error": f"the tool's result is not JSON: {error}"[:TEXT_MAX]})
    if len(text) > BYTES_MAX:
        return json.dumps(
            {"error": f"the tool's result is {len(text)} bytes of JSON, over {BYTES_MAX}"}
        )
    return text


def main() -> None:
    """Read the request, call, leave the answer."""
    request = json.loads(sys.stdin.buffer.read())
    answer = os.path.abspath(request["answer"])  # noqa: PTH100 - see above
    sys.modules["stoker"] = stand_in()
    sys.meta_path.append(SiteWhenNeeded(request["paths"]))  # type: ignore[arg-type]  # duck-typed
    text = call(request)
    with open(answer + ".new", "w", encoding="ascii") as file:  # noqa: PTH123 - see above
        file.write(text)
    os.replace(answer + ".new", answer)  # noqa: PTH105 - see above


if __name__ == "__main__":
    main()
