"""Starts the actions of one box from a warm interpreter; process 1 of the box's namespaces.

It runs code of the baseline only: what an action does happens in a fork that has its own process,
mount, ipc and uts namespaces, a fresh ``/proc``, another uid, no capabilities, the system-call
filter, and only then its program. When the action's first process ends, everything else in its
process namespace is killed by the kernel before the ending is told. Whoever asks us is the worker:
requests come over a socket that no action ever holds, and what an action writes is never read here.

Descriptors: 3 the socket, 4 the filter program.
"""

import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib.machinery
import io
import json
import os
import resource
import runpy  # noqa: F401 - used by -m, loaded before the fork
import select
import signal
import site
import socket
import stat
import struct
import sys
import types
import weakref

_SOCKET, _FILTER = 3, 4
_CHANNEL_FIRST = 3
_DESCRIPTORS_MAX = 32
_PACKET_BYTES_MAX = 4096
_INSIDE_ID = 1000
_NEW_NAMESPACES = 0x20000 | 0x08000000 | 0x04000000  # mount, ipc, uts
_NEW_PID = 0x20000000
_MS = {
    "rdonly": 1,
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "remount": 0x20,
    "bind": 0x1000,
    "move": 0x2000,
    "rec": 0x4000,
}
_MS_PRIVATE = 0x40000
_MNT_DETACH = 2
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
_CAPABILITY_LAST = 63
_NR_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION = 0x20080522
_NOT_STARTED = 127
_ERROR_BYTES_MAX = 4000
_USER_SITE = f".local/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"

_libc = ctypes.CDLL(None, use_errno=True)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class Server:
    """Serves the worker until it closes the socket; ends this process, and so the box, then."""

    def __init__(self, control: socket.socket, init: str, masks: list[str]) -> None:
        self._control = control
        self._init = init
        self._masks = masks
        self._machine = os.uname().machine
        self._filter = os.pread(_FILTER, 65536, 0)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def harden(self) -> None:
        """Give up what no action may ever get from us."""
        with open("/proc/sys/user/max_user_namespaces", "w", encoding="ascii") as file:  # noqa: PTH123 - a kernel file
            file.write("0")
        for capability in range(_CAPABILITY_LAST + 1):
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # EINVAL past the kernel's last
        _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def next_action(self) -> "Action":
        """Return an action, in the process that is to become it."""
        self._control.send(b'{"event": "ready"}')
        while True:
            data, descriptors, _, _ = socket.recv_fds(
                self._control, _PACKET_BYTES_MAX, _DESCRIPTORS_MAX
            )
            if not data:
                os._exit(0)
            request = json.loads(data)
            if request["verb"] != "run":
                continue  # a kill that came after the end
            number = request["number"]
            action = self._started(number, descriptors)
            if action is not None:
                return action

    def _started(self, number: int, descriptors: list[int]) -> "Action | None":
        """Run one action to its end; returns an ``Action`` in the action's own process only."""
        spec = json.loads(os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0))
        errors, errors_write = os.pipe2(os.O_CLOEXEC)
        status, said = _NOT_STARTED << 8, ""
        init = -1
        try:
            _checked(_libc.unshare(_NEW_PID), "unshare")
            init = os.posix_spawn(self._init, [self._init], {})
            pid = os.fork()
            if pid == 0:
                self._control.close()
                return Action(spec, descriptors[1:], errors_write, self._filter, self._masks)
        except OSError as error:
            said = f"{error.errno or 0} {error}"
            pid = -1
        _checked(_libc.setns(self._pid_namespace, _NEW_PID), "setns")
        for descriptor in (*descriptors, errors_write):
            os.close(descriptor)
        if pid > 0:
            status = self._awaited(number, pid=pid, init=init)
            said = os.read(errors, _ERROR_BYTES_MAX).decode(errors="replace")
        self._end(init)
        os.close(errors)
        self._tell(number, status, said)
        return None

    def _awaited(self, number: int, *, pid: int, init: int) -> int:
        """Return the wait status of ``pid``, watching for a word to kill it meanwhile."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                return status
            for descriptor, _ in poll.poll():
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 4096)
                    continue
                data = self._control.recv(_PACKET_BYTES_MAX)
                if not data:
                    os._exit(0)  # process 1: the kernel kills all the rest
                request = json.loads(data)
                if request["verb"] == "kill" and request["number"] == number:
                    os.kill(init, signal.SIGKILL)

    def _end(self, init: int) -> None:
        """Kill process 1 of an action's namespace, and with it all that is left there."""
        if init > 0:
            os.kill(init, signal.SIGKILL)
            os.waitpid(init, 0)  # returns once every process of the namespace is gone

    def _tell(self, number: int, status: int, error: str) -> None:
        self._control.send(
            json.dumps(
                {"event": "exited", "number": number, "status": status, "error": error}
            ).encode()[:_PACKET_BYTES_MAX]
        )


class Action:
    """What one action is to become, in its own process."""

    def __init__(
        self,
        spec: dict[str, object],
        descriptors: list[int],
        errors: int,
        program: bytes,
        masks: list[str],
    ) -> None:
        self.spec = spec
        self._descriptors = descriptors
        self._errors = errors
        self._filter = program
        self._masks = masks

    def confine(self) -> None:
        """Take namespaces, limits, uid and filter; afterwards nothing can be taken back."""
        signal.set_wakeup_fd(-1)
        os.setsid()
        self._arrange()
        _checked(_libc.unshare(_NEW_NAMESPACES), "unshare")
        _mount(None, "/", None, _MS["rec"] | _MS_PRIVATE)
        # Mounted elsewhere first: the kernel lets us only while another is in sight, which goes.
        _mount("proc", "/tmp", "proc", _MS["nosuid"] | _MS["nodev"] | _MS["noexec"])  # noqa: S108 - the mount point itself
        _checked(_libc.umount2(b"/proc", _MNT_DETACH), "umount")
        _mount("/tmp", "/proc", None, _MS["move"])  # noqa: S108 - the same
        for mask in self._masks:
            _read_only("/dev/null", mask)
        _read_only("/proc/sys", "/proc/sys")
        for name, limits in dict(self.spec["rlimits"]).items():  # type: ignore[call-overload]
            resource.setrlimit(int(name), tuple(limits))
        os.setgroups([])
        os.setresgid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
        os.setresuid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
        header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
        number = _NR_CAPSET[os.uname().machine]
        _checked(_libc.syscall(number, header, b"\0" * 24), "capset")
        _checked(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
        os.chdir(str(self.spec["directory"]))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._load_filter()

    def _arrange(self) -> None:
        """Give the descriptors their numbers; every other one is closed."""
        parked = [_parked(d) for d in (*self._descriptors, self._errors)]
        self._errors = parked.pop()
        numbers = [0, 1, 2, *range(_CHANNEL_FIRST, _CHANNEL_FIRST + len(parked) - 3)]
        for descriptor, number in zip(parked, numbers, strict=True):
            os.dup2(descriptor, number, inheritable=True)
        last = numbers[-1] + 1
        self._errors = os.dup2(self._errors, last, inheritable=False)
        os.closerange(last + 1, 4096)

    def _load_filter(self) -> None:
        _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        if self._filter:
            program = _FilterProgram(len(self._filter) // 8, self._filter)
            _checked(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")

    def failed(self, error: Exception) -> None:
        """Say why the program was not reached, and end."""
        code = error.errno if isinstance(error, OSError) else 0
        os.write(self._errors, f"{code or 0} {error!s:.4000}".encode()[:_ERROR_BYTES_MAX])
        os._exit(_NOT_STARTED)

    def execute(self) -> None:
        """Become the program."""
        argv = [os.fsencode(a) for a in self.spec["argv"]]  # type: ignore[attr-defined]
        variables = dict(self.spec["environment"])  # type: ignore[call-overload]
        environment = {os.fsencode(k): os.fsencode(v) for k, v in variables.items()}
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by every Python
            signal.signal(ignored, signal.SIG_DFL)
        os.execve(str(self.spec["python"]), argv, environment)  # noqa: S606 - the ordered program

    def ready(self) -> None:
        """Close the way back: from here on it is the program that fails."""
        os.close(self._errors)


def _parked(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    _checked(_libc.mount(*encoded, ctypes.c_ulong(flags), None), f"mount {target}")


def _read_only(source: str, target: str) -> None:
    _mount(source, target, None, _MS["bind"])
    kept = _MS["nosuid"] | _MS["nodev"] | _MS["rdonly"]
    _mount(None, target, None, _MS["bind"] | _MS["remount"] | kept)


# --- the program, in this interpreter -------------------------------------------------------------


def prepared(spec: dict[str, object]) -> "tuple[types.CodeType, dict[str, object]] | None":
    """Make this interpreter what ``python`` would be; ``None``: only a fresh one would be right."""
    variables = {str(k): str(v) for k, v in dict(spec["environment"]).items()}  # type: ignore[call-overload]
    home = variables.get("HOME", "")
    if os.path.isdir(f"{home}/{_USER_SITE}"):  # noqa: PTH112 - starts fast
        return None  # its start would run what lies there
    argv = [str(part) for part in spec["argv"]]  # type: ignore[attr-defined]
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
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    site.USER_BASE = f"{variables.get('HOME', '')}/.local"
    site.USER_SITE = f"{variables.get('HOME', '')}/{_USER_SITE}"
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        _open_stream("stdin", 0, "r")


def open_streams() -> None:
    """Open the streams on pipes, as an action's are: what takes its place then fits them."""
    read, write = os.pipe()
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        os.dup2(read if mode == "r" else write, number)
        _open_stream(name, number, mode)
    os.close(read)
    os.close(write)


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


def main() -> "tuple[types.CodeType, dict[str, object]]":
    """Serve; returns in the process of an action only, with what it is to run."""
    os.closerange(_FILTER + 1, 4096)
    for descriptor in (_SOCKET, _FILTER):
        os.set_inheritable(descriptor, False)
    server = Server(socket.socket(fileno=_SOCKET), sys.argv[1], sys.argv[2:])
    server.harden()
    open_streams()
    gc.collect()
    gc.freeze()
    action = server.next_action()
    try:
        action.confine()
        found = prepared(action.spec)
        if found is None:
            action.execute()
    except Exception as error:  # noqa: BLE001 - whatever it is, no program runs half confined
        action.failed(error)
    action.ready()
    assert found is not None
    return found


# --- its ending -----------------------------------------------------------------------------------


def end_of(error: BaseException | None) -> int:
    """Return the exit code after ``error``, shown as the interpreter would show it."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    below = error.__traceback__
    while below and below.tb_frame.f_code.co_filename in (__file__, _OURS):
        below = below.tb_next
    error.__traceback__ = below
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, below
    sys.excepthook(type(error), error, below)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def finish(code: int, ours: frozenset[str]) -> None:
    """End the interpreter in its usual order, sparing what was there before the program came.

    To take that down too would touch, and so copy, every page that is shared with the server.
    """
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # noqa: SLF001 - as it is ended itself
    atexit._run_exitfuncs()  # noqa: SLF001 - the same
    code = code if _flushed() else 120
    sys.last_type = sys.last_value = sys.last_traceback = None
    names = [name for name in sys.modules if name not in ours or name == "__main__"]
    popped = (sys.modules.pop(name) for name in names)
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


if __name__ == "__main__":
    _ours = frozenset(sys.modules)
    _code, _globals = main()
    _ended: BaseException | None = None
    try:
        exec(_code, _globals)  # noqa: S102 - the box's program, in its box
    except BaseException as _error:  # noqa: BLE001 - whatever ends a program
        _ended = _error
    _status = end_of(_ended)
    del _code, _globals, _ended
    finish(_status, _ours)
