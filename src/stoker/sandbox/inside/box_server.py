"""Starts the actions of one box from a warm interpreter; process 1 of the box's namespaces.

It runs code of the baseline only: what an action does happens in a fork that has its own process,
mount, ipc and uts namespaces, a fresh ``/proc``, another uid, no capabilities, the system-call
filter, and only then its program. When the action's first process ends, everything else in its
process namespace is killed by the kernel before the ending is told. Whoever asks us is the worker:
requests come over a socket that no action ever holds, and what an action writes is never read here.

Descriptors: 3 the socket, 4 the filter program.
"""

import _signal  # type: ignore[import-not-found]  # its wrapper makes enums: more pages to copy
import contextlib
import ctypes
import fcntl
import gc
import json
import marshal
import os
import resource
import select
import signal
import socket
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - starts fast

import stoker_program  # type: ignore[import-not-found]  # beside this file, not in a package
import way_out  # type: ignore[import-not-found]  # likewise

_SOCKET, _FILTER = 3, 4
_CHANNEL_FIRST = 3
_DESCRIPTORS_MAX = 32
_NUMBER = struct.Struct("=i")
_PASSED_SPACE = socket.CMSG_LEN(_DESCRIPTORS_MAX * _NUMBER.size)
_REQUEST = struct.Struct("=cI")
"""Verb and number of what is asked; little of Python runs for it, since all of it is copied."""
_RUN, _ARM, _KILL = b"r", b"a", b"k"
_TOLD = struct.Struct("=cIi")
"""Event, number, wait status; a text follows."""
_READY, _ARMED, _EXITED = b"r", b"a", b"e"
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
_CAPSET = {"x86_64": 126, "aarch64": 91}[os.uname().machine]
_CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)
_NO_CAPABILITIES = bytes(24)
_NOT_STARTED = 127
_ERROR_BYTES_MAX = 4000
_ERROR_MAX = 500
"""Characters told: a packet holds them however they are escaped."""

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("mount", "prctl", "setns", "syscall", "umount2", "unshare"):
    getattr(_libc, _name)  # looked up now: each child would do it anew


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class Server:
    """Serves the worker until it closes the socket; ends this process, and so the box, then."""

    def __init__(self, control: socket.socket, init: str, masks: list[str]) -> None:
        self._control = control
        self._init = init
        self._masks = masks
        self._filter = os.pread(_FILTER, 65536, 0)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._armed: _Armed | None = None
        self._put_off: list[tuple[bytes, int, bytes]] = []
        """A request that came while another action ended."""

    def harden(self) -> None:
        """Give up what no action may ever get from us."""
        with open("/proc/sys/user/max_user_namespaces", "w", encoding="ascii") as file:  # noqa: PTH123 - a kernel file
            file.write("0")
        for capability in range(_CAPABILITY_LAST + 1):
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # EINVAL past the kernel's last
        _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def next_action(self, without: list[str]) -> "Action":
        """Return an action, in the process that is to become it."""
        self._tell(_READY, 0, 0, json.dumps(without))
        poll = self._polled()
        while True:
            ready = [_SOCKET] if self._put_off else [descriptor for descriptor, _ in poll.poll()]
            if _SOCKET in ready:
                action = self._obey()
                if action is not None:
                    return action
            else:
                os.read(self._wake_read, 4096)
                self._bury_armed()

    def _obey(self) -> "Action | None":
        verb, number, given = self._put_off.pop() if self._put_off else self._received()
        if verb == _RUN:
            return self._run(number, given)
        if verb == _ARM and (self._armed is None or self._armed.status is not None):
            with contextlib.suppress(OSError):  # the next request tries again and says why not
                return self._arm(number)
        return None

    def _received(self) -> "tuple[bytes, int, bytes]":
        """Return verb, number and descriptors, as they were passed, of the next request."""
        data, passed, _, _ = self._control.recvmsg(_REQUEST.size, _PASSED_SPACE)
        if not data:
            os._exit(0)  # process 1: the kernel kills all the rest
        verb, number = _REQUEST.unpack(data)
        return verb, number, passed[0][2] if passed else b""

    def _polled(self) -> select.poll:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        return poll

    def _bury_armed(self) -> None:
        """Reap a waiting child that was killed, as all is when another's action is cleared away.

        At once: process 1 of its namespace cannot end before its child has been reaped by us. How
        it ended is kept: it may have had its orders, of which we are told but have not heard yet.
        """
        if self._armed is not None:
            self._armed.reap()

    def _arm(self, number: int = 0) -> "Action | None":
        """Fork a child that waits for what it is to be; returns an ``Action`` in the child only.

        ``number``: of the request whose sender is to have the way to it.
        """
        if self._armed is not None:
            self._armed.close()
            self._armed = None
        errors, errors_write = os.pipe2(os.O_CLOEXEC)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        init = pid = -1
        try:
            _checked(_libc.unshare(_NEW_PID), "unshare")
            init = os.posix_spawn(self._init, [self._init], {})
            pid = os.fork()
            if pid == 0:
                os.close(self._control.detach())
                os.close(ours.detach())
                return Action(theirs, errors_write, self._filter, self._masks)
        finally:
            if pid:  # here, whether or not there is a child
                _checked(_libc.setns(self._pid_namespace, _NEW_PID), "setns")
                theirs.close()
                os.close(errors_write)
            if pid < 0:
                _end(init)
                ours.close()
                os.close(errors)
        self._armed = _Armed(pid=pid, init=init, errors=errors, channel=ours)
        if number:
            self._tell(_ARMED, number, 0, "", ours)
        return None

    def _run(self, number: int, given: bytes) -> "Action | None":
        """Run one action to its end; returns an ``Action`` in the action's own process only.

        ``given``: descriptors for it; where there are none, the waiting child has them already.
        """
        status, said = _NOT_STARTED << 8, "0 no child waited for it"
        try:
            while given and not self._hand_over(given):
                action = self._arm()
                if action is not None:
                    return action
        except OSError as error:
            said = f"{error.errno or 0} {error}"
        for (descriptor,) in _NUMBER.iter_unpack(given):
            os.close(descriptor)
        armed, self._armed = self._armed, None
        if armed is not None:
            status = self._awaited(number, armed)
            said = os.read(armed.errors, _ERROR_BYTES_MAX).decode(errors="replace")
            armed.close()
        self._tell(_EXITED, number, status, said[:_ERROR_MAX])
        return None

    def _hand_over(self, given: bytes) -> bool:
        """Give the waiting child what it is to be; false: there is none, or it was killed."""
        armed = self._armed
        if armed is None or armed.status is not None:
            return False
        try:
            armed.channel.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)])
        except OSError:
            os.kill(armed.init, signal.SIGKILL)
            armed.reap(0)
            return False
        return True

    def _awaited(self, number: int, armed: "_Armed") -> int:
        """Return the wait status of a child, watching for a word to kill it meanwhile."""
        poll = self._polled()
        while True:
            status = armed.reap()
            if status is not None:
                return status
            for descriptor, _ in poll.poll():
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 4096)
                    continue
                request = self._received()
                if request[:2] == (_KILL, number):
                    os.kill(armed.init, signal.SIGKILL)
                elif request[0] == _RUN:  # the worker saw before us that this child is dying
                    self._put_off.append(request)
                    armed.reap(0)

    def _tell(
        self,
        event: bytes,
        number: int,
        status: int,
        text: str,
        channel: socket.socket | None = None,
    ) -> None:
        told = _TOLD.pack(event, number, status) + text.encode()
        socket.send_fds(self._control, [told], [] if channel is None else [channel.fileno()])


class _Armed:
    """A child that waits to be an action, and process 1 of its namespace."""

    def __init__(self, *, pid: int, init: int, errors: int, channel: socket.socket) -> None:
        self.pid = pid
        self.init = init
        self.errors = errors
        self.channel = channel
        """Its orders go in here; the worker has it too."""

        self.status: int | None = None
        """How it ended, once it has."""

    def reap(self, options: int = os.WNOHANG) -> int | None:
        """Return how it ended, all else in its namespace too; ``None``: it lives."""
        if self.status is None:
            reaped, status = os.waitpid(self.pid, options)
            if reaped:
                self.status = status
                _end(self.init)
        return self.status

    def close(self) -> None:
        """Close what we hold of it."""
        self.channel.close()
        os.close(self.errors)


def _end(init: int) -> None:
    """Kill process 1 of an action's namespace, and with it all that is left there."""
    if init > 0:
        os.kill(init, signal.SIGKILL)
        os.waitpid(init, 0)  # returns once every process of the namespace is gone


class Action:
    """What one action is to become, in its own process."""

    def __init__(
        self, channel: socket.socket, errors: int, program: bytes, masks: list[str]
    ) -> None:
        self.spec: dict[str, object] = {}
        self._channel = channel
        self._errors = errors
        self._filter = program
        self._masks = masks

    def confine(self) -> None:
        """Take namespaces, uid and filter; afterwards nothing can be taken back."""
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        os.setsid()
        _checked(_libc.unshare(_NEW_NAMESPACES), "unshare")
        _mount(None, "/", None, _MS["rec"] | _MS_PRIVATE)
        # Mounted elsewhere first: the kernel lets us only while another is in sight, which goes.
        _mount("proc", "/tmp", "proc", _MS["nosuid"] | _MS["nodev"] | _MS["noexec"])  # noqa: S108 - the mount point itself
        _checked(_libc.umount2(b"/proc", _MNT_DETACH), "umount")
        _mount("/tmp", "/proc", None, _MS["move"])  # noqa: S108 - the same
        for mask in self._masks:
            _read_only("/dev/null", mask)
        _read_only("/proc/sys", "/proc/sys")
        os.setgroups([])
        os.setresgid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
        os.setresuid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
        _checked(_libc.syscall(_CAPSET, _CAPABILITY_HEADER, _NO_CAPABILITIES), "capset")
        _checked(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
        self._load_filter()

    def receive(self) -> None:
        """Wait for what it is to be: descriptors, limits, directory."""
        data, passed, _, _ = self._channel.recvmsg(1, _PASSED_SPACE)
        if not data:
            os._exit(0)
        self._channel.detach()  # its number is another's from now on
        descriptors = [descriptor for (descriptor,) in _NUMBER.iter_unpack(passed[0][2])]
        size = os.lseek(descriptors[0], 0, os.SEEK_END)
        self.spec = marshal.loads(os.pread(descriptors[0], size, 0))  # noqa: S302 - of the worker
        self._arrange(descriptors[1:])
        for name, limits in dict(self.spec["rlimits"]).items():  # type: ignore[call-overload]
            resource.setrlimit(int(name), tuple(limits))
        os.chdir(str(self.spec["directory"]))

    def open_door(self) -> None:
        """Open its way out, where it has one: nothing of that stays for the program."""
        if self.spec["door"] is not None:
            way_out.open_door(*self.spec["door"])  # type: ignore[misc]

    def _arrange(self, descriptors: list[int]) -> None:
        """Give the descriptors their numbers; every other one is closed."""
        parked = [_parked(d) for d in (*descriptors, self._errors)]
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


def main() -> "tuple[object, dict[str, object], frozenset[str]]":
    """Serve; returns in an action's process only: what it is to run, and which modules it has."""
    os.closerange(_FILTER + 1, 4096)
    for descriptor in (_SOCKET, _FILTER):
        os.set_inheritable(descriptor, False)
    server = Server(socket.socket(fileno=_SOCKET), sys.argv[1], sys.argv[3:])
    # Before it hardens: whatever a module does with signals, the server's are set after.
    without = stoker_program.load_ahead([name for name in sys.argv[2].split(",") if name])
    server.harden()
    stoker_program.open_streams()
    ours = stoker_program.names_of_modules()
    gc.collect()
    gc.freeze()
    action = server.next_action(without)
    try:
        action.confine()
        action.receive()
        action.open_door()
        found = stoker_program.prepared(action.spec)
        if found is None:
            action.execute()
    except Exception as error:  # noqa: BLE001 - whatever it is, no program runs half confined
        action.failed(error)
    action.ready()
    assert found is not None
    return *found, ours


if __name__ == "__main__":
    # A program may have ones of these names.
    del sys.path[0], sys.modules["stoker_program"], sys.modules["way_out"]
    _code, _globals, _ours = main()
    _ended: BaseException | None = None
    try:
        exec(_code, _globals)  # type: ignore[arg-type]  # noqa: S102 - the box's program, in its box
    except BaseException as _error:  # noqa: BLE001 - whatever ends a program
        _ended = _error
    _status = stoker_program.end_of(_ended, __file__)
    del _code, _globals, _ended
    stoker_program.finish(_status, _ours)
