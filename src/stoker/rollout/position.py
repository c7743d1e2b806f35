"""Where a program stands: file and line for messages, found in frames.

Frames of this room are skipped, so that a message names the user's line and never ours.
"""

import sys
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

_ROOM = str(Path(__file__).parent)
LIBRARIES = frozenset(
    {"asyncio", "anyio", "sniffio", "httpx", "httpcore", "aiohttp", "types", "contextlib"}
)
"""Packages whose frames are not where a program stands."""
WRAPPERS = frozenset({"types", "contextlib"})
"""Those of them that say nothing of what was called."""
_FOREIGN: dict[int, tuple[CodeType, bool]] = {}
"""By identity: equal code objects may come from different files. Holding them keeps ids unique."""


def library(frame: FrameType) -> str | None:
    """Return which of ``LIBRARIES`` ``frame`` belongs to, or ``None``."""
    top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return top if top in LIBRARIES else None


class Place(NamedTuple):
    """One line of a program; turned into text only when a message needs it."""

    code: CodeType | None
    line: int

    def __str__(self) -> str:
        """Return ``repair.py:12 in work``."""
        return _named(self.code, self.line) if self.code is not None else "an unknown line"


def caller() -> Place:
    """Return the innermost line outside this room and the libraries that called into it."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to the stack
    while frame is not None and _foreign(frame):
        frame = frame.f_back
    return Place(frame.f_code, frame.f_lineno) if frame is not None else Place(None, 0)


def standing(coroutine: object) -> str:
    """Return the innermost suspended line of ``coroutine`` that is not ours."""
    place = Place(None, 0)
    inner: object = coroutine
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
        if frame is not None and not _foreign(frame):
            place = Place(frame.f_code, frame.f_lineno)
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
    return str(place)


def _foreign(frame: FrameType) -> bool:
    """Whether ``frame`` is ours or a library's; asked at every verb, hence remembered by code."""
    code = frame.f_code
    known = _FOREIGN.get(id(code))
    if known is None:
        ours = code.co_filename.startswith(_ROOM)
        known = _FOREIGN[id(code)] = (code, ours or library(frame) is not None)
    return known[1]


def library_called(coroutine: object) -> tuple[str, str] | None:
    """Return package and name of the library function that ``coroutine``'s own code awaits."""
    found: tuple[str, str] | None = None
    inner: object = coroutine
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
        if frame is not None:
            top = library(frame)
            if top is None:
                found = None  # the program's code again: what it awaits further in counts
            elif found is None and top not in WRAPPERS:
                found = (top, frame.f_code.co_name)
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
    return found


def raised_at(trace: TracebackType | None, file: str) -> str:
    """Return the innermost line of ``trace`` that lies in ``file``, else the innermost of all."""
    found = last = Place(None, 0)
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_ROOM):
            last = Place(code, trace.tb_lineno)
        if code.co_filename == file:
            found = last
        trace = trace.tb_next
    return str(found if found.code is not None else last)


def executing(frame: FrameType | None, file: str) -> str:
    """Return where a running thread stands: its innermost line in ``file``, else anywhere."""
    innermost = frame
    while frame is not None:
        if frame.f_code.co_filename == file:
            return _named(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return _named(innermost.f_code, innermost.f_lineno) if innermost is not None else "nowhere"


def _named(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}"
