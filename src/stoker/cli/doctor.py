"""``stoker doctor``: what this host can enforce, found by trying, and what would fix the rest."""

import asyncio
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from stoker.cli.options import JsonOption
from stoker.cli.output import answers, remarks, table, write_json
from stoker.cli.text import cell
from stoker.sandbox.base import BoxOffer

if TYPE_CHECKING:
    from stoker.sandbox.trials import DoctorReport

EXIT_NOTHING_AVAILABLE = 1
_WHY_CHARACTERS = 160
"""What an engine of somebody else's says goes on for lines."""
_STYLES = {"enforced": "green", "best effort": "yellow", "absent": "red"}


def doctor(
    fix: Annotated[
        bool, typer.Option("--fix", help="Print what would fix what is missing; changes nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Try every kind of isolation on this host: enforced, best effort or absent.

    Boxes are made and each limit is tried on them; nothing is believed from a
    version number. What is missing is named with what would fix it. Nothing on
    the host is changed, with --fix neither.

    Examples:
      stoker doctor
      stoker doctor --fix
      stoker doctor --json

    Exit codes:
      0    at least one kind of isolation works here
      1    none does
      2    the command line cannot be used
      130  interrupted; the boxes it made are gone
    """
    from tempfile import TemporaryDirectory

    from stoker.sandbox.trials import try_host

    remarks().print("trying what this host can enforce; some ten seconds, more for a guest …")
    with TemporaryDirectory(prefix="stoker-doctor-") as state:
        report = asyncio.run(try_host(Path(state)))
    if as_json:
        write_json(report)
    else:
        _show(report, fix=fix)
    return 0 if any(offer.available for offer in report.offers) else EXIT_NOTHING_AVAILABLE


def _show(report: "DoctorReport", *, fix: bool) -> None:
    console = answers()
    facts = table("this host", "has")
    for fact in report.facts:
        facts.add_row(cell(fact.name), cell(fact.value, "green" if fact.ok else "yellow"))
    console.print(facts, "")
    for offer in report.offers:
        console.print(_heading(offer))
        if offer.strengths:
            console.print(_strengths(offer), "")
    leaked = "bold red" if report.leaked else "green"
    console.print(Text.assemble("boxes left behind: ", (str(report.leaked), leaked)))
    remedies = _remedies(report)
    if fix:
        console.print(Text("what would fix the rest", "bold") if remedies else "nothing to fix")
        for remedy in remedies:
            console.print(cell(f"  {remedy}"))
    elif remedies:
        console.print(cell("see what would fix the rest with: stoker doctor --fix", "dim"))


def _heading(offer: BoxOffer) -> Text:
    name = f"{offer.isolation} (rung {offer.rung})"
    if not offer.available:
        why = shorten(offer.missing, _WHY_CHARACTERS, placeholder=" … (all of it with --json)")
        return Text.assemble((name, "bold red"), cell(f"  not available: {why}"))
    kernel = "shares the host's kernel" if offer.shared_kernel else "has its own kernel"
    return Text.assemble((name, "bold green"), f"  available, {kernel}")


def _strengths(offer: BoxOffer) -> Table:
    made = table("limit", "level", "how")
    for strength in offer.strengths:
        style = _STYLES.get(strength.level, "")
        made.add_row(cell(strength.limit), cell(strength.level, style), cell(strength.how))
    return made


def _remedies(report: "DoctorReport") -> list[str]:
    """Say what would make more available, and the strongest available one stronger."""
    found = [f"{fact.name}: {fact.remedy}" for fact in report.facts if fact.remedy]
    found += [
        f"{offer.isolation} (rung {offer.rung}): {offer.remedy}"
        for offer in report.offers
        if offer.remedy and not offer.available
    ]
    strongest = next((offer for offer in report.offers if offer.available), None)
    if strongest is not None:
        found += [
            f"{strength.limit}: {strength.remedy}"
            for strength in strongest.strengths
            if strength.remedy and strength.level != "enforced"
        ]
    return found
