"""Artifacts: content too large for a row, kept as files under their digest.

Invariants: a file under a digest holds exactly that content or does not exist (written beside,
synced, renamed, directory synced); the same content is stored once; what is read is checked. A
value is stored *before* anything refers to it.
"""

import os
from contextlib import suppress
from pathlib import Path

from stoker.errors import ArtifactDamaged, LedgerStorageFailed
from stoker.model.value import INLINE_BYTES_MAX, Value, content_digest, inline_value
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import declare, reach

_WRITTEN = declare("artifact.written", "a large value lies in a draft file, not yet under its name")
_NAMED = declare("artifact.named", "a large value has its name; nothing refers to it yet")


class ArtifactStore:
    """A directory of content by digest, shared by coordinator and workers of a machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, content: bytes) -> Value:
        """Return a value for ``content``: itself when small, else a file under its digest.

        Raises:
            LedgerStorageFailed: the disk refused; nothing is left of the draft.

        **Durability:** a large value survives a power cut once this returned.
        """
        if len(content) <= INLINE_BYTES_MAX:
            return inline_value(content)
        digest = content_digest(content)
        path = self._path(digest)
        if not path.exists():
            self._write(path, content)
        return Value(digest=digest, size_bytes=len(content))

    def get(self, value: Value) -> bytes:
        """Return the content of ``value``.

        Raises:
            ArtifactDamaged: it is missing or is not what its digest says.
        """
        if value.inline is not None:
            content = value.inline
        else:
            try:
                content = self._path(value.digest).read_bytes()
            except OSError as error:
                raise ArtifactDamaged(
                    f"artifact {value.digest} of {value.size_bytes} bytes cannot be read "
                    f"({error.strerror}); what refers to it cannot go on"
                ) from error
        if len(content) != value.size_bytes or content_digest(content) != value.digest:
            raise ArtifactDamaged(f"artifact {value.digest} does not hold what its digest says")
        return content

    def _path(self, digest: str) -> Path:
        return self._directory / digest[:2] / digest

    def _write(self, path: Path, content: bytes) -> None:
        draft = path.with_name(f".{fresh_id('draft_')}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                view = memoryview(content)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            reach(_WRITTEN)
            draft.rename(path)
            _sync_directory(path.parent)
            _sync_directory(self._directory)
            reach(_NAMED)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            raise LedgerStorageFailed(
                f"a value of {len(content)} bytes could not be stored in {self._directory} "
                f"({error.strerror}); nothing refers to it; free space and try again"
            ) from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
