"""The helper that starts boxes: ``python -m stoker.sandbox.maker FD``.

A small single-threaded process of its own, since a worker with threads must never fork. It knows
two verbs (``making``), runs no worker code and dies with the worker, taking its children along:
by end of file on its socket, and by the kernel's parent-death signal.

The child, between fork and exec: joins its cgroups (writing ``0`` to descriptors that root opened,
so no pid is ever named), leads a session of its own, takes its limits, becomes the leased uid,
gives up new privileges, closes every other descriptor and execs with the environment it was given.
"""

import _signal  # type: ignore[import-not-found]  # its wrapper makes enums: more pages to copy
import contextlib
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import sys
from typing import NamedTuple, NoReturn

import msgspec

from stoker.sandbox import kernel
from stoker.sandbox.making import (
    DESCRIPTORS_MAX,
    PACKET_BYTES_MAX,
    Exited,
    Kill,
    Spawn,
    Spawned,
    ToMaker,
    WorkOrder,
)
from stoker.sandbox.places import Namespaces, enter

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToMaker] = msgspec.msgpack.Decoder(ToMaker)
_orders = msgspec.msgpack.Decoder(WorkOrder)

_LEFT_TO_THE_WORKER = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)
"""Ignored by the maker: Ctrl-C reaches the whole terminal group, and the worker decides."""

_STANDARD = 3
_PARKED_FROM = 200
"""Descriptors are moved up here before they take their final numbers."""
_EXIT_NOT_STARTED = 127
_ERROR_BYTES_MAX = 4096


class _Child:
    """One process that was started and not yet reaped."""

    def __init__(self, number: int, errors: int, *, keeper: bool) -> None:
        self.number = number
        self.errors = errors
        self.keeper = keeper


class _Spare(NamedTuple):
    """A child forked ahead that waits for its order: the fork is most of what a start costs us."""

    pid: int
    errors: int
    hand_over: socket.socket


class Maker:
    """Serves one worker until it closes its socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, _Child] = {}
        self._namespaces = Namespaces()
        self._spare: _Spare | None = None
        gc.freeze()  # else every collection in a child copies pages it shares with us
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        """Answer until end of file, then kill every child."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._reap()
                elif not self._receive():
                    self._end_all()
                    return

    def _receive(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._control, PACKET_BYTES_MAX, DESCRIPTORS_MAX
            )
        except ConnectionError:
            return False
        if not data:
            return False
        request = _decoder.decode(data)
        if isinstance(request, Spawn):
            self._spawn(request, descriptors)
        elif isinstance(request, Kill):
            self._kill(request.number)
        for descriptor in descriptors:
            os.close(descriptor)
        if self._spare is None:
            self._fork_ahead()  # now that no pipe of an action is left for it to hold open
        return True

    def _spawn(self, request: Spawn, descriptors: list[int]) -> None:
        order = _orders.decode(_read_all(descriptors[0]))
        short = self._namespaces.short(order.place) if order.place else None
        spare, self._spare = self._spare, None
        if spare is None or not self._handed_over(spare, descriptors, short):
            errors, errors_write = os.pipe2(os.O_CLOEXEC)
            try:
                pid = os.fork()
            except OSError as error:  # too many processes; those that run are not to die of it
                os.close(errors)
                os.close(errors_write)
                status = _EXIT_NOT_STARTED << 8
                self._send(Exited(request.number, status, 0.0, 0, str(error), error.errno or 0))
                return
            if pid == 0:
                _become(order, descriptors[1:], errors_write, short)
            os.close(errors_write)
        else:
            pid, errors = spare.pid, spare.errors
        self._children[pid] = _Child(request.number, errors, keeper=order.keeper)
        self._send(Spawned(request.number, pid))

    def _handed_over(self, spare: _Spare, descriptors: list[int], short: int | None) -> bool:
        """Give an order to the waiting child; false when it is gone, and then cleared away."""
        passed = [*descriptors, *([] if short is None else [short])]
        try:
            with spare.hand_over:
                socket.send_fds(spare.hand_over, [b"x"], passed)
        except OSError:
            os.close(spare.errors)
            return False
        return True

    def _fork_ahead(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors, errors_write = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:  # the next order is forked when it comes, or says why not
            for end in (ours, theirs):
                end.close()
            os.close(errors)
            os.close(errors_write)
            return
        if pid == 0:
            for end in (ours, self._control):
                end.close()
            _wait_and_become(theirs, errors_write)
        theirs.close()
        os.close(errors_write)
        self._spare = _Spare(pid, errors, ours)

    def _kill(self, number: int) -> None:
        for pid, child in self._children.items():
            if child.number == number:
                # A keeper cleans up on SIGTERM; killing it would orphan what it watches.
                os.kill(pid, signal.SIGTERM if child.keeper else signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if self._spare is not None and pid == self._spare.pid:
                os.close(self._spare.errors)
                self._spare.hand_over.close()
                self._spare = None
            if child is None:
                continue  # an orphan that came to us as the nearest subreaper
            error = os.read(child.errors, _ERROR_BYTES_MAX).decode(errors="replace")
            os.close(child.errors)
            code, _, text = error.partition(" ")
            self._send(
                Exited(
                    child.number,
                    status,
                    usage.ru_utime + usage.ru_stime,
                    usage.ru_maxrss * 1024,
                    text,
                    int(code) if code.isdigit() else 0,
                )
            )

    def _send(self, message: Spawned | Exited) -> None:
        with contextlib.suppress(ConnectionError):
            self._control.send(_encoder.encode(message))

    def _end_all(self) -> None:
        if self._spare is not None:
            os.kill(self._spare.pid, signal.SIGKILL)
        keepers = [pid for pid, child in self._children.items() if child.keeper]
        for pid, child in self._children.items():
            os.kill(pid, signal.SIGTERM if child.keeper else signal.SIGKILL)
        for pid in keepers:
            os.waitpid(pid, 0)


def _read_all(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


# --- in the child ---------------------------------------------------------------------------


def _wait_and_become(hand_over: socket.socket, errors: int) -> NoReturn:
    """Wait for an order in a child that was forked ahead."""
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, _signal.SIGKILL)
        _signal.set_wakeup_fd(-1)
        data, descriptors, _, _ = socket.recv_fds(hand_over, 1, DESCRIPTORS_MAX)
        if data:
            order = _orders.decode(_read_all(descriptors[0]))
            mounts = len(order.place.targets) if order.place else 0
            known = 1 + _STANDARD + order.cgroups + mounts + len(order.targets)
            short = descriptors[known] if len(descriptors) > known else None
            _become(order, descriptors[1:known], errors, short)
    finally:
        os._exit(_EXIT_NOT_STARTED)


def _become(order: WorkOrder, descriptors: list[int], errors: int, short: int | None) -> None:
    """Turn this forked child into the ordered process; never returns."""
    try:
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, _signal.SIGKILL)
        os.setsid()
        if order.keeper:
            _keep_above()
        standard, rest = descriptors[:_STANDARD], descriptors[_STANDARD:]
        for descriptor in rest[: order.cgroups]:
            os.write(descriptor, b"0")
        rest = rest[order.cgroups :]
        if order.place is not None:
            mounts = len(order.place.targets)
            enter(short, rest[:mounts], order.place.targets)
            rest = rest[mounts:]
        errors = _arrange([*standard, *rest], order.targets, errors)
        for name, (soft, hard) in order.rlimits.items():
            resource.setrlimit(name, (soft, hard))
        _drop(order)
        os.chdir(order.directory)
        if order.landlock is not None:
            kernel.landlock(*order.landlock)
        if order.seccomp:
            kernel.load_seccomp(order.seccomp)
        _reset_signals()
        os.execvpe(order.argv[0], order.argv, order.environment)  # noqa: S606 - the ordered program
    except OSError as error:
        os.write(errors, f"{error.errno or 0} {error}".encode()[:_ERROR_BYTES_MAX])
    finally:
        os._exit(_EXIT_NOT_STARTED)


def _arrange(descriptors: list[int], targets: list[int], errors: int) -> int:
    """Give descriptors their numbers, close all others; return the new number of ``errors``."""
    wanted = [0, 1, 2, *targets]
    # Parked on any free number above, never a fixed one: dup2 onto the number a descriptor already
    # has is refused, and which numbers are taken depends on how many children are alive.
    parked = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _PARKED_FROM)
        for descriptor in [*descriptors, errors]
    ]
    top = max(wanted)
    final_errors = os.dup2(parked.pop(), top + 1, inheritable=False)
    for descriptor, number in zip(parked, wanted, strict=True):
        os.dup2(descriptor, number, inheritable=True)
    keep = {*wanted, final_errors}
    for number in range(top):
        if number not in keep:
            with contextlib.suppress(OSError):
                os.close(number)
    kernel.close_from(final_errors + 1)
    return final_errors


def _drop(order: WorkOrder) -> None:
    if order.identity is not None:
        os.setgroups([])
        os.setresgid(order.identity, order.identity, order.identity)
        os.setresuid(order.identity, order.identity, order.identity)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        # A change of identity clears the parent-death signal.
        kernel.prctl(kernel.PR_SET_PDEATHSIG, _signal.SIGKILL)
    if order.refuse_root and 0 in (os.getuid(), os.geteuid()):
        raise PermissionError(1, "a box is never started as root; this is a bug, please report it")
    if order.user_namespace is not None:
        kernel.enter_user_namespace(order.user_namespace)
        os.close(order.user_namespace)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, _signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)


def _reset_signals() -> None:
    # Python ignores the first two, we the others; an ignored signal would stay so over exec.
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ, *_LEFT_TO_THE_WORKER):
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])


# --- keeper: a subreaper above one process, where there is no cgroup ---------------------------


def _keep_above() -> None:
    """Fork once more: the child goes on, the parent stays above it and outlives its leavings."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGTERM])
    pid = os.fork()
    if pid == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        return
    kernel.close_from(0)
    status = _watch(pid)
    _kill_descendants()
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else _EXIT_NOT_STARTED)


def _watch(pid: int) -> int:
    while True:
        received = signal.sigwait([signal.SIGCHLD, signal.SIGTERM])
        if received == signal.SIGTERM:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
        while True:
            try:
                reaped, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 0
            if reaped == 0:
                break
            if reaped == pid:
                return status


def _kill_descendants() -> None:
    """Kill until nothing is left: an orphan of a killed process becomes our own child."""
    while True:
        for pid in _children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:  # noqa: PTH123 - a kernel file
        return [int(word) for word in file.read().split()]


def main() -> None:
    """Serve the socket whose descriptor is the first argument."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in _LEFT_TO_THE_WORKER:
        signal.signal(number, signal.SIG_IGN)
    Maker(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
