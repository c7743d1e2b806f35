"""The host's side of a workspace: files go in and out without ever following the box.

How paths are resolved and what is refused: ``beneath``.
"""

import os
from collections.abc import Mapping

from stoker.errors import ToolRefused
from stoker.model.tools import ExportResult, ReadResult
from stoker.sandbox.beneath import (
    Beneath,
    Refused,
    path_parts,
    read_up_to,
    reason,
    shown,
    text_of,
)


class WorkspaceFiles(Beneath):
    """Reads and writes beneath one directory."""

    def write(self, files: Mapping[str, bytes], *, bytes_max: int) -> None:
        """Write regular files, making parents.

        Raises:
            ToolRefused: a path is unusable or the disk limit is reached; files written before it
                stay.
        """
        total = sum(len(content) for content in files.values())
        if total > bytes_max:
            raise ToolRefused(f"{total} bytes of files are over the disk limit of {bytes_max}")
        for path, content in files.items():
            try:
                self._write_one(path, content)
            except (Refused, OSError) as error:
                raise ToolRefused(f"file {path!r} was not written: {reason(error)}") from error

    def _write_one(self, path: str, content: bytes) -> None:
        descriptor = self.open_to_write(path)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)

    def read(self, path: str, *, bytes_max: int) -> ReadResult:
        """Read one regular file; more than ``bytes_max`` is cut, with the true size said."""
        try:
            descriptor, size = self.open_to_read(path_parts(path))
        except (Refused, OSError) as error:
            return ReadResult(refused=reason(error))
        try:
            content = read_up_to(descriptor, bytes_max)
            return ReadResult(content=content, total_bytes=max(size, len(content)))
        except OSError as error:
            return ReadResult(refused=reason(error))
        finally:
            os.close(descriptor)

    def export(self, paths: tuple[str, ...], *, bytes_max: int) -> ExportResult:
        """Copy regular files; everything else is named with the reason it was refused."""
        copied: dict[str, bytes] = {}
        refused: dict[str, str] = {}
        left = bytes_max
        for parts, problem in self.found(paths):
            if problem:
                refused[shown(parts)] = problem
                continue
            try:
                copied[text_of(parts)] = content = self._copy(parts, left)
                left -= len(content)
            except (Refused, OSError) as error:
                refused[shown(parts)] = reason(error)
        return ExportResult(files=copied, refused=refused)

    def _copy(self, parts: list[bytes], bytes_max: int) -> bytes:
        descriptor, size = self.open_to_read(parts)
        try:
            if size > bytes_max:
                raise Refused("larger than what is left of the export's byte limit")
            content = read_up_to(descriptor, bytes_max + 1)
            if len(content) > bytes_max:
                raise Refused("it grew past the export's byte limit while it was copied")
            return content
        finally:
            os.close(descriptor)
