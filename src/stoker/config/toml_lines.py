"""Where each key of a TOML file stands: the parser of the standard library does not say.

A scan of the source, good for files that ``tomllib`` accepted: table headers, arrays of tables,
dotted and quoted keys; keys inside an inline table or a multi-line value count as their
enclosing key's line. It never judges the file.
"""

import re
import tomllib

Path = tuple[str, ...]

_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"\s*\[\[?\s*({_DOTTED})\s*\]\]?")
_PAIR = re.compile(rf"\s*({_DOTTED})\s*=")
_TOKEN = re.compile(r'"""|\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|\#[^\n]*|[\[\]{}]', re.MULTILINE)


def key_lines(source: str) -> dict[Path, int]:
    """Return key path → line number, from 1, of every table header and key in ``source``."""
    lines: dict[Path, int] = {}
    table: Path = ()
    waiting = ""
    depth = 0
    for number, line in enumerate(source.splitlines(), start=1):
        rest = line
        if not waiting and depth == 0:
            if header := _HEADER.match(line):
                table = _parts(header[1])
                lines.setdefault(table, number)
                continue
            if pair := _PAIR.match(line):
                lines.setdefault((*table, *_parts(pair[1])), number)
                rest = line[pair.end() :]
        waiting, depth = _after(rest, waiting, depth)
    return lines


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """Return the line of ``path`` or of the nearest key above it."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def _parts(key: str) -> Path:
    parsed: object = tomllib.loads(f"{key} = 0")
    parts: list[str] = []
    while isinstance(parsed, dict):
        (part,) = parsed
        parts.append(part)
        parsed = parsed[part]
    return tuple(parts)


def _after(text: str, waiting: str, depth: int) -> tuple[str, int]:
    """Follow ``text``: which triple quote is open at its end, and how many brackets."""
    position = 0
    while position < len(text):
        if waiting:
            end = text.find(waiting, position)
            if end < 0:
                return waiting, depth
            position, waiting = end + len(waiting), ""
            continue
        token = _TOKEN.search(text, position)
        if token is None:
            break
        position = token.end()
        if token[0] in {'"""', "'''"}:
            waiting = token[0]
        elif token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1
    return waiting, depth
