"""An artifact store in memory, for tests and simulation; nothing survives it.

It takes values and gives them back, checked like those of the files. Whole files, which checkpoints
of environments are, it does not hold.
"""

from pathlib import Path

from stoker.errors import ArtifactDamaged, ArtifactNotStored
from stoker.journal.artifacts import ArtifactStore
from stoker.model.value import INLINE_BYTES_MAX, Value, content_digest, inline_value


class MemoryArtifacts(ArtifactStore):
    """Content by its address, in a dictionary."""

    def __init__(self) -> None:
        super().__init__(Path("/memory"))
        self._kept: dict[str, bytes] = {}

    def put(self, content: bytes) -> Value:
        """Return a value for ``content``, inline when small, else kept here."""
        if len(content) <= INLINE_BYTES_MAX:
            return inline_value(content)
        digest = content_digest(content)
        self._kept[digest] = content
        return Value(digest=digest, size_bytes=len(content))

    def adopt(self, file: Path, digest: str) -> None:
        """Refuse: files are not held here.

        Raises:
            ArtifactNotStored: always.
        """
        raise ArtifactNotStored(
            f"{file} was not kept: a store in memory holds no files", digest=digest
        )

    def _read(self, value: Value) -> bytes:
        content = self._kept.get(value.digest)
        if content is None:
            raise ArtifactDamaged(
                f"artifact {value.digest} is not in this store; it lives as long as its process",
                digest=value.digest,
            )
        return content
