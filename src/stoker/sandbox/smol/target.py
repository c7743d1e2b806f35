"""Where machines are made when that is not this host: a service that speaks smolfleet's API.

Nothing but the settings chooses it: no variable of the environment, no login of the SDK's own tool.
The key is named by the file it lies in, and read by the process that sends it.
"""

import contextlib
from pathlib import Path

import msgspec

from stoker.seams.entropy import fresh_id


class CloudTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One account of such a service."""

    url: str
    key_file: str
    """Holds the account's key, one line."""
    image: str
    """OCI image that machines begin with; it needs a shell and tar, all else is brought."""

    def problem(self) -> str:
        """Return why the key cannot be had, in a sentence; empty: it can."""
        try:
            words = len(Path(self.key_file).read_text(encoding="ascii").split())
            if words == 1:
                return ""
            # A key that breaks its header is quoted by whatever refuses to send it.
            why = "it holds more than one word" if words else "it is empty"
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not ASCII"
        return f"the key of the account at {self.url} cannot be read from {self.key_file}: {why}"


def place_of(state_directory: Path) -> str:
    """Return what tells machines of this state directory from all others in the account."""
    path = state_directory / "cloud-place"
    with contextlib.suppress(FileExistsError):
        path.symlink_to(fresh_id("p"))  # a link has its words from the first, whoever is killed
    return str(path.readlink())
