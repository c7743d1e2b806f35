"""Help texts: every command has a description, examples that parse, and its exit codes."""

import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import typer

from stoker.cli.main import app

WIDTH = 78
"""What fits a terminal of 80 columns between the margins."""
CODES = {"0", "1", "2", "3", "130"}
EVERYWHERE = {"0", "1", "2", "130"}
SECTIONS = ("Examples:", "Exit codes:")


class Command(NamedTuple):
    """One command and how it is typed."""

    typed: str
    click: Any

    @property
    def paragraphs(self) -> list[str]:
        """Its help text, divided at empty lines."""
        return [part for part in str(self.click.help).split("\n\n") if part.strip()]

    def section(self, title: str) -> list[str]:
        """Return the lines below ``title``."""
        (found,) = [part for part in self.paragraphs if part.startswith(title)]
        return [line.strip() for line in found.splitlines()[1:] if line.strip()]


def below(typed: str, click: Any) -> Iterator[Command]:
    yield Command(typed, click)
    for name, child in getattr(click, "commands", {}).items():
        yield from below(f"{typed} {name}", child)


ROOT = typer.main.get_command(app)
COMMANDS = list(below("stoker", ROOT))


def parse(words: list[str]) -> None:
    """Parse a command line as typed, without carrying it out."""
    command: Any = ROOT
    name, *rest = words
    while rest and rest[0] in getattr(command, "commands", {}):
        name, *rest = rest
        command = command.commands[name]
    assert rest or not hasattr(command, "commands"), "a group alone only shows its help"
    assert not hasattr(command, "commands"), f"no such command: {rest[0]}"
    command.make_context(name, rest)


def named(command: Command) -> str:
    return command.typed


def test_the_commands_of_the_design_are_there() -> None:
    typed = {command.typed.removeprefix("stoker ") for command in COMMANDS}
    assert {
        "run", "worker", "status", "show", "export", "replay", "doctor", "ledger check",
        "ledger stats", "ledger backup", "ledger restore", "ledger compact", "ledger dead list",
        "ledger dead show", "ledger dead requeue", "ledger dead drop", "runs prune",
        "baselines list", "baselines prune", "baselines prepare",
        "config show", "config check", "config schema", "bench step",
    } <= typed  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=named)
def test_its_help_says_what_it_does_how_it_is_typed_and_how_it_ends(command: Command) -> None:
    first, description, *rest = command.paragraphs
    assert first.rstrip().endswith("."), "the line that lists of commands show"
    assert not description.startswith(SECTIONS), "a paragraph that says what it does"
    assert [part.splitlines()[0] for part in rest[-2:]] == list(SECTIONS)
    long = [line for line in str(command.click.help).splitlines() if len(line) > WIDTH]
    assert not long, "would be broken in two on a terminal"


@pytest.mark.parametrize("command", COMMANDS, ids=named)
def test_its_examples_can_be_typed(command: Command) -> None:
    examples = command.section("Examples:")
    assert examples
    for example in examples:
        assert example.startswith(command.typed), example
        words, _, _ = example.partition(" > ")
        parse(shlex.split(words))


@pytest.mark.parametrize("command", COMMANDS, ids=named)
def test_its_exit_codes_are_those_of_the_command_line(command: Command) -> None:
    lines = command.section("Exit codes:")
    found = [re.fullmatch(r"(\d+) +(\S.*)", line) for line in lines]
    assert all(found), "a code and what it means"
    codes = [match[1] for match in found if match]
    assert EVERYWHERE <= set(codes) <= CODES
    assert codes == sorted(codes, key=int)


@pytest.mark.parametrize("words", ["nonsense", "run", "show --nonsense x", "export run_1"])
def test_a_line_that_cannot_be_typed_is_not_taken_for_an_example(words: str) -> None:
    with pytest.raises(Exception, match=r"(?i)missing|no such|unexpected"):
        parse(shlex.split(f"stoker {words}"))


def test_an_option_that_takes_answers_as_json_reads_alike_everywhere() -> None:
    helps = {
        parameter.help
        for command in COMMANDS
        for parameter in command.click.params
        if "--json" in getattr(parameter, "opts", ())
    }
    assert helps == {"One JSON document on stdout."}
