"""Backups of a run: one tar file that holds everything a resume needs, and the way back.

In it: ``backup.json`` (what it is, with digests), the run's own small files, what was asked of it
from outside (``cancels``, ``branches``), ``ledger/ledger.db`` (a marked copy) and every artifact,
since journals name large values by digest alone. Artifacts are added after the database was copied,
and each was on disk before anything named it, so none that the copy names is missing. Not in it:
program, model, logs, workers' homes.
"""

import io
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import msgspec

import stoker
from stoker.broker.base import Durability, LedgerLimits
from stoker.broker.copying import copy_database, mark
from stoker.broker.place import DATABASE
from stoker.broker.service import LedgerService
from stoker.broker.store_sqlite import SqliteStore
from stoker.coordinator.record import RunDirectory
from stoker.errors import BackupInvalid, RunDirectoryUnusable
from stoker.seams.clock import SystemClock, boot_id
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import declare, reach

BACKUP_WRITE = declare("backup.write", "a backup is about to be written", "disk_full")
RESTORE_WRITE = declare(
    "restore.write", "a file of a backup is about to be written back", "disk_full"
)

FORMAT = 2
"""2: with requests."""
_CONTENTS = "backup.json"
_LEDGER = f"ledger/{DATABASE}"
_SMALL = ("run.json", "tasks.jsonl", "settings.json")
_REQUESTS = re.compile(r"cancels/cnl_[0-9a-f]{12}\.json|branches/brn_[0-9a-f]{12}\.(?:json|taken)")
_ARTIFACT = re.compile(r"artifacts/([0-9a-f]{2})/([0-9a-f]{62})")
_CHUNK = 1024 * 1024


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """First member of a backup."""

    format: int
    stoker_version: str
    run_id: str
    lineage: str
    at: float
    """Wall time, seconds since 1970."""
    files: dict[str, str]
    """Name → digest of its content; artifacts are named by theirs."""


class BackedUp(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds."""

    file: str
    run_id: str
    lineage: str
    database_bytes: int
    artifacts: int
    artifact_bytes: int


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What was made of a backup."""

    directory: str
    run_id: str
    copied_from: str
    """Lineage of the ledger that was backed up."""
    lineage: str
    """Of the restored one."""
    artifacts: int


async def back_up(run: RunDirectory, file: Path) -> BackedUp:
    """Write a backup of ``run``, living or not, into the new file ``file``.

    Raises:
        RunDirectoryUnusable: ``file`` exists or cannot be written, or the run has no ledger.
    **Cancellation:** nothing is left behind. **Durability:** the file is on disk when this returns.
    """
    _require_new(file)
    try:
        with TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as draft:
            return await _back_up(run, file, Path(draft))
    except OSError as error:
        raise RunDirectoryUnusable(
            f"the backup {file} cannot be written ({error.strerror or error}); nothing was kept"
        ) from error


def _require_new(file: Path) -> None:
    if file.exists():
        raise RunDirectoryUnusable(f"{file} exists; nothing was written; choose another name")


async def _back_up(run: RunDirectory, file: Path, draft: Path) -> BackedUp:
    database = draft / DATABASE
    small = {name: run.path / name for name in _SMALL if (run.path / name).is_file()}
    small |= _requests(run.path)  # before the ledger: it has all that they name
    await copy_database(run.ledger, database)
    facts = mark(database)
    members = {**small, _LEDGER: database}
    contents = Contents(
        format=FORMAT,
        stoker_version=stoker.__version__,
        run_id=run.record.run_id,
        lineage=facts.lineage,
        at=SystemClock().now().wall,
        files={name: _digest(path) for name, path in members.items()},
    )
    count = size = 0
    reach(BACKUP_WRITE)
    with (draft / "tar").open("wb") as raw, tarfile.open(fileobj=raw, mode="w") as tar:
        _add(tar, _CONTENTS, msgspec.json.format(msgspec.json.encode(contents)))
        for name, path in members.items():
            tar.add(path, name, recursive=False, filter=_nobodys)
        for name, path in _artifacts(run.artifacts):
            tar.add(path, name, recursive=False, filter=_nobodys)
            count += 1
            size += path.stat().st_size
    _sync(draft / "tar")
    (draft / "tar").replace(file)
    _sync(file.parent)
    return BackedUp(
        file=str(file),
        run_id=contents.run_id,
        lineage=facts.lineage,
        database_bytes=facts.size_bytes,
        artifacts=count,
        artifact_bytes=size,
    )


def restore(file: Path, directory: Path) -> Restored:
    """Make a run of the backup ``file`` in the new directory ``directory``.

    Its ledger has a new lineage: workers and coordinators of the one that was backed up are
    refused, actions in workers' hands decided anew, unfinished external ones are ambiguous.

    Raises:
        BackupInvalid: ``file`` is no backup, or damaged; nothing was kept.
        RunDirectoryUnusable: ``directory`` is taken or cannot be written.
    **Durability:** the run is on disk when this returns.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RunDirectoryUnusable(
            f"{directory} exists and is not empty; nothing was restored; choose another directory"
        )
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as draft:
            place = Path(draft) / "run"
            contents, artifacts = _unpack(file, place)
            lineage = _open_copy(place / "ledger")
            run = RunDirectory(place)
            run.create()
            _sync_tree(place)
            place.replace(directory)
        _sync(directory.parent)
    except OSError as error:
        raise RunDirectoryUnusable(
            f"{directory} cannot be restored ({error.strerror or error}); nothing was kept"
        ) from error
    return Restored(
        directory=str(directory),
        run_id=contents.run_id,
        copied_from=contents.lineage,
        lineage=lineage,
        artifacts=artifacts,
    )


def _open_copy(ledger: Path) -> str:
    """Open the copied ledger once, which renews its lineage, and return that."""
    service = LedgerService(SqliteStore(ledger / DATABASE), LedgerLimits(), Durability.POWER_SAFE)
    with closing(service):
        service.open(SystemClock().now(), boot_id=boot_id(), lineage=fresh_id("lin_"))
        return service.lineage


def _unpack(file: Path, place: Path) -> tuple[Contents, int]:
    try:
        with tarfile.open(file, mode="r:") as tar:
            return _unpacked(tar, file, place)
    except FileNotFoundError as error:
        raise BackupInvalid(f"there is no backup {file}; nothing was restored") from error
    except tarfile.TarError as error:
        raise BackupInvalid(f"{file} is no backup ({error}); nothing was restored") from error


def _unpacked(tar: tarfile.TarFile, file: Path, place: Path) -> tuple[Contents, int]:
    contents: Contents | None = None
    seen: set[str] = set()
    artifacts = 0
    for member in tar:
        source = tar.extractfile(member) if member.isreg() else None
        if source is None:
            raise BackupInvalid(f"{file} holds {member.name!r}, which is no plain file; {_NOTHING}")
        if contents is None:
            contents = _contents(source, member.name, file)
            continue
        artifact = _ARTIFACT.fullmatch(member.name)
        expected = "".join(artifact.groups()) if artifact else contents.files.get(member.name, "")
        known = member.name in {*_SMALL, _LEDGER} or _REQUESTS.fullmatch(member.name)
        if not artifact and not known:
            raise BackupInvalid(f"{file} holds {member.name!r}, which no backup has; {_NOTHING}")
        if _write(source, place / member.name) != expected:
            raise BackupInvalid(f"{member.name} of {file} is damaged; {_NOTHING}; use another one")
        seen.add(member.name)
        artifacts += artifact is not None
    if contents is None or not contents.files.keys() <= seen:
        raise BackupInvalid(f"{file} is cut short; {_NOTHING}; use another one")
    return contents, artifacts


_NOTHING = "nothing was restored"


def _contents(source: IO[bytes], name: str, file: Path) -> Contents:
    try:
        found = msgspec.json.decode(source.read(), type=Contents) if name == _CONTENTS else None
    except msgspec.MsgspecError:
        found = None
    if found is None:
        raise BackupInvalid(f"{file} is no backup of a run; {_NOTHING}")
    if found.format > FORMAT:
        raise BackupInvalid(
            f"{file} has backup format {found.format} and this is stoker {stoker.__version__}, "
            f"which reads up to {FORMAT}; {_NOTHING}; use stoker {found.stoker_version} or newer"
        )
    return found


def _requests(directory: Path) -> dict[str, Path]:
    """Return what was asked from outside and the marks of what was taken in.

    A request is never torn, and nothing of it goes away.
    """
    found = {str(path.relative_to(directory)): path for path in sorted(directory.glob("*/*_*"))}
    return {name: path for name, path in found.items() if _REQUESTS.fullmatch(name)}


def _artifacts(directory: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(directory.glob("*/*")):
        name = f"artifacts/{path.parent.name}/{path.name}"
        if _ARTIFACT.fullmatch(name):  # what is half-written has another name
            yield name, path


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Take names of users out: they mean nothing elsewhere."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _digest(path: Path) -> str:
    hashed = blake2b(digest_size=32)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest()


def _write(source: IO[bytes], target: Path) -> str:
    """Write a member and return the digest of its content."""
    target.parent.mkdir(parents=True, exist_ok=True)
    hashed = blake2b(digest_size=32)
    reach(RESTORE_WRITE)
    with target.open("xb") as file:
        while chunk := source.read(_CHUNK):
            hashed.update(chunk)
            file.write(chunk)
    return hashed.hexdigest()


def _sync_tree(place: Path) -> None:
    for path in place.rglob("*"):
        _sync(path)
    _sync(place)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
