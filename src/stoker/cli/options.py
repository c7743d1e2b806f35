"""The options that several commands share, so that they read and behave alike."""

from pathlib import Path
from typing import Annotated

import typer

RUNS_DIRECTORY = Path("runs")
_COMPLETIONS_MAX = 50


def complete_run(context: typer.Context, incomplete: str) -> list[str]:
    """Return ids of runs below ``--runs`` that begin so, the latest first; never raises.

    Looks at names alone: a shell that completes must not start a process or wait for a disk.
    """
    runs = context.params.get("runs") or RUNS_DIRECTORY
    try:
        found = [
            (record.stat().st_mtime, record.parent.name)
            for record in Path(runs).glob("*/run.json")
            if record.parent.name.startswith(incomplete)
        ]
    except OSError:
        return []
    return [name for _, name in sorted(found, reverse=True)[:_COMPLETIONS_MAX]]


RunsOption = Annotated[
    Path, typer.Option("--runs", metavar="DIR", help="Where runs lie.", show_default=True)
]
ConfigOption = Annotated[
    list[Path] | None,
    typer.Option("--config", metavar="FILE", help="Settings in TOML; may be given again."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting; wins over everything else."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Id of a run, or path of its directory.", autocompletion=complete_run
    ),
]
RunOption = Annotated[
    str,
    typer.Option(
        "--run",
        metavar="RUN",
        help="Id of a run, or path of its directory.",
        autocompletion=complete_run,
    ),
]
