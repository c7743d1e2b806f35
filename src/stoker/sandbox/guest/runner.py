"""The runner: process 1 of a guest. Takes orders from the host, one action at a time.

    python -m stoker.sandbox.guest.runner DEVICE             # in a guest
    python -m stoker.sandbox.guest.runner --directory DIR    # here, on descriptor 0, to try it

It is trusted as little as anything else in the guest: what it says is checked on the host
(``link``). What it promises is what a program of the box must not be able to prevent: limits, an
end of every process, true counts, exact bytes.
"""

import gc
import json
import math
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from stoker.sandbox import entries, kernel
from stoker.sandbox.beneath import Beneath, Refused, path_parts, reason, shown, text_of
from stoker.sandbox.guest.action import Action, Bounds
from stoker.sandbox.guest.counters import Group
from stoker.sandbox.guest.door import Door
from stoker.sandbox.guest.keeping import Carried, carry
from stoker.sandbox.guest.place import Directory, Guest, Limits, Place, SharedGuest
from stoker.sandbox.guest.program import Program, become
from stoker.sandbox.guest.wire import BODY_BYTES_MAX, ORDER_BYTES_MAX, Frames, frame

_READ_BYTES = 64 * 1024
_WAITING_BYTES_MAX = 512 * 1024
_UNCONNECTED_SECONDS = 0.002
_SCHED_RESET_ON_FORK = 0x40000000

Ready = Callable[[], object]


class Runner:
    """Serves one port until it closes."""

    def __init__(self, port: int, place: Place, *, ends: bool) -> None:
        self._port, self._place, self._ends = port, place, ends
        self._selector = selectors.DefaultSelector()
        self._readers: dict[int, Ready | None] = {}
        self._writers: dict[int, Ready | None] = {}
        self._out = bytearray()
        self._frames = Frames(ORDER_BYTES_MAX)
        self._group: Group | None = None
        self._files: Beneath | None = None
        self._action: Action | None = None
        self._writing: tuple[int, str | None] | None = None
        """The file being written, -1 once it was refused, and why."""
        self._pulled: Iterator[None] | None = None
        """Sends a long answer piece by piece, as the port takes it."""
        wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.reads(wake, lambda: os.read(wake, 4096))
        os.set_blocking(port, False)
        self.reads(port, self._receive)

    def serve(self) -> None:
        """Work until the port closes."""
        self.send("ready")
        while self._port >= 0:
            self._flush()
            timeout = self._action.tick() if self._action is not None else None
            for key, events in self._selector.select(timeout):
                for happened, handlers in (
                    (selectors.EVENT_READ, self._readers),
                    (selectors.EVENT_WRITE, self._writers),
                ):
                    ready = handlers.get(key.fd)
                    if events & happened and ready is not None:
                        ready()
            self._reap()
        if self._action is not None:
            self._action.abandon(_reap_all)

    # --- the loop, as an action sees it ---------------------------------------------------------

    def reads(self, descriptor: int, ready: Ready | None) -> None:
        """Call ``ready`` while it can be read; ``None``: no more."""
        self._readers[descriptor] = ready
        self._select(descriptor)

    def writes(self, descriptor: int, ready: Ready | None) -> None:
        """Call ``ready`` while it can be written; ``None``: no more."""
        self._writers[descriptor] = ready
        self._select(descriptor)

    def forget(self, descriptor: int) -> None:
        """Watch it no more."""
        self._readers.pop(descriptor, None)
        self._writers.pop(descriptor, None)
        self._select(descriptor)

    def _select(self, descriptor: int) -> None:
        events = (selectors.EVENT_READ if self._readers.get(descriptor) else 0) | (
            selectors.EVENT_WRITE if self._writers.get(descriptor) else 0
        )
        known = descriptor in self._selector.get_map()
        if known and events:
            self._selector.modify(descriptor, events)
        elif known:
            self._selector.unregister(descriptor)
        elif events:
            self._selector.register(descriptor, events)

    def send(self, kind: str, body: bytes = b"", **fields: object) -> None:
        """Send a frame to the host, as soon as the port takes it."""
        self._out += frame(kind, body, **fields)

    def _flush(self) -> None:
        while True:
            if self._pulled is not None and len(self._out) < _WAITING_BYTES_MAX:
                if next(self._pulled, self) is self:
                    self._pulled = None
                continue
            if not self._out:
                self.writes(self._port, None)
                return
            try:
                count = os.write(self._port, self._out)
            except BlockingIOError:
                self.writes(self._port, self._nothing)
                return
            except OSError:
                self._port = -1
                return
            del self._out[:count]

    def _nothing(self) -> None:
        """Wake up only: the loop flushes."""

    def _receive(self) -> None:
        try:
            data = os.read(self._port, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            for header, body in self._frames.feed(data):
                self._obey(json.loads(header), body)
        elif self._ends:
            self._port = -1
        else:
            time.sleep(_UNCONNECTED_SECONDS)  # a fork whose host has not come yet

    # --- orders ---------------------------------------------------------------------------------

    def _obey(self, order: dict[str, Any], body: bytes) -> None:
        getattr(self, "_do_" + order.pop("kind"))(body, **order)

    def _do_adopt(self, entropy: bytes, *, name: str, wall_ns: int, **limits: int) -> None:
        self._place.renew(name=name, wall_ns=wall_ns, entropy=entropy)
        if self._group is not None:  # a branch: what it was branched off has made it
            self._place.refurnish(self._group, Limits(**limits))
            self.send("adopted")
            return
        self.send("adopted")
        self._flush()  # the host goes on while the box is made
        self._group = self._place.furnish(Limits(**limits))
        self._files = Beneath(self._place.workspace, self._place.identity)

    def _do_run(self, _: bytes, **order: Any) -> None:  # noqa: ANN401 - JSON of the host
        assert self._group is not None, "the host adopts first"
        program = Program(
            argv=[os.fsencode(a) for a in order["argv"]],
            environment={
                os.fsencode(name): os.fsencode(value)
                for name, value in order["environment"].items()
            },
            directory=f"{self._place.workspace}/{order['directory']}",
            rlimits={name: tuple(bounds) for name, bounds in order["rlimits"].items()},
            identity=self._place.identity,
            system_calls=self._place.system_calls,
            authorities=order["authorities"],
        )
        self._action = Action(
            self,
            self._group,
            partial(become, program, self._group.join),
            Bounds(order["timeout_seconds"], order["cpu_seconds"], order["output_bytes"]),
            channels=order["channels"],
            full=self._place.full,
            door=Door(self, order["door"]) if order["door"] else None,
        )

    def _do_carry(
        self, _: bytes, *, outwards: bool, bounds: list[int], timeout_seconds: float,
        output_bytes: int, channels: int,
    ) -> None:  # fmt: skip
        """Give the files of the box out, or take them in."""
        assert self._group is not None, "the host adopts first"
        place = self._place
        carried = Carried(outwards, place.folders, place.identity, entries.Bounds(*bounds))
        self._action = Action(
            self,
            self._group,
            partial(carry, carried),
            Bounds(timeout_seconds, math.inf, output_bytes),
            channels=channels,
            full=lambda: False,  # what is taken in may fill it to the last byte
        )

    def _do_input(self, body: bytes, *, stream: int) -> None:
        if self._action is not None and (found := self._action.stream(stream)) is not None:
            found.give(body)

    def _do_taken(self, _: bytes, *, stream: int, count: int) -> None:
        if self._action is not None and (found := self._action.stream(stream)) is not None:
            found.taken(count)

    def _do_stop(self, _: bytes) -> None:
        if self._action is not None:
            self._action.stop("stopped")

    def _reap(self) -> None:
        """Take the dead; when the main one is among them, the action is over."""
        action, ended = self._action, None
        while (found := _waited()) is not None:
            if action is not None and found[0] == action.pid:
                ended = found[1]
        if action is not None and ended is not None:
            self._action = None
            action.finish(ended, _reap_all)

    def _do_write(self, body: bytes, *, path: str, more: bool) -> None:
        assert self._files is not None, "the host adopts first"
        descriptor, refused = self._writing or (-1, None)
        try:
            if self._writing is None:
                descriptor = self._files.open_to_write(path)
            view = memoryview(body)
            while view and refused is None:
                view = view[os.write(descriptor, view) :]
        except (Refused, OSError) as error:
            refused = reason(error)
        self._writing = (descriptor, refused)
        if not more:
            if descriptor >= 0:
                os.close(descriptor)
            self._writing = None
            self.send("written", refused=refused)

    def _do_read(self, _: bytes, *, path: str, bytes_max: int) -> None:
        self._pulled = self._sent_file(path, bytes_max)

    def _do_export(self, _: bytes, *, paths: list[str], bytes_max: int) -> None:
        self._pulled = self._sent_all(paths, bytes_max)

    def _sent_file(self, path: str, bytes_max: int) -> Iterator[None]:
        assert self._files is not None, "the host adopts first"
        try:
            descriptor, size = self._files.open_to_read(path_parts(path))
        except (Refused, OSError) as error:
            self.send("file", name=path, refused=reason(error), size=0)
        else:
            yield from self._sent(descriptor, bytes_max)
            self.send("file", name=path, refused=None, size=size)
        self.send("done")

    def _sent_all(self, paths: list[str], bytes_max: int) -> Iterator[None]:
        assert self._files is not None, "the host adopts first"
        left = bytes_max
        for parts, problem in self._files.found(paths):
            refused, size = problem, 0
            name = shown(parts)
            try:
                if not refused:
                    name = text_of(parts)
                    descriptor, size = self._opened(parts, left)
                    # What it grows by meanwhile is not taken.
                    yield from self._sent(descriptor, size)
                    left -= size
            except (Refused, OSError) as error:
                refused = reason(error)
            self.send("file", name=name, refused=refused or None, size=size)
            yield
        self.send("done")

    def _opened(self, parts: list[bytes], bytes_max: int) -> tuple[int, int]:
        assert self._files is not None, "the host adopts first"
        descriptor, size = self._files.open_to_read(parts)
        if size > bytes_max:
            os.close(descriptor)
            raise Refused("larger than what is left of the export's byte limit")
        return descriptor, size

    def _sent(self, descriptor: int, bytes_max: int) -> Iterator[None]:
        left = bytes_max
        try:
            while left and (data := os.read(descriptor, min(left, BODY_BYTES_MAX))):
                left -= len(data)
                self.send("content", data)
                yield
        finally:
            os.close(descriptor)


def _waited() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _reap_all() -> None:
    while _waited() is not None:
        pass


def _protect() -> None:
    """Let no program of the box outrun the runner or have it killed for want of memory."""
    os.sched_setscheduler(0, os.SCHED_FIFO | _SCHED_RESET_ON_FORK, os.sched_param(10))
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123 - a kernel file
        file.write("-1000")


def main() -> None:
    """Serve the device, or descriptor 0 beneath a directory."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()
    if sys.argv[1] == "--directory":
        Runner(0, Directory(sys.argv[2]), ends=True).serve()
        return
    _protect()
    Runner(os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY), Guest(), ends=False).serve()


def serve_guest(port: int) -> None:
    """Serve a guest in which process 1 is another's, until ``port`` closes."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()
    _protect()
    Runner(port, SharedGuest(), ends=True).serve()


if __name__ == "__main__":
    main()
