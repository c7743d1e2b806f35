import io
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stoker.cli.output import answers, counted, plain, table, write_json
from stoker.cli.text import cell, clean, excerpt, shorten

# CASES A10 and its kind: what boxes and models have printed at terminals.
HOSTILE = [
    "\x1b[2J\x1b[H",  # clears the screen
    "\x1b]0;title\x07",  # sets the title
    "\x1b]8;;http://evil\x1b\\link",  # a link that shows something else
    "\x1b[6n\x1b[c",  # makes the terminal answer as if typed
    "a\rb",  # overwrites what stood there
    "a\x08\x08b",
    "\x9b31mred\x9d",  # C1 forms of the same
    "\u202egnp.exe\u2066x\u2069",  # reorders what is read
    "a\u200bb\ufeffc\u2028d\u2029e\U000e0041",  # invisible
    "\ud800 lone \udfff",
    "\x00\x7f",
    "".join(map(chr, range(256))),
]


def assert_harmless(text: str, allowed: str = "") -> None:
    for character in text:
        visible = unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
        assert visible or character in allowed, f"{character!r} reached the terminal"


@pytest.mark.parametrize("text", HOSTILE)
def test_a10_control_characters_of_agents_never_reach_the_terminal(text: str) -> None:
    assert_harmless(clean(text))
    assert_harmless(clean(text, lines=True), allowed="\n\t")
    assert "\n" not in clean(text)


@given(st.text())
def test_nothing_invisible_gets_through(text: str) -> None:
    assert_harmless(clean(text))


@given(st.binary())
def test_bytes_are_shown_whole(content: bytes) -> None:
    assert_harmless(clean(content))


def test_all_256_bytes_can_be_told_apart() -> None:
    shown = clean(bytes(range(256)))
    assert "\\x00" in shown
    assert "\\x1b" in shown
    assert "\\xff" in shown
    assert "~" in shown


def test_what_people_write_stays() -> None:
    for text in ("plain text", "naïve ångström", "日本語 и русский", "🙂 → ✓"):
        assert clean(text) == text
    assert clean("a\n\tb", lines=True) == "a\n\tb"
    assert clean("a\n\tb") == "a\\n\\tb"


def test_piled_up_marks_are_cut() -> None:
    assert clean("e" + "\u0301" * 500 + "x") == "e" + "\u0301" * 4 + "x"


def test_half_a_utf8_character_at_the_cut() -> None:
    assert clean("é".encode()[:1]) == "\\xc3"


def test_shortening_bounds_work_and_length() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("abcd", 3) == "ab…"
    assert shorten("\x1b\x1b", 5) == "\\x1b…"
    assert len(shorten("x" * 50_000_000, 40)) == 40


def test_an_excerpt_keeps_both_ends() -> None:
    text = "\n".join(f"line {number}" for number in range(100))
    shown = excerpt(text, length=2000, lines_max=12).split("\n")
    assert len(shown) == 12
    assert (shown[0], shown[-1]) == ("line 0", "line 99")
    assert shown[4] == "… 89 lines …"
    assert excerpt("a\n\tb\n", length=100, lines_max=12) == "a\n    b"
    long = excerpt("x" * 50_000_000 + "\x1bend", length=100, lines_max=12)
    assert len(long) < 120
    assert long.endswith("\\x1bend")


def rendered(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_markup_of_agents_is_shown_not_obeyed() -> None:
    console = answers()
    console.file = io.StringIO()
    made = table("a", "b")
    made.add_row(cell("[red]x[/red]"), "[link=http://evil]y[/link]")
    console.print(made)
    console.print(":boom: [bold]z")
    shown = rendered(console)
    assert "[red]x[/red]" in shown
    assert "[link=http://evil]y[/link]" in shown
    assert ":boom: [bold]z" in shown


@pytest.mark.parametrize("text", HOSTILE)
def test_json_documents_are_safe_on_a_terminal_and_load(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json({"text": text, "raw": b"\xff\x1b"})
    document = capsys.readouterr().out
    assert all(32 <= ord(character) < 127 or character == "\n" for character in document)
    assert json.loads(document)["text"] == text


def test_fences_are_strings_and_nothing_is_not_a_number() -> None:
    assert plain({"fence": 3 << 40, "big": 2**53 + 1}) == {
        "fence": "3298534883328",
        "big": "9007199254740993",
    }
    assert plain([float("nan"), float("inf"), 1.5, True, None]) == [None, None, 1.5, True, None]
    assert plain(b"\xff") == {"base64": "/w=="}


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (0, "retry", "0 retries"),
        (1, "retry", "1 retry"),
        (2, "journal entry", "2 journal entries"),
        (1, "branch", "1 branch"),
        (2, "branch", "2 branches"),
        (2, "box", "2 boxes"),
        (1, "dead letter", "1 dead letter"),
        (3, "dead letter", "3 dead letters"),
        (2, "byte", "2 bytes"),
    ],
)
def test_a_count_stands_with_its_noun(number: int, noun: str, said: str) -> None:
    assert counted(number, noun) == said
