r"""What programs print: into the host's log file, bounded, and harmless to terminals.

Control characters are written as ``\x1b``: a log is read in terminals sooner or later.
"""

import io
import re
from contextlib import suppress

from stoker.seams.faultpoints import declare, reach

HOST_LOG = declare("host.log.write", "what a program prints is about to be written", "disk_full")

LOG_BYTES_MAX = 16 * 1024 * 1024
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """Return ``text`` with every control character but tab and newline spelled out."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class LogStream(io.TextIOBase):
    """A text stream that writes harmless text to a descriptor, up to a bound."""

    def __init__(self, raw: io.RawIOBase | io.FileIO, bytes_max: int = LOG_BYTES_MAX) -> None:
        super().__init__()
        self._raw = raw
        self._left = bytes_max

    def writable(self) -> bool:
        """Return ``True``."""
        return True

    def write(self, text: str, /) -> int:
        """Write ``text``; beyond the bound nothing, after one line that says so.

        Where the disk is full it is lost: a program that printed must go on as its replay will.
        """
        if self._left > 0:
            encoded = harmless(text).encode(errors="backslashreplace")
            kept = encoded[: self._left]
            self._left -= len(encoded)
            if self._left <= 0:
                kept += b"\n[log full: what this host prints from here on is dropped]\n"
            with suppress(OSError):
                reach(HOST_LOG)
                self._raw.write(kept)
        return len(text)

    def fileno(self) -> int:
        """Return the descriptor underneath."""
        return self._raw.fileno()
