"""What a runner may say: every frame of a guest is decoded into one of these, or the guest is lost.

Bounds stand in the types; what depends on what was asked is checked where it is used.
"""

from typing import Annotated, Literal

import msgspec

from stoker.sandbox.guest.wire import DOOR_FIRST

COUNT_MAX = 1 << 62
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Words = Annotated[str, msgspec.Meta(max_length=4096)]


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """One header."""


class Ready(_Frame, frozen=True, forbid_unknown_fields=True):
    """The runner has begun."""


class Adopted(_Frame, frozen=True, forbid_unknown_fields=True):
    """The guest is a box of its own now."""


class Output(_Frame, frozen=True, forbid_unknown_fields=True):
    """Bytes of stdout (1) or stderr (2)."""

    stream: Literal[1, 2]


class Channel(_Frame, frozen=True, forbid_unknown_fields=True):
    """Bytes of a private channel; none: its end."""

    stream: Annotated[int, msgspec.Meta(ge=3, le=COUNT_MAX)]


class Connected(_Frame, frozen=True, forbid_unknown_fields=True):
    """A program has connected to the way out; what it says comes by this stream."""

    stream: Annotated[int, msgspec.Meta(ge=DOOR_FIRST, le=COUNT_MAX)]


class Taken(_Frame, frozen=True, forbid_unknown_fields=True):
    """So many bytes of a stream have reached the program."""

    stream: Count
    count: Count


class Ended(_Frame, frozen=True, forbid_unknown_fields=True):
    """The action is over and nothing of it is alive."""

    status: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    """Wait status of the main process."""
    stdout: Count
    stderr: Count
    reason: Literal["", "timeout", "stopped", "cpu", "memory", "pids", "disk", "output"]
    stopped: bool
    """It was ended for ``reason``; else it ended by itself and ``reason`` was found after."""
    cpu_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    memory_peak_bytes: Count
    error: Words
    """Why the program was never reached."""
    errno: Annotated[int, msgspec.Meta(ge=0, le=4095)]


class Written(_Frame, frozen=True, forbid_unknown_fields=True):
    """A file stands, or why not."""

    refused: Words | None


class Content(_Frame, frozen=True, forbid_unknown_fields=True):
    """Bytes of the file that the next ``File`` names."""


class File(_Frame, frozen=True, forbid_unknown_fields=True):
    """One file of an answer is complete, or was refused."""

    name: Annotated[str, msgspec.Meta(max_length=65536)]
    size: Count
    refused: Words | None


class Done(_Frame, frozen=True, forbid_unknown_fields=True):
    """The answer is complete."""


Said = (
    Ready | Adopted | Output | Channel | Connected | Taken | Ended | Written | Content | File | Done
)
decoder: msgspec.json.Decoder[Said] = msgspec.json.Decoder(Said)
