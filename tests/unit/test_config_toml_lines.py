import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stoker.config.load import flat
from stoker.config.toml_lines import key_lines, line_of

KEYS = st.text("abc-_9", min_size=1, max_size=4) | st.sampled_from(['"a b"', "'#x'", '"="', '"["'])
VALUES = st.sampled_from(
    [
        "1",
        "'#'",
        '"]"',
        '"a\\"b"',
        "[1, 2]",
        "[ # note ]\n 1,\n]",
        '"""\nx = 1\n[y]\n"""',
        "'''\n'''",
    ]
)
COMMENTS = st.sampled_from(["", "  # [t] x = 1", ' # """'])


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[tuple[str, ...], int]]:
    """Return a TOML text and where each of its values begins."""
    lines: list[str] = []
    expected: dict[tuple[str, ...], int] = {}
    for table in draw(st.lists(KEYS, max_size=4, unique_by=bare)):
        prefix: tuple[str, ...] = (f"t{bare(table)}",)
        lines.append(f"[ {quoted('t' + bare(table))} ]{draw(COMMENTS)}")
        for key in draw(st.lists(KEYS, max_size=4, unique_by=bare)):
            expected[(*prefix, bare(key))] = len(lines) + 1
            lines += f"{key} = {draw(VALUES)}{draw(COMMENTS)}".split("\n")
        lines += [""] * draw(st.integers(0, 2))
    return "\n".join(lines), expected


def bare(key: str) -> str:
    return key.strip("\"'")


def quoted(key: str) -> str:
    return f'"{key}"'


@given(documents())
def test_every_key_is_found_where_it_stands(made: tuple[str, dict[tuple[str, ...], int]]) -> None:
    text, expected = made
    parsed: dict[str, Any] = tomllib.loads(text)
    lines = key_lines(text)
    assert {path for path in flat(parsed) if len(path) > 1} == set(expected)
    for path, line in expected.items():
        assert line_of(lines, path) == line, text
