"""The options that several commands share, so that they read and behave alike."""

from pathlib import Path
from typing import Annotated

import typer

RUNS_DIRECTORY = Path("runs")

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
    str, typer.Argument(metavar="RUN", help="Id of a run, or path of its directory.")
]
RunOption = Annotated[
    str, typer.Option("--run", metavar="RUN", help="Id of a run, or path of its directory.")
]
