"""States of guests: their files, carried by the runner and believed in nothing.

The runner gives out the stream of ``states``, or takes one in (``guest.keeping``). Here every
record is checked as it comes (``unpacking.passed``), and no more is taken than the limits of the
box let it hold. So a state of a guest is one of any box, and is named alike.

A guest that says what no box could have written, or another length than it sent, has lied: its link
is broken. Time is bounded by what it may have to carry.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from stoker.errors import BoxFailed
from stoker.model.checkpoint import Checkpoint
from stoker.model.execution import MEBIBYTE, Baseline, ExecutionPolicy, Limits
from stoker.sandbox import branching
from stoker.sandbox.base import Branch
from stoker.sandbox.branching import Beginning, Begun, Makes, bounds_of, unkept
from stoker.sandbox.egress.gate import Egress
from stoker.sandbox.entries import Bounds, Forged, Unkept
from stoker.sandbox.guest.keeping import REFUSED
from stoker.sandbox.placing import EndsEarly, TooMuch
from stoker.sandbox.states import Packed
from stoker.sandbox.undoing import seen_out
from stoker.sandbox.unpacking import check_digest, damaged, passed
from stoker.sandbox.vm.box import GuestBox
from stoker.sandbox.vm.link import Carry, GuestLink, GuestLost, GuestRun

STATE_SECONDS = 60.0
_BYTES_PER_SECOND = 2 * MEBIBYTE
"""The slowest guest that is waited for: an emulated one on a busy host."""
_TOLD_BYTES_MAX = 64 * 1024
_BUFFER_BYTES = 256 * 1024


class _Told(msgspec.Struct, frozen=True):
    """What the runner says of a state that it gave out."""

    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    left_out: Annotated[tuple[str, ...], msgspec.Meta(max_length=20)]


_told = msgspec.json.Decoder(_Told)


class KeptBox(GuestBox):
    """A guest whose files can be kept, and that may have begun in some."""

    def __init__(
        self,
        backend: Makes[Begun],
        box_id: str,
        baseline: Baseline,
        policy: ExecutionPolicy,
        *,
        link: GuestLink,
        remove: Callable[[], Awaitable[None]],
        egress: Egress | None = None,
    ) -> None:
        super().__init__(box_id, baseline, policy, link, remove, egress)
        self.backend = backend
        self.began_from = baseline.digest
        """Digest of the state it began in."""
        self.generation = 0

    async def begin(self, begins: Beginning) -> None:
        """Put a state into this box, in which nothing ran yet.

        Raises:
            ArtifactDamaged: it is not what its digest says; the box is of no use, as after:
            BoxFailed: it could not be put there.
        """
        try:
            await begin_in(self.link, self.policy.limits, begins)
        except GuestLost as lost:
            raise BoxFailed(f"box {self.box_id} was lost as it was to begin: {lost}") from lost
        except OSError as error:
            raise BoxFailed(
                f"box {self.box_id} could not begin in {begins.digest}: {error}"
            ) from error
        if begins.generation:
            self.began_from = begins.digest
        self.generation = begins.generation
        self._interrupted = begins.interrupted

    @property
    def interrupted(self) -> bool:
        """Whether a program was cut short in it, or where it began."""
        return self._interrupted

    async def packed(self, into: BinaryIO) -> Packed:
        """Write its state to ``into``; see ``branching.Keeps``."""
        try:
            return await packed(self.link, self.policy.limits, into)
        except Unkept as why:
            raise unkept(self.box_id, why) from why
        except GuestLost as lost:
            raise BoxFailed(f"box {self.box_id} is lost: {lost}; nothing was kept") from lost
        except OSError as error:
            raise BoxFailed(
                f"the state of box {self.box_id} could not be read or written ({error}); nothing "
                "of it was kept"
            ) from error

    async def checkpoint(self, directory: Path) -> Checkpoint:
        """Write its files as one file named by its digest."""
        self._check()
        return await branching.checkpoint_of(self, directory)

    async def branch(self, count: int) -> tuple[Branch, ...]:
        """Make boxes that begin with its files."""
        self._check()
        return await branching.branches_of(self, count)


async def packed(link: GuestLink, limits: Limits, into: BinaryIO) -> Packed:
    """Write the files of a guest to ``into``.

    Raises:
        Unkept: they cannot be kept whole, by the runner's word; nothing came of it.
        GuestLost: it is gone, or lied.
        OSError: they could not be read, or ``into`` not be written.

    **Cancellation:** ``into`` is left alone before it goes on.
    """
    bounds = bounds_of(limits)

    def take(end: socket.socket) -> Packed:
        with end.makefile("rb", buffering=_BUFFER_BYTES) as source:
            taken = passed(source, into, bounds)
        into.flush()
        return taken

    carried, moved = await _carried(link, bounds, outwards=True, move=take)
    if carried is not None and (why := _failed(carried)):
        if os.waitstatus_to_exitcode(carried.ended.status) == REFUSED:
            raise Unkept(why)
        raise OSError(f"the guest could not give it: {why}")
    if isinstance(moved, Forged):
        raise link.distrust(str(moved))
    if isinstance(moved, Exception):
        raise moved
    assert carried is not None, "it is stopped only when moving failed"
    try:
        told = _told.decode(carried.stdout)
    except msgspec.MsgspecError as error:
        raise link.distrust(str(error)) from error
    if told.size_bytes != moved.size_bytes:
        raise link.distrust(f"a state of {told.size_bytes} bytes, of which {moved.size_bytes} came")
    return moved._replace(left_out=told.left_out)


async def begin_in(link: GuestLink, limits: Limits, begins: Beginning) -> None:
    """Put a state into a guest in which nothing ran yet.

    Raises:
        ArtifactDamaged: it is not what its digest says.
        GuestLost: it is gone.
        OSError: it does not fit, or could not be read or written.
    """
    bounds = bounds_of(limits)
    begins.source.seek(0)

    def give(end: socket.socket) -> Packed:
        with end.makefile("wb", buffering=_BUFFER_BYTES) as into:
            given = passed(begins.source, into, bounds)
        end.shutdown(socket.SHUT_WR)
        return given

    carried, moved = await _carried(link, bounds, outwards=False, move=give)
    if isinstance(moved, Forged):
        raise damaged(begins.digest, moved) from moved
    if isinstance(moved, Packed):
        check_digest(moved.digest, begins.digest)
    if carried is not None and (why := _failed(carried)):
        if os.waitstatus_to_exitcode(carried.ended.status) == REFUSED:
            raise damaged(begins.digest, why)
        raise OSError(why)
    if isinstance(moved, Exception):
        raise moved


def _failed(carried: GuestRun) -> str:
    """Return why the runner's child did not do it, in its own words; empty: it did."""
    ended = carried.ended
    if not ended.status and not ended.reason:
        return ""
    return carried.stderr.decode(errors="replace") or ended.reason or ended.error or "no reason"


async def _carried(
    link: GuestLink, bounds: Bounds, *, outwards: bool, move: Callable[[socket.socket], Packed]
) -> tuple[GuestRun | None, Packed | Exception]:
    """Have the runner carry, and ``move`` in a thread at our end; return how both ended.

    ``None``: the runner was stopped, for ``move`` had failed.

    Raises:
        GuestLost: it is gone.
    """
    ours, theirs = socket.socketpair()
    order = Carry(
        outwards=outwards,
        bounds=(bounds.bytes_max, bounds.entries_max),
        timeout_seconds=STATE_SECONDS + bounds.bytes_max / _BYTES_PER_SECOND,
        output_bytes=_TOLD_BYTES_MAX,
    )
    carrying = asyncio.ensure_future(link.carry(order, theirs.detach()))
    moving = asyncio.ensure_future(asyncio.to_thread(move, ours))

    def moved(done: "asyncio.Future[Packed]") -> None:
        error = done.exception()
        if error is None or (outwards and isinstance(error, EndsEarly)):
            return  # how the runner ends says why
        if outwards and isinstance(error, Forged | TooMuch):
            link.distrust(str(error))
        else:
            carrying.cancel()

    moving.add_done_callback(moved)
    ends: list[asyncio.Future[Any]] = [carrying, moving]
    try:
        await asyncio.wait(ends)
    except asyncio.CancelledError:
        carrying.cancel()
        await seen_out(carrying)
        await seen_out(moving)
        raise
    finally:
        ours.close()
    if link.lost is not None:
        raise GuestLost(str(link.lost))
    error = moving.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return (
        None if carrying.cancelled() else carrying.result(),
        moving.result() if error is None else error,
    )
