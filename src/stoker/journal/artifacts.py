"""The artifact store: content too large for a row, in files named by its digest.

Content-addressed, hence idempotent: the same bytes are stored once, whoever puts them. A file
appears under its name only complete and synced (file, rename, directory), so a value may be
submitted the moment ``put`` returns. What is read back is checked against its digest.
"""

import os
from pathlib import Path

from stoker.errors import ArtifactDamaged, ArtifactNotStored
from stoker.model.value import INLINE_BYTES_MAX, Value, content_digest, inline_value
from stoker.seams.disk import make_directories, sync_directory
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import declare, reach, write

WRITE = declare(
    "artifact.write", "an artifact's bytes are about to be written", "torn", "disk_full"
)
RENAME_BEFORE = declare(
    "artifact.rename.before", "an artifact is written but has no name yet", "kill", "disk_full"
)
RENAME_AFTER = declare("artifact.rename.after", "an artifact has its name, not yet on disk")

_HEX_DIGITS = 64


class ArtifactStore:
    """Files of one run, by content address."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, content: bytes) -> Value:
        """Return a value for ``content``, inline when small, else stored as a file.

        Raises:
            ArtifactNotStored: the disk is full or gone; nothing has appeared under the digest.
        **Durability:** content that is not inline is on disk when this returns.
        """
        if len(content) <= INLINE_BYTES_MAX:
            return inline_value(content)
        digest = content_digest(content)
        path = self._path(digest)
        try:
            if not self._holds(path, len(content)):
                self._write(path, content)
        except OSError as error:
            raise ArtifactNotStored(
                f"{len(content)} bytes could not be stored in {self._directory}: {error.strerror}; "
                "nothing of them was kept; free some space on that disk",
                digest=digest,
            ) from error
        return Value(digest=digest, size_bytes=len(content))

    def adopt(self, file: Path, digest: str) -> None:
        """Take over a file on the same disk that holds ``digest``; it is gone from where it was.

        Raises:
            ArtifactNotStored: it could not be kept; nothing has appeared under the digest.
        **Durability:** it is on disk when this returns.
        """
        path = self._path(digest)
        try:
            make_directories(path.parent)
            with file.open("rb") as content:
                os.fsync(content.fileno())
            reach(RENAME_BEFORE)
            file.replace(path)
            reach(RENAME_AFTER)
            sync_directory(path.parent)
        except OSError as error:
            raise ArtifactNotStored(
                f"{file} could not be kept in {self._directory}: {error.strerror}; free some space "
                "on that disk",
                digest=digest,
            ) from error
        finally:
            file.unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        """Return where content lies that is no value of the ledger: a checkpoint's.

        Raises:
            ArtifactDamaged: that is no content address.
        """
        if len(digest) != _HEX_DIGITS or not digest.isalnum():
            raise ArtifactDamaged(f"{digest!r} is no content address; nothing was read")
        return self._path(digest)

    def get(self, value: Value) -> bytes:
        """Return the content of ``value``.

        Raises:
            ArtifactDamaged: it is missing, or is not what its digest says.
        """
        content = value.inline if value.inline is not None else self._read(value)
        if len(content) != value.size_bytes or content_digest(content) != value.digest:
            raise ArtifactDamaged(
                f"artifact {value.digest} holds {len(content)} bytes that do not match its digest "
                f"({value.size_bytes} bytes expected); it was not used; restore the file from a "
                "backup of the run directory",
                digest=value.digest,
            )
        return content

    def _path(self, digest: str) -> Path:
        return self._directory / digest[:2] / digest[2:]

    def _holds(self, path: Path, size_bytes: int) -> bool:
        """Return whether a complete file is there; one of another size is written again."""
        try:
            return path.stat().st_size == size_bytes
        except FileNotFoundError:
            return False

    def _read(self, value: Value) -> bytes:
        if len(value.digest) != _HEX_DIGITS or not value.digest.isalnum():
            raise ArtifactDamaged(f"{value.digest!r} is no content address; nothing was read")
        try:
            return self._path(value.digest).read_bytes()
        except OSError as error:
            raise ArtifactDamaged(
                f"artifact {value.digest} of {value.size_bytes} bytes cannot be read: "
                f"{error.strerror}; look in {self._directory}",
                digest=value.digest,
            ) from error

    def _write(self, path: Path, content: bytes) -> None:
        make_directories(path.parent)
        fresh = path.parent / f".{fresh_id('new_')}"
        try:
            with fresh.open("xb") as file:
                write(WRITE, content, file)
                os.fsync(file.fileno())
            reach(RENAME_BEFORE)
            fresh.replace(path)
            reach(RENAME_AFTER)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
