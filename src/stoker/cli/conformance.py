"""``stoker conformance``: hold a foreign engine of the ledger to the contract."""

import asyncio
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import JsonOption
from stoker.cli.output import answers, remarks, table, write_json
from stoker.cli.text import cell
from stoker.errors import ConfigInvalid

if TYPE_CHECKING:
    from stoker.testing.conformance import Conformance, MakeEngine

EXIT_BROKEN = 1
_STYLES = {"kept": "green", "broken": "bold red", "not shown": "yellow"}


def conformance(
    engine: Annotated[
        str,
        typer.Option(
            "--engine", metavar="MODULE:CLASS", help="The engine: stoker.testing.engines:Engine."
        ),
    ],
    as_json: JsonOption = False,
) -> int:
    """Try which invariants and capabilities a foreign engine keeps.

    The class is imported from the current directory or the environment and made
    anew, with limits and an empty directory, for each promise of the contract
    (stoker.testing.ledger_contract). What it cannot show, for want of crash() or
    advance(), is said. A power cut is not tried.

    Examples:
      stoker conformance --engine stoker.testing.engines:SqliteEngine
      stoker conformance --engine my_engine:Engine --json

    Exit codes:
      0    it keeps everything that it can show
      1    a promise is broken; the line that failed is named
      2    there is no such class, or it is no engine; nothing was tried
      130  interrupted
    """
    from stoker.testing.conformance import examine

    make = _engine(engine)
    remarks().print("holding it to the contract; a few seconds …")
    found = asyncio.run(examine(make, engine))
    if as_json:
        write_json(found)
    else:
        _show(found)
    return EXIT_BROKEN if found.broken or found.capabilities is None else 0


def _engine(name: str) -> "MakeEngine":
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise ConfigInvalid(f"--engine {name!r} is not MODULE:CLASS; nothing was tried")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigInvalid(f"--engine {name} cannot be imported: {error}") from error
    lacking = [verb for verb in ("open", "close") if not callable(getattr(found, verb, None))]
    if lacking or not isinstance(found, type):
        raise ConfigInvalid(
            f"--engine {name} is no engine: it has no {' and no '.join(lacking) or 'class'}; "
            "see stoker.testing.engines.Engine"
        )
    make: MakeEngine = found
    return make


def _show(found: "Conformance") -> None:
    console = answers()
    said = found.capabilities
    if said is None:
        console.print(cell(f"{found.engine} does not say what it is capable of", "bold red"))
    else:
        console.print(
            cell(
                f"{found.engine}: {said.engine}, {said.durability}, "
                f"values to {said.value_bytes_max} bytes inline, lineage {said.lineage}"
            )
        )
    made = table("invariant", "verdict", "promise")
    for one in found.findings:
        promise = f"{one.promise}: {one.why}" if one.why else one.promise
        made.add_row(cell(one.invariant), cell(one.verdict, _STYLES[one.verdict]), cell(promise))
    console.print(made)
