"""Checkpoints and branches of boxes on this host's kernel: what they keep between actions, copied.

A copy needs no layer to outlive its box, gives every branch its own uid, and counts in full against
the branch's own limits. It costs time with the size of the state; a state is packed once for all
branches of one call. No process is taken along, so nothing of a box's randomness or memory is.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol, TypeVar, cast

from stoker.errors import ArtifactDamaged, BoxFailed, ToolRefused
from stoker.model.checkpoint import Checkpoint, StateKind
from stoker.model.execution import Baseline, ExecutionPolicy, Limits
from stoker.sandbox import states
from stoker.sandbox.base import Box, Branch, not_offered
from stoker.sandbox.entries import FOLDERS, Bounds, Unkept
from stoker.sandbox.states import Packed
from stoker.sandbox.undoing import seen_out
from stoker.sandbox.unpacking import unpack
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import declare, reach

if TYPE_CHECKING:
    from stoker.sandbox.local import LocalBox

STATE_WRITTEN = declare("box.state.written", "a checkpoint of a box is a file and has no name yet")
STATE_NAMED = declare("box.state.named", "a checkpoint has its name; nobody was told")

_IN_MEMORY_BYTES_MAX = 8 * 1024 * 1024
_ENTRIES_SPARE = 1000
"""Names above the inodes that a limit allows: other names of the same files."""

T = TypeVar("T")


class Beginning(NamedTuple):
    """The state a box begins in."""

    source: BinaryIO
    """Read from its start."""
    digest: str
    generation: int
    """Of the box it becomes."""
    interrupted: bool = False
    """The box it is from had been interrupted."""


class Keeps(Protocol):
    """A box whose state can be kept."""

    box_id: str
    baseline: Baseline
    policy: ExecutionPolicy
    began_from: str
    generation: int

    @property
    def interrupted(self) -> bool:
        """Whether a program was cut short in it."""
        ...

    @property
    def backend(self) -> "Makes[Begun]":
        """What makes its branches."""
        ...

    async def packed(self, into: BinaryIO) -> Packed:
        """Write its state to ``into``.

        Raises:
            ToolRefused, BoxFailed: as for ``base.Box.checkpoint``.

        **Cancellation:** ``into`` is left alone before it goes on.
        """
        ...


class Begun(Box, Protocol):
    """A box that knows what it began in."""

    generation: int


B_co = TypeVar("B_co", covariant=True)


class Makes(Protocol[B_co]):
    """A backend whose boxes begin empty or in a state."""

    spool: Path
    """Where large states lie, nameless, while they are copied."""

    async def make(
        self,
        box_id: str,
        baseline: Baseline,
        policy: ExecutionPolicy,
        *,
        begins: Beginning | None = None,
    ) -> B_co:
        """Make a box; raises what ``base.Backend.restore`` raises."""
        ...


async def checkpoint_of(box: Keeps, directory: Path) -> Checkpoint:
    """Write the state of ``box`` under its digest in ``directory``; see ``base.Box``."""
    fresh = directory / f".{fresh_id('new_')}"
    try:
        into = await whole(lambda: fresh.open("xb"), lambda opened: opened.close())
        with into:
            packed = await box.packed(into)
        reach(STATE_WRITTEN)
        file, _ = await whole(lambda: _named(fresh, directory / packed.digest), _unlink_named)
    except OSError as error:
        raise BoxFailed(
            f"a checkpoint of box {box.box_id} could not be written to {directory} "
            f"({error.strerror}); nothing of it was kept"
        ) from error
    finally:
        fresh.unlink(missing_ok=True)
    return Checkpoint(
        digest=packed.digest,
        parent=box.began_from,
        generation=box.generation,
        size_bytes=packed.size_bytes,
        file=str(file),
        left_out=packed.left_out,
    )


async def branches_of(box: Keeps, count: int) -> tuple[Branch, ...]:
    """Make ``count`` boxes that begin in the state of ``box``; see ``base.Box``."""
    made: list[Branch] = []
    with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES_MAX, dir=str(box.backend.spool)) as spooled:
        source = cast("BinaryIO", spooled)
        packed = await box.packed(source)
        begins = Beginning(source, packed.digest, box.generation + 1, box.interrupted)
        try:
            for _ in range(count):
                child = await box.backend.make(
                    fresh_id("box_"), box.baseline, box.policy, begins=begins
                )
                made.append(Branch(child, packed.digest, box.began_from, child.generation))
        except BaseException:
            # All of them, whatever becomes of one of them or of us meanwhile.
            ends = asyncio.gather(*(b.box.destroy() for b in made), return_exceptions=True)
            await seen_out(ends)
            raise
    return tuple(made)


async def restored(
    backend: Makes[T], box_id: str, baseline: Baseline, policy: ExecutionPolicy, saved: Checkpoint
) -> T:
    """Make a box that begins in the state of ``saved``; see ``base.Backend``."""
    if saved.kind is not StateKind.FILES:
        raise not_offered(f"restoring checkpoints of {saved.kind}", "namespace and qemu")
    try:
        source = await asyncio.to_thread(Path(saved.file).open, "rb")
    except OSError as error:
        raise ArtifactDamaged(
            f"the checkpoint {saved.digest} cannot be read from {saved.file!r}: {error.strerror}; "
            "nothing was made",
            digest=saved.digest,
        ) from error
    with source:
        begins = Beginning(source, saved.digest, saved.generation + 1)
        return await backend.make(box_id, baseline, policy, begins=begins)


async def begun(
    backend: Makes[T], box_id: str, baseline: Baseline, policy: ExecutionPolicy, state: Path
) -> T:
    """Make a box that begins in the built ``state`` of its baseline."""
    with await opened(baseline.name, state) as source:
        begins = Beginning(source, state.name, 0)
        return await backend.make(box_id, baseline, policy, begins=begins)


async def opened(name: str, state: Path) -> BinaryIO:
    """Open the ``state`` that the baseline of this ``name`` was built to.

    Raises:
        BoxFailed: it was removed since it was found.
    """
    try:
        return await asyncio.to_thread(state.open, "rb")
    except FileNotFoundError as error:
        raise BoxFailed(
            f"the workspace of baseline {name!r} was removed to make room just as a box was to "
            "begin in it; nothing was made; the next box builds it again"
        ) from error


def begin_in(box: "LocalBox", begins: Beginning) -> None:
    """Put a state into a box that was just built; blocking.

    Raises:
        ArtifactDamaged: the source is not what its digest says; the box is of no use.
    """
    begins.source.seek(0)
    with _folders(box.directory) as folders:
        bounds = bounds_of(box.policy.limits)
        unpack(begins.source, folders, box.record.uid, begins.digest, bounds)
    if begins.generation:
        box.began_from = begins.digest
    box.generation = begins.generation
    box.interrupted = begins.interrupted


async def packed_by_host(box: "LocalBox", into: BinaryIO) -> Packed:
    """Write the state of a box of this host's kernel; see ``Keeps.packed``."""
    return await whole(lambda: _packed(box, into), lambda _: None)


def _packed(box: "LocalBox", into: BinaryIO) -> Packed:
    try:
        with _folders(box.directory) as folders:
            packed = states.pack(folders, into, bounds_of(box.policy.limits))
        into.flush()
    except Unkept as error:
        raise unkept(box.box_id, error) from error
    except OSError as error:
        raise BoxFailed(
            f"the state of box {box.box_id} could not be read or written ({error}); nothing of it "
            "was kept"
        ) from error
    if box.leaving:  # what was read may have been in the middle of its removal
        raise BoxFailed(f"box {box.box_id} was removed while its state was taken; nothing was kept")
    return packed


def unkept(box_id: str, why: object) -> ToolRefused:
    """Return the error of a box that holds what cannot be kept."""
    return ToolRefused(
        f"the state of box {box_id} cannot be kept: {why}; the box goes on as it was"
    )


def _named(fresh: Path, file: Path) -> tuple[Path, bool]:
    """Give what was written its name; return it, and whether it was there already."""
    known = file.exists()
    fresh.replace(file)
    reach(STATE_NAMED)
    return file, known


def bounds_of(limits: Limits) -> Bounds:
    """Return how much the state of a box under ``limits`` can hold at most."""
    folders = len(FOLDERS)
    return Bounds(
        bytes_max=folders * limits.disk_bytes,
        entries_max=folders * limits.files_max + _ENTRIES_SPARE,
    )


@contextlib.contextmanager
def _folders(directory: Path) -> Iterator[dict[bytes, int]]:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    opened: dict[bytes, int] = {}
    try:
        for name in FOLDERS:
            opened[name.encode()] = os.open(f"{directory}/{name}", flags)
        yield opened
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _unlink_named(named: tuple[Path, bool]) -> None:
    file, known = named
    if not known:  # an equal state that was kept before is somebody else's
        file.unlink(missing_ok=True)


async def whole(work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Run ``work`` in a thread; when we are cancelled meanwhile, see its end and undo it.

    A thread cannot be cancelled: left alone it would go on with what the caller then tidies up.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await seen_out(task)
        if not task.cancelled() and task.exception() is None:
            undo(task.result())
        raise
