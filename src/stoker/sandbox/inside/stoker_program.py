"""Makes this interpreter what a fresh ``python`` would be, and ends it as one would be ended.

Beside ``box_server``, which forks the process this runs in. Everything here happens after the fork,
as the box's own user, save ``open_streams``.
"""

import atexit
import builtins
import gc
import importlib
import importlib.machinery
import io
import itertools
import os
import runpy  # noqa: F401 - used by -m, loaded before the fork
import signal
import site
import sys
import time
import types
import weakref

_REASON_MAX, _REASONS_MAX = 120, 5
"""Characters, sentences: what a packet holds however they are escaped."""
_THREAD_LOOKS, _THREAD_LOOK_SECONDS = 100, 0.005
_NOTHING = os.stat(os.devnull)  # noqa: PTH116 - starts fast
"""What a program without input reads, as its server sees it."""
_USER_SITE = f".local/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def prepared(spec: dict[str, object]) -> "tuple[types.CodeType, dict[str, object]] | None":
    """Make this interpreter what ``python`` would be; ``None``: only a fresh one would be right."""
    variables: dict[str, str] = spec["environment"]  # type: ignore[assignment]
    home = variables.get("HOME", "")
    if os.path.isdir(f"{home}/{_USER_SITE}"):  # noqa: PTH112 - starts fast
        return None  # its start would run what lies there
    argv: list[str] = spec["argv"]  # type: ignore[assignment]
    form, rest = argv[1], argv[2:]
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins)
    try:
        if form == "-c":
            first, sys.argv = "", ["-c", *rest[1:]]
            main.__loader__ = importlib.machinery.BuiltinImporter
            code = _compiled(rest[0], "<string>")
        elif form == "-m":
            first, sys.argv = os.getcwd(), ["-m", *rest[1:]]  # noqa: PTH109 - starts fast
            main.__loader__ = importlib.machinery.BuiltinImporter
            code = compile(_AS_MODULE.format(rest[0]), _OURS, "exec")
        else:
            with open(form, "rb") as file:  # noqa: PTH123 - starts fast
                source = file.read()
            first = os.path.dirname(os.path.realpath(form))  # noqa: PTH120 - starts fast
            sys.argv = [form, *rest]
            name = form if form.startswith("/") else f"{os.getcwd()}/{form}"  # noqa: PTH109 - starts fast
            main.__dict__.update(__file__=name, __cached__=None)
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", name)
            code = _compiled(source, name)
    except OSError:
        return None  # a directory, an archive, or nothing: the interpreter has words for it
    _become_main(main, first, argv, variables)
    seed_anew()
    return code, main.__dict__


_OURS = "<stoker>"
_AS_MODULE = "import runpy; runpy._run_module_as_main({!r})"


def _compiled(source: "str | bytes", name: str) -> types.CodeType:
    """Compile now; what cannot be compiled is raised where the program would begin."""
    try:
        return compile(source, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        again = "compile(source, name, 'exec', dont_inherit=True)"
        return compile(f"source, name = {source!r}, {name!r}; {again}", _OURS, "exec")


def _become_main(
    main: types.ModuleType, first: str, argv: list[str], variables: dict[str, str]
) -> None:
    sys.modules["__main__"] = main
    sys.path[0] = first
    sys.orig_argv[:] = argv
    for name in [name for name in os.environ if name not in variables]:
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    site.USER_BASE = f"{variables.get('HOME', '')}/.local"
    site.USER_SITE = f"{variables.get('HOME', '')}/{_USER_SITE}"
    if not os.path.samestat(os.fstat(0), _NOTHING):
        _open_stream("stdin", 0, "r")


def load_ahead(names: list[str]) -> list[str]:
    """Import modules before any program; return, for each that failed, which and why.

    Ends this process with a sentence where one keeps what a fork would lose: a thread, or a file.
    """
    first = sys.path.pop(0)  # ours, no program's
    failed = []
    for name in names:
        files = os.listdir("/proc/self/fd")  # noqa: PTH208 - names alone
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the program hears it itself
            reason = f"{name}: {type(error).__name__}: {error}"[:_REASON_MAX]
            failed.append(reason.encode("ascii", "replace").decode())
        if os.listdir("/proc/self/fd") != files:  # noqa: PTH208 - as above
            _refuse(name, "file open")
        if not _without_threads():
            _refuse(name, "thread")
    sys.path.insert(0, first)
    return failed[:_REASONS_MAX]


def seed_anew() -> None:
    """Give this program a sequence of its own where a module would repeat the server's."""
    if "numpy.random" in sys.modules:  # Python's own is seeded by the fork
        sys.modules["numpy.random"].seed()


def _refuse(name: str, what: str) -> None:
    os.write(2, f"{name} keeps a {what}, which a forked program would not have".encode())
    os._exit(1)  # waiting for no thread


def _without_threads() -> bool:
    """Whether no other thread is left, or all end at a fork by themselves, as numpy's do."""
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - names alone
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    for _ in range(_THREAD_LOOKS):  # one that was joined is in sight for a moment
        if len(os.listdir("/proc/self/task")) == 1:  # noqa: PTH208 - as above
            return True
        time.sleep(_THREAD_LOOK_SECONDS)
    return False


def open_streams() -> None:
    """Open the streams on what an action's are mostly: what takes its place then fits them."""
    read, write = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        os.dup2(nothing if mode == "r" else write, number)
        _open_stream(name, number, mode)
    for descriptor in (read, write, nothing):
        os.close(descriptor)


def _open_stream(name: str, number: int, mode: str) -> None:
    was = getattr(sys, name)
    raw = open(number, f"{mode}b", -1, closefd=False)  # noqa: SIM115 - for the whole program
    raw.raw.name = f"<{name}>"  # type: ignore[attr-defined]
    made = io.TextIOWrapper(
        raw, was.encoding, was.errors, newline="\n", line_buffering=name == "stderr"
    )
    made.mode = mode  # type: ignore[misc]
    setattr(sys, name, made)
    setattr(sys, f"__{name}__", made)


def end_of(error: BaseException | None, caller: str) -> int:
    """Return the exit code after ``error``, shown as the interpreter would show it."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    below = error.__traceback__
    while below and below.tb_frame.f_code.co_filename in (caller, _OURS):
        below = below.tb_next
    error.__traceback__ = below
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, below
    sys.excepthook(type(error), error, below)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def names_of_modules() -> frozenset[str]:
    """Return the names of all modules, as strings of our own that lie side by side.

    Whoever holds a string writes to it: the names that are in use lie on a hundred pages, and each
    of them would be copied for every program.
    """
    return frozenset(name.encode().decode() for name in sys.modules)


def finish(code: int, ours: frozenset[str]) -> None:
    """End the interpreter in its usual order, sparing what was there before the program came.

    To take that down too would touch, and so copy, every page that is shared with the server.
    """
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # noqa: SLF001 - as it is ended itself
    atexit._run_exitfuncs()  # noqa: SLF001 - the same
    code = code if _flushed() else 120
    sys.last_type = sys.last_value = sys.last_traceback = None
    popped = (sys.modules.pop(name) for name in _new_modules(ours))
    modules = [weakref.ref(module) for module in popped if isinstance(module, types.ModuleType)]
    gc.collect()
    for module in reversed(modules):
        if (alive := module()) is not None:
            _clear(alive.__dict__)
    gc.collect()
    code = code if _flushed() else 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _new_modules(ours: frozenset[str]) -> list[str]:
    """Return the names of the program's modules, in their order, touching none of the others."""
    count = len(sys.modules) - sum(map(sys.modules.__contains__, ours))
    names = itertools.islice((n for n in reversed(sys.modules) if n not in ours), count)
    return [*(["__main__"] if "__main__" in sys.modules else []), *reversed([*names])]


def _flushed() -> bool:
    good = True
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError, AttributeError):
            good = stream in (sys.stderr, sys.__stderr__) and good
    return good


def _clear(names: dict[str, object]) -> None:
    """Set a module's names to ``None``, private ones first, as the interpreter does."""
    for private in (True, False):
        for name in list(names):
            plain = not name.startswith("_") or name.startswith("__")
            if plain is not private and name != "__builtins__":
                names[name] = None
