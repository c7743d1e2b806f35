"""Runs one tool function inside a box: ``python callrunner.py``, request as JSON on stdin.

Standard library only, since it runs on the interpreter of the box. The function's stdout and stderr
stay its own; its result goes to a file beside them, whole or not at all. It never decides anything:
what it writes is as untrusted as the tool, and the worker bounds and checks it.

Start-up is kept lean: without ``site`` until an import fails, then with it, so that a tool that
needs only the standard library does not pay for installed packages.
"""

import importlib.util
import json
import os
import sys

BYTES_MAX = 16 * 1024 * 1024
"""Largest result written; a larger one is an error of the tool."""
TEXT_MAX = 4000
"""Longest error text."""


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
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:TEXT_MAX]})
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
    sys.meta_path.append(SiteWhenNeeded(request["paths"]))  # type: ignore[arg-type]  # duck-typed
    text = call(request)
    with open(answer + ".new", "w", encoding="ascii") as file:  # noqa: PTH123 - see above
        file.write(text)
    os.replace(answer + ".new", answer)  # noqa: PTH105 - see above


if __name__ == "__main__":
    main()
