"""Text from agents, made harmless for a terminal.

Everything a model, a tool or a box wrote passes ``clean`` before it is shown. Control characters,
escape sequences, direction overrides, invisible and half characters become visible escapes, so
that no output can move the cursor, hide or reorder what is read, or forge a line. Colours come
only from us: rich markup in such text is shown, never obeyed (``cell``).
"""

import unicodedata

from rich.text import Text

_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_BYTE_MAX = 0xFF
_BASIC_MAX = 0xFFFF
_MARKS_MAX = 4
_ELLIPSIS = "…"


def clean(text: str | bytes, *, lines: bool = False) -> str:
    r"""Return ``text`` with everything that is not visible written as an escape.

    With ``lines``, line feeds and tabs stay; otherwise the result is one line. Bytes are read as
    UTF-8, the rest of them shown as ``\xNN``. Piled-up combining marks are cut at four.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="backslashreplace")
    kept = {"\n", "\t"} if lines else set()
    parts: list[str] = []
    marks = 0
    for character in text:
        if character.isascii() and character.isprintable():
            marks = 0
            parts.append(character)
            continue
        category = unicodedata.category(character)
        marks = marks + 1 if category.startswith("M") else 0
        if marks > _MARKS_MAX:
            continue
        hidden = category in _INVISIBLE and character not in kept
        parts.append(_escape(character) if hidden else character)
    return "".join(parts)


def shorten(text: str | bytes, length: int) -> str:
    """Return ``text`` cleaned to one line of at most ``length`` characters."""
    # What is cut away need not be looked at: a result may be megabytes long.
    beginning = clean(text[: length + 1])
    whole = len(text) <= length and len(beginning) <= length
    return beginning if whole else beginning[: length - 1] + _ELLIPSIS


def excerpt(text: str, *, length: int, lines_max: int) -> str:
    """Return the beginning and the end of ``text``, cleaned, line feeds kept.

    The end gets more: that is where a traceback says what went wrong.
    """
    if len(text) > length:
        half = length // 2
        text = f"{text[:half]}{_ELLIPSIS}\n{_ELLIPSIS}{text[-half:]}"
    lines = clean(text, lines=True).expandtabs(4).rstrip("\n").split("\n")
    if len(lines) > lines_max:
        first = lines_max // 3
        left_out = f"{_ELLIPSIS} {len(lines) - lines_max + 1} lines {_ELLIPSIS}"
        lines = [*lines[:first], left_out, *lines[first + 1 - lines_max :]]
    return "\n".join(lines)


def cell(text: str | bytes, style: str = "", *, length: int | None = None) -> Text:
    """Return cleaned ``text`` as rich text that obeys no markup."""
    return Text(clean(text) if length is None else shorten(text, length), style=style)


def _escape(character: str) -> str:
    code = ord(character)
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    if named is not None:
        return named
    if code <= _BYTE_MAX:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= _BASIC_MAX else f"\\U{code:08x}"
