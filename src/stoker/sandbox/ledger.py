"""The ledger of boxes: one small file per box, written before it is made, removed after it is gone.

A worker that is killed leaves its files behind; the next incarnation over the same state directory
reads them and removes what they name. Whether an incarnation still lives is told by a lock that
ends with its process. Records hold where things are, never what a box contains.

Nothing is synced: what a record must outlive is the death of processes. A power cut ends every
process, mount and control group with it; directories it may leave without a record are *orphans*
and go with the next sweep. Two syncs a box were most of the time it took to make one.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from stoker.seams.clock import boot_id
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import declare, reach, write
from stoker.seams.locks import is_file, lock_is_refused, take_lock, wait_for_lock

BOX_WRITE = declare("box.write", "a box is about to be written down", "torn", "disk_full")
BOX_NOTED = declare("box.noted", "a box is written down and nothing of it exists")
BOX_STRUCK = declare("box.struck", "a box is gone and still written down")

_encoder = msgspec.json.Encoder()


class BoxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one box has on this host."""

    box_id: str
    incarnation: str
    boot_id: str
    kind: str
    """Rung of the box."""
    uid: int | None = None
    """Uid leased to it."""
    server_uid: int | None = None
    """Uid leased to its warm server, or to its launcher."""
    group: str = ""
    """Name of its control group."""
    mounts: tuple[str, ...] = ()
    """Mount points made for it, to be unmounted in reverse."""
    directory: str = ""
    """Directory that holds everything of it."""


class BoxLedger:
    """Boxes of one state directory.

    **Durability:** a record survives the death of any process, not a power cut.
    """

    def __init__(self, state_directory: Path) -> None:
        self._boxes = state_directory / "boxes"
        self._locks = state_directory / "incarnations"
        for directory in (self._boxes, self._locks):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sweep_path = state_directory / "sweep"
        self.incarnation = fresh_id("inc_")
        self.boot_id = boot_id()
        self._lock_path = self._locks / self.incarnation
        while True:
            self._lock = wait_for_lock(self._lock_path)
            if is_file(self._lock_path, self._lock):
                break
            os.close(self._lock)  # another's sweep took the file away before it was locked

    def write(self, record: BoxRecord) -> None:
        """Write a box down before anything of it exists."""
        path = f"{self._boxes}/{record.box_id}"  # as text: done for every box
        try:
            with open(f"{path}.part", "wb", buffering=0) as file:  # noqa: PTH123 - as above
                write(BOX_WRITE, _encoder.encode(record), file)
            os.rename(f"{path}.part", f"{path}.json")  # noqa: PTH104 - as above
            reach(BOX_NOTED)
        except OSError:
            Path(f"{path}.part").unlink(missing_ok=True)
            raise

    def strike(self, box_id: str) -> None:
        """Remove the record of a box that is gone; a record that comes back is swept harmlessly."""
        reach(BOX_STRUCK)
        (self._boxes / f"{box_id}.json").unlink(missing_ok=True)

    def records(self) -> list[BoxRecord]:
        """Return every readable record, ours and others'."""
        found = []
        for path in sorted(self._boxes.glob("*.json")):
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                found.append(msgspec.json.decode(path.read_bytes(), type=BoxRecord))
        return found

    def abandoned(self) -> list[BoxRecord]:
        """Return the records of incarnations that are dead."""
        alive: dict[str, bool] = {self.incarnation: True}
        found = []
        for record in self.records():
            if record.incarnation not in alive:
                alive[record.incarnation] = self._lives(record.incarnation)
            if not alive[record.incarnation]:
                found.append(record)
        return found

    def orphans(self, work: Path) -> list[Path]:
        """Return directories in ``work`` that no record names: a power cut came between."""
        if not work.is_dir():
            return []
        # Looked at before the records are: a box made meanwhile is written down by then.
        found = sorted(work.iterdir())
        named = {Path(record.directory).name for record in self.records()}
        return [path for path in found if path.name not in named]

    def sweeping(self) -> int | None:
        """Return a lock that makes one process sweep at a time, or ``None``: another does."""
        return take_lock(self._sweep_path)

    def forget_dead(self) -> None:
        """Remove lock files of dead incarnations that have no record left."""
        for path in self._boxes.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                if not path.stat().st_size:  # all a power cut left of a record
                    path.unlink()
        needed = {record.incarnation for record in self.records()} | {self.incarnation}
        for path in self._locks.iterdir():
            # Removed while it is locked, so that whoever makes it anew notices.
            if path.name not in needed and (lock := take_lock(path)) is not None:
                path.unlink(missing_ok=True)
                os.close(lock)

    def close(self) -> None:
        """Let the incarnation end; its lock file goes when it left nothing."""
        if not any(record.incarnation == self.incarnation for record in self.records()):
            self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    def _lives(self, incarnation: str) -> bool:
        return lock_is_refused(self._locks / incarnation)
