"""The run directory and the record that fixes what a run is.

One directory holds everything of a run, so that moving or deleting it is all there is to do:
``run.json`` (this record), ``tasks.jsonl`` (a copy), ``status.json``, ``ledger/``, ``artifacts/``,
``workers/``, ``logs/``. Locks, and what each of several coordinators has, are in ``sharing``.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import RunChanged, RunDirectoryUnusable, RunNotFound
from stoker.model.ids import RunId
from stoker.model.value import content_digest
from stoker.seams.disk import make_directories, sync_directory
from stoker.seams.faultpoints import declare, reach, write

RECORD_WRITE = declare(
    "coordinator.record.write", "what a run is found by is written", "torn", "disk_full"
)
FILE_WRITE = declare(
    "coordinator.file.write", "settings or status are written for readers", "torn", "disk_full"
)
RECORD_RENAME = declare("coordinator.record.rename", "what a run is found by has no name yet")


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What fixes the behaviour of a run; a resume must agree with it."""

    run_id: RunId
    stoker_version: str
    created: float
    """Wall time, seconds since 1970."""
    program: str
    """Absolute path of the program file."""
    program_name: str
    program_version: str
    program_digest: str
    model: str
    """Model spec as given."""
    model_digest: str
    """Digest of the file the spec names, or empty."""
    tasks_digest: str
    tasks_count: int
    settings: dict[str, Any]
    """The resolved tree."""
    settings_digest: str
    restarts: int = 0
    """How often unfinished rollouts were started anew (``--changed restart``)."""
    partitions: int | msgspec.UnsetType = msgspec.UNSET
    """Into how many parts the run is divided; left out where it is not."""

    @property
    def partition_count(self) -> int:
        """Into how many parts the run is divided."""
        return self.partitions or 1


class RunDirectory:
    """Paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.ledger = self.path / "ledger"
        self.artifacts = self.path / "artifacts"
        self.logs = self.path / "logs"
        self.workers = self.path / "workers"
        self.tasks = self.path / "tasks.jsonl"
        self.settings = self.path / "settings.json"
        self.status = self.path / "status.json"
        self._record = self.path / "run.json"

    @property
    def recorded(self) -> bool:
        """Whether a run lies here."""
        return self._record.is_file()

    @property
    def record(self) -> RunRecord:
        """Read the run's record.

        Raises:
            RunNotFound: no run lies here.
        """
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=RunRecord)
        except (OSError, msgspec.MsgspecError) as error:
            raise RunNotFound(f"{self.path} holds no run ({error})") from error

    def create(self) -> None:
        """Make the directories, on disk when this returns.

        Raises:
            RunDirectoryUnusable: they cannot be written.
        """
        made: list[Path] = []
        try:
            for folder in (self.path, self.ledger, self.artifacts, self.logs, self.workers):
                made += make_directories(folder)
        except OSError as error:
            for folder in reversed(made):
                with suppress(OSError):
                    folder.rmdir()
            raise RunDirectoryUnusable(
                f"the run directory {self.path} cannot be made ({error.strerror}); nothing was "
                "started; choose another place with --runs DIR"
            ) from error

    def write_down(self, record: RunRecord, settings: bytes, tasks: bytes | None) -> None:
        """Write what a run is: its settings, its record, and its tasks where it is new.

        Raises:
            RunDirectoryUnusable: the disk is full or gone.
        """
        try:
            if tasks is not None:
                write_atomically(self.tasks, tasks, synced=True)
            write_atomically(self.settings, settings)
            self.write_record(record)
        except OSError as error:
            raise RunDirectoryUnusable(
                f"the run directory {self.path} cannot be written ({error.strerror}); nothing was "
                "started; free some space on that disk"
            ) from error

    def write_record(self, record: RunRecord) -> None:
        """Write ``run.json``; without it the run could not be found after a power cut."""
        encoded = msgspec.json.format(msgspec.json.encode(record))
        write_atomically(self._record, encoded, synced=True)


def write_atomically(path: Path, content: bytes, *, synced: bool = False) -> None:
    """Replace ``path`` by ``content``: a reader sees the old or the new, never half.

    Raises:
        OSError: the disk is full or gone; ``path`` is as it was.
    **Durability:** with ``synced`` it survives a power cut once this returned.
    """
    draft = path.with_name(path.name + ".new")
    with draft.open("wb") as file:
        write(RECORD_WRITE if synced else FILE_WRITE, content, file)
        if synced:
            os.fsync(file.fileno())
            reach(RECORD_RENAME)
    draft.replace(path)
    if synced:
        sync_directory(path.parent)


def changed_settings(before: Any, now: Any, key: str = "") -> list[str]:  # noqa: ANN401 - a tree of JSON values
    """Return the settings that differ between two trees, by key.

    Both values are shown, of a whole table only which side has it.
    """
    if before == now:
        return []
    if isinstance(before, dict) and now is None:
        return [f"{key} (recorded, not given)"]
    if isinstance(now, dict) and before is None:
        return [f"{key} (given, not recorded)"]
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [f"{key} (recorded {before!r}, given {now!r})"]
    found: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        place = f"{key}.{name}" if key else name
        found += changed_settings(before.get(name), now.get(name), place)
    return found


def require_same_tasks(given: Path, record: RunRecord) -> None:
    """Refuse other tasks than the run's own copy holds, which a resume goes on with.

    Raises:
        RunChanged: ``given`` is a file that holds something else.
    """
    if given.is_file() and content_digest(given.read_bytes()) != record.tasks_digest:
        raise RunChanged(
            f"run {record.run_id} was made with other tasks than {given} holds now; nothing was "
            "changed; give it the file it was made with, or start another run with this one"
        )


def find_run(name: str, runs_directory: Path) -> RunDirectory:
    """Return the run called ``name``: an id under ``runs_directory`` or a path.

    Raises:
        RunNotFound: neither holds a run.
    """
    for place in (runs_directory / name, Path(name)):
        if (run := RunDirectory(place)).recorded:
            return run
    records = sorted(runs_directory.glob("*/run.json"), key=lambda p: p.stat().st_mtime)
    known = [record.parent.name for record in reversed(records[-3:])]
    hint = f"; the latest there: {', '.join(known)}" if known else ""
    raise RunNotFound(f"there is no run {name!r} in {runs_directory}{hint}")
