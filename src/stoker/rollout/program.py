"""Programs and tools: the two decorators, and loading a program file.

A loaded program is identified by name, version and the digest of its source file. Loading runs
the file's top level; whatever goes wrong there becomes ``ProgramInvalid`` with file and line.
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar, overload

from stoker.errors import ProgramInvalid
from stoker.model.action import Effect
from stoker.model.given import duration
from stoker.model.value import content_digest
from stoker.rollout.arguments import OnTimeout
from stoker.rollout.plain import on_timeout_of

P = ParamSpec("P")
R = TypeVar("R")

Duration = float | str
"""Seconds, or text with a unit: ``"10s"``, ``"2m"``."""
ProgramFunction = Callable[..., Coroutine[Any, Any, Any]]

_RESERVED = {"effect", "worker_class", "timeout", "on_timeout"}
"""Keywords of ``ctx.call`` itself."""
_MODULE_PREFIX = "stoker_program_"


class Rollout:
    """A rollout program: an async function of ``(ctx, task)`` and what it declares."""

    def __init__(
        self,
        function: ProgramFunction,
        *,
        name: str | None = None,
        version: str = "1",
        boxes: int = 1,
        timeout: Duration = "20m",
    ) -> None:
        self.function = function
        self.name = name or function.__name__
        self.version = version
        self.boxes = boxes
        self.timeout_seconds = duration(timeout, "timeout")
        self.file = function.__code__.co_filename
        self.__doc__ = function.__doc__
        self._validate()

    def __call__(self, ctx: Any, task: Any) -> Coroutine[Any, Any, Any]:  # noqa: ANN401 - any, by purpose
        """Return the program's coroutine, so that one program can await another."""
        return self.function(ctx, task)

    def source_digest(self) -> str:
        """Return the digest of the file that holds the program."""
        return content_digest(Path(self.file).read_bytes())

    def _validate(self) -> None:
        where = _defined_at(self.function)
        if not inspect.iscoroutinefunction(self.function):
            raise ProgramInvalid(f"{where}: a rollout is an `async def`; add async")
        try:
            inspect.signature(self.function).bind(None, None)
        except TypeError as error:
            raise ProgramInvalid(f"{where}: a rollout takes (ctx, task): {error}") from error
        if self.boxes < 0:
            raise ProgramInvalid(f"{where}: boxes={self.boxes} is less than 0")


class Tool(Generic[P, R]):
    """A stateless tool: a function that workers import from its file and call."""

    def __init__(
        self,
        function: Callable[P, R],
        *,
        effect: Effect | str = Effect.PURE,
        worker_class: str | None = None,
        timeout: Duration | None = None,
        on_timeout: OnTimeout | str = "observe",
    ) -> None:
        self.function = function
        self.name = function.__name__
        self.module = str(Path(function.__code__.co_filename).resolve())
        self.__doc__ = function.__doc__
        where = _defined_at(function)
        try:
            self.effect = Effect(effect)
            self.on_timeout = on_timeout_of(on_timeout)
            self.timeout_seconds = None if timeout is None else duration(timeout, "timeout")
        except ValueError as error:
            raise ProgramInvalid(f"{where}: {error}") from error
        self.worker_class = worker_class
        self.signature = inspect.signature(function)
        for parameter in self.signature.parameters.values():
            if parameter.name in _RESERVED:
                raise ProgramInvalid(
                    f"{where}: a tool's parameter cannot be named {parameter.name!r}: "
                    "ctx.call has a keyword of that name"
                )
            if parameter.kind in {parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY}:
                raise ProgramInvalid(
                    f"{where}: parameter {parameter.name!r} cannot be given by name; "
                    "workers call tools with keywords"
                )
        if "<locals>" in function.__qualname__:
            raise ProgramInvalid(
                f"{where}: a tool is a top-level function, so that workers can import it"
            )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here and now, outside any box."""
        return self.function(*args, **kwargs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name; ``TypeError`` when they do not fit."""
        bound: dict[str, Any] = {}
        for name, value in self.signature.bind(*args, **kwargs).arguments.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                bound.update(value)
            else:
                bound[name] = value
        return bound


@overload
def rollout(function: ProgramFunction, /) -> Rollout: ...
@overload
def rollout(
    *, version: str = "1", boxes: int = 1, timeout: Duration = "20m", name: str | None = None
) -> Callable[[ProgramFunction], Rollout]: ...
def rollout(
    function: ProgramFunction | None = None,
    /,
    *,
    version: str = "1",
    boxes: int = 1,
    timeout: Duration = "20m",
    name: str | None = None,
) -> Rollout | Callable[[ProgramFunction], Rollout]:
    """Declare an async function a rollout program.

    ``boxes`` is how many environments a rollout may hold at once; ``timeout`` its whole wall time.
    A changed ``version`` tells a resumed run that the program means something else now.

    Raises:
        ProgramInvalid: it is no async function of ``(ctx, task)``, or a value cannot be used.
    """

    def declare(program: ProgramFunction) -> Rollout:
        try:
            return Rollout(program, name=name, version=version, boxes=boxes, timeout=timeout)
        except ValueError as error:
            raise ProgramInvalid(f"{_defined_at(program)}: {error}") from error

    return declare(function) if function is not None else declare


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    effect: Effect | str = "pure",
    worker_class: str | None = None,
    timeout: Duration | None = None,
    on_timeout: OnTimeout | str = "observe",
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(
    function: Callable[P, R] | None = None,
    /,
    *,
    effect: Effect | str = "pure",
    worker_class: str | None = None,
    timeout: Duration | None = None,
    on_timeout: OnTimeout | str = "observe",
) -> Tool[P, R] | Callable[[Callable[P, R]], Tool[P, R]]:
    """Declare a function a stateless tool for ``ctx.call``; it stays callable.

    Raises:
        ProgramInvalid: workers could not call it, or a value cannot be used.
    """

    def declare(target: Callable[P, R]) -> Tool[P, R]:
        return Tool(
            target,
            effect=effect,
            worker_class=worker_class,
            timeout=timeout,
            on_timeout=on_timeout,
        )

    return declare(function) if function is not None else declare


def load_program(path: Path, name: str | None = None, *, stands_for: Path | None = None) -> Rollout:
    """Load the rollout called ``name`` from the Python file ``path``; the only one when ``None``.

    The file's folder becomes importable, as for a script. What it defines is called after
    ``stands_for``, the recorded path whose place it takes, where that is given: journals name
    tools and functions by their file.

    Raises:
        ProgramInvalid: no such file, it does not load (with file and line), or no such rollout.
    """
    module = _load_module(path, (stands_for or path).stem)
    if stands_for is not None:
        for item in vars(module).values():
            if isinstance(item, Tool) and item.module == str(path.resolve()):
                item.module = str(stands_for)
    found = {
        item.name: item
        for item in vars(module).values()
        if isinstance(item, Rollout) and Path(item.file).resolve() == path.resolve()
    }
    if name is not None and name in found:
        return found[name]
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise ProgramInvalid(f"{path}: no function is decorated with @stoker.rollout")
    if name is None:
        raise ProgramInvalid(f"{path}: holds {sorted(found)}; say which, as {path.name}:NAME")
    raise ProgramInvalid(f"{path}: no rollout is called {name!r}; it holds {sorted(found)}")


def _load_module(path: Path, stem: str) -> ModuleType:
    if not path.is_file():
        raise ProgramInvalid(f"{path}: no such program file")
    module_name = _MODULE_PREFIX + stem
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    if spec is None or spec.loader is None:
        raise ProgramInvalid(f"{path}: not a Python file (its name must end in .py)")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except ProgramInvalid:
        raise
    except (Exception, SystemExit) as error:
        raise ProgramInvalid(_load_error(path, error)) from error
    return module


def _load_error(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename == str(path.resolve()):
        return f"{path}:{error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path.resolve())]
    where = f"{path}:{lines[-1]}" if lines else str(path)
    return f"{where}: loading the program raised {type(error).__name__}: {error}"


def _defined_at(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        raise ProgramInvalid(f"{function!r} is not a function")
    return f"{code.co_filename}:{code.co_firstlineno}"
