"""What a box of a guest keeps between actions, given out and taken in: a child of the runner.

The stream of ``states`` goes through descriptor 3, a private channel. It is run as an action is, so
that it is fed, bounded and ended like one; but as root, and outside the group of the box. On stdout
it tells what it did; on stderr why it did not.
"""

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from stoker.sandbox import kernel
from stoker.sandbox.entries import OPEN_DIRECTORY, Bounds, Forged, Unkept
from stoker.sandbox.guest.program import ERROR_BYTES_MAX, arrange
from stoker.sandbox.placing import place
from stoker.sandbox.states import write_state

DONE, REFUSED, BROKEN = 0, 3, 4
"""How it ends; ``REFUSED``: the state cannot be kept, or what came is none."""
_CHANNEL = 3
_TOGETHER_BYTES = 64 * 1024


class Carried(NamedTuple):
    """What is to be done with which folders."""

    outwards: bool
    folders: Mapping[bytes, str]
    identity: int | None
    bounds: Bounds


def carry(carried: Carried, descriptors: list[int], errors: int) -> NoReturn:
    """Do it in this forked child, ``descriptors`` being its 0, 1, 2 and 3."""
    status = BROKEN
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        arrange(descriptors, errors)
        status = _carried(carried)
    except OSError as error:
        os.write(2, str(error).encode()[:ERROR_BYTES_MAX])
    finally:
        os._exit(status)


def _carried(carried: Carried) -> int:
    try:
        with _opened(carried.folders) as folders:
            if carried.outwards:
                os.write(1, json.dumps(_given(folders, carried.bounds)).encode())
            else:
                with open(_CHANNEL, "rb") as source:
                    place(source, folders, carried.identity, carried.bounds)
    except (Unkept, Forged) as error:
        os.write(2, str(error).encode()[:ERROR_BYTES_MAX])
        return REFUSED
    return DONE


def _given(folders: Mapping[bytes, int], bounds: Bounds) -> dict[str, object]:
    into = _Into(_CHANNEL)
    left_out = write_state(folders, into, bounds)
    into.flush()
    return {"size_bytes": into.size_bytes, "left_out": left_out}


class _Into:
    """Writes a stream to a descriptor, small pieces together."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()
        self.size_bytes = 0

    def write(self, content: bytes, /) -> None:
        """Take all of it."""
        self._waiting += content
        self.size_bytes += len(content)
        if len(self._waiting) >= _TOGETHER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        with memoryview(self._waiting) as view:
            at = 0
            while at < len(view):
                at += os.write(self._descriptor, view[at:])
        self._waiting.clear()


@contextlib.contextmanager
def _opened(folders: Mapping[bytes, str]) -> Iterator[dict[bytes, int]]:
    opened: dict[bytes, int] = {}
    try:
        for name, path in folders.items():
            opened[name] = os.open(path, OPEN_DIRECTORY | os.O_NOFOLLOW)
        yield opened
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
