"""The worker's side of a box's warm server: an interpreter in the box that forks its actions.

The server (``inside/box_server``) runs under a uid of its own, in the box's control group, network
namespace and mounts; the box's programs run under the box's uid and can neither see nor signal it.
Started once a box, it saves each ``python`` action a launcher, the start of an interpreter and the
joining of control groups. What it cannot do exactly as a fresh ``python`` would is left to one.

A server that died (its box ran out of memory, say) fails or limits the action it ran; the next one
is started another.
"""

import asyncio
import contextlib
import json
import marshal
import os
import socket
import struct
from collections.abc import Mapping, Sequence

import msgspec

from stoker.errors import BoxFailed
from stoker.sandbox import kernel
from stoker.sandbox.maker_client import MakerClient, Started
from stoker.sandbox.making import Exited, WorkOrder

SOCKET, FILTER = 3, 4
"""Descriptors of the server; those of its launcher follow."""
_REQUEST, _TOLD = struct.Struct("=cI"), struct.Struct("=cIi")
_RUN, _ARM, _KILL = b"r", b"a", b"k"
_READY, _EXITED = b"r", b"e"
"""What is asked of a server and what it tells: ``inside/box_server``."""
_PLAIN = 2
"""The form of marshal that leaves the interpreter's own strings alone."""
_READY_SECONDS = 30.0
_PACKET_BYTES_MAX = 4096
_KILLED = 9
_INTERPRETERS = ("python", "python3")
_READ_AT_START = frozenset({"PATH", "HOME", "LANG", "LANGUAGE", "TZ"})
_READ_AT_START_PREFIXES = ("PYTHON", "LC_", "LD_", "GLIBC_", "MALLOC_")


def is_warm_form(argv: Sequence[str], *given: Mapping[str, str]) -> bool:
    """Return whether ``argv`` is a start of the interpreter that its server can do as well.

    ``python -c CODE``, ``python -m MODULE`` and ``python FILE``, where no variable is given that an
    interpreter reads when it starts.
    """
    if len(argv) < 2 or argv[0] not in _INTERPRETERS:  # noqa: PLR2004 - a name and a form
        return False
    if argv[1] in ("-c", "-m"):
        if len(argv) < 3 or not argv[2]:  # noqa: PLR2004 - and what to run
            return False
    elif not argv[1] or argv[1].startswith("-"):
        return False
    names = [name for variables in given for name in variables]
    return not any(n in _READ_AT_START or n.startswith(_READ_AT_START_PREFIXES) for n in names)


class WarmOrder(WorkOrder, kw_only=True):
    """How a server starts an action."""

    door: tuple[int, int, str] | None = None
    """Its way out: number of the channel to the egress proxy, then ``Gate.door``; ``None``: it has
    none."""


class Plan(msgspec.Struct, kw_only=True):
    """How the server of a box is started; the descriptors are closed when it has been."""

    order: WorkOrder
    """Of the launcher; its first target is the server's socket, which is passed first."""
    cgroups: list[int]
    mounts: list[int]
    passed: list[int]
    info: int
    """Where the launcher tells its child's process id."""
    go: int
    """Written once that child has its user namespace."""
    python: str
    """The interpreter as the box sees it, for what only a fresh one does right."""
    preload: tuple[str, ...] = ()
    """Modules imported before it serves."""
    maps: tuple[str, str]
    """Uids and gids of the user namespace, as the kernel reads them."""


class WarmServer:
    """The server of one box; starts actions as a maker does."""

    def __init__(
        self, maker: MakerClient, started: Started, control: socket.socket, python: str
    ) -> None:
        self._python = python
        self._maker = maker
        self._started = started
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._number = 0
        """Of the last request."""
        self._arming = 0
        """Of the request for a child that no action has been begun since; 0: none."""
        self._armed: socket.socket | None = None
        """Where a child waits that was forked ahead."""
        self._running: dict[int, Started] = {}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ready.add_done_callback(lambda f: f.cancelled() or f.exception())
        self._own: frozenset[int] = frozenset()
        self.dead = False
        self.without: tuple[str, ...] = ()
        """Why modules were not loaded ahead, one sentence for each."""
        self._loop.add_reader(control.fileno(), self._receive)

    @classmethod
    async def start(cls, maker: MakerClient, plan: Plan) -> "WarmServer":
        """Start a server and wait until it is ready.

        Raises:
            BoxFailed: it did not come up; nothing of it runs.

        **Cancellation:** likewise.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        said = os.memfd_create("said")
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        opened = [*plan.cgroups, *plan.mounts, *plan.passed, null, theirs.detach()]
        server = None
        try:
            passed = [*plan.cgroups, *plan.mounts, opened[-1], *plan.passed]
            started = await maker.spawn(plan.order, [null, null, said], passed)
            server = cls(maker, started, ours, plan.python)
            while opened:
                os.close(opened.pop())
            await server._come_up(plan)
        except BaseException as error:
            if server is None:
                ours.close()
            else:
                await server.close()
            if isinstance(error, OSError | TimeoutError):
                text = os.pread(said, _PACKET_BYTES_MAX, 0).decode(errors="replace").strip()
                raise BoxFailed(f"the box's server did not come up ({text or error})") from error
            raise
        finally:
            for descriptor in (*opened, said, plan.info, plan.go):
                os.close(descriptor)
        return server

    async def _come_up(self, plan: Plan) -> None:
        async with asyncio.timeout(_READY_SECONDS):
            child = await self._child(plan.info)
            for name, content in zip(("uid_map", "gid_map"), plan.maps, strict=True):
                # A process that took this number meanwhile has its maps already: refused.
                _write(f"/proc/{child}/{name}", content)
            self._own = frozenset({await self._started.pid, child})
            os.write(plan.go, b"1")
            await self._ready

    async def _child(self, info: int) -> int:
        """Read what the launcher tells in pieces."""
        os.set_blocking(info, False)
        said = b""
        while b"}" not in said:
            readable = asyncio.Event()
            self._loop.add_reader(info, readable.set)
            try:
                await readable.wait()
            finally:
                self._loop.remove_reader(info)
            piece = os.read(info, _PACKET_BYTES_MAX)
            if not piece:
                raise OSError("its launcher ended")
            said += piece
        return int(json.loads(said)["child-pid"])

    @property
    def has_waiting(self) -> bool:
        """Whether a child waits for the next action."""
        return self._armed is not None

    def own_pids(self) -> frozenset[int]:
        """Return the processes in the box's control group that are no action's."""
        return frozenset() if self.dead else self._own

    async def spawn(
        self, order: WorkOrder, standard: Sequence[int], passed: Sequence[int] = ()
    ) -> Started:
        """Start an action; ``passed`` are the descriptors of ``order.targets``."""
        assert isinstance(order, WarmOrder), "whatever else is the maker's"
        spec = {
            "argv": [os.fsdecode(part) for part in order.argv],
            "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in order.environment.items()},
            "directory": os.fsdecode(order.directory),
            "rlimits": order.rlimits,
            "python": self._python,
            "door": order.door,
        }
        file = kernel.memory_file("spec", marshal.dumps(spec, _PLAIN))
        try:
            self._order([file, *standard, *passed])
        finally:
            os.close(file)
        started = Started(self._number, self._loop)
        self._running[started.number] = started
        started.pid.set_result(0)
        return started

    def _order(self, given: list[int]) -> None:
        """Give what an action begins with to the child that waits, or to the server where none is.

        The server hears first, so that it knows what a child was by the time that it has ended.
        """
        channel, self._armed, self._arming = self._armed, None, 0
        if channel is not None:
            self._send(_RUN, [])
            with channel, contextlib.suppress(OSError):  # it was killed: another begins it
                socket.send_fds(channel, [b"x"], given)
                return
        self._send(_RUN, given)

    def arm(self) -> None:
        """Have the next action forked and confined ahead, now that nothing of the last is left."""
        if not self.dead and self._armed is None:
            with contextlib.suppress(BoxFailed):
                self._send(_ARM, [])
                self._arming = self._number

    async def kill(self, started: Started) -> None:
        """Ask for the end of an action; ``exited`` tells when it is over."""
        if not started.exited.done() and not self.dead:
            with contextlib.suppress(BoxFailed):
                self._send(_KILL, [], started.number)

    def _send(self, verb: bytes, descriptors: list[int], number: int = 0) -> None:
        """Ask for something, under the next number unless it is about an older one."""
        self._number += not number
        # One action at a time: the socket never fills.
        try:
            request = _REQUEST.pack(verb, number or self._number)
            socket.send_fds(self._control, [request], descriptors)
        except OSError as error:
            raise BoxFailed("the box's server is gone; nothing was run") from error

    def _receive(self) -> None:
        try:
            packet, passed, _, _ = socket.recv_fds(self._control, _PACKET_BYTES_MAX, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            packet, passed = b"", []
        if len(packet) < _TOLD.size:
            self._fail()
            return
        event, number, status = _TOLD.unpack_from(packet)
        text = packet[_TOLD.size :].decode(errors="replace")
        for descriptor in passed:
            self._has_armed(number, descriptor)
        if event == _READY:
            self.without = tuple(json.loads(text))
            if not self._ready.done():
                self._ready.set_result(None)
        started = self._running.pop(number, None) if event == _EXITED else None
        if started is not None and not started.exited.done():
            code, _, said = text.partition(" ")
            errno = int(code) if code.isdigit() else 0
            started.exited.set_result(Exited(number, status, 0.0, 0, said, errno))

    def _has_armed(self, number: int, descriptor: int) -> None:
        """Take the channel of a waiting child, unless an action was begun meanwhile: it is its."""
        os.set_inheritable(descriptor, False)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, descriptor)
        channel.setblocking(False)
        if number != self._arming or self._armed is not None:
            channel.close()
            return
        self._armed = channel

    def _fail(self) -> None:
        if self.dead:
            return
        self.dead = True
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        if self._armed is not None:
            self._armed.close()
            self._armed = None
        if not self._ready.done():
            self._ready.set_exception(OSError("it ended"))
        for number, started in self._running.items():
            if not started.exited.done():
                started.exited.set_result(Exited(number, _KILLED, 0.0, 0))
        self._running.clear()

    async def close(self) -> None:
        """End the server and whatever it runs; safe to repeat."""
        self._fail()
        await self._maker.kill(self._started)
        await asyncio.wait([self._started.exited])


def _write(path: str, content: str) -> None:
    # In one call: the kernel takes a map whole or not at all.
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, content.encode())
    finally:
        os.close(descriptor)
