"""``stoker config``: what each setting is and where it came from; whether a file can be used."""

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import ConfigOption, JsonOption, SetOption
from stoker.cli.output import answers, table, write_json
from stoker.cli.text import cell

app = typer.Typer(help="Settings: values, origins, checks.", no_args_is_help=True)


@app.command("show")
def show(config: ConfigOption = None, sets: SetOption = None, as_json: JsonOption = False) -> None:
    """Print every setting with its value and where it came from."""
    from stoker.config.load import load_settings, process_environment
    from stoker.config.show import rows

    resolved = load_settings(config or [], process_environment(), sets or [])
    found = rows(resolved)
    if as_json:
        write_json({"digest": resolved.digest, "settings": found})
        return
    made = table("setting", "value", "origin")
    for row in found:
        style = "" if row.origin == "default" else "bold"
        made.add_row(cell(row.key, style), cell(row.value, style), cell(row.origin, "dim"))
    answers().print(made)


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Settings in TOML.")],
    as_json: JsonOption = False,
) -> None:
    """Say whether a settings file can be used; exit code 2 and the line when not."""
    from stoker.config.load import load_settings

    resolved = load_settings([file])
    given = [key for key, origin in resolved.origins.items() if origin != "default"]
    if as_json:
        write_json({"file": str(file), "digest": resolved.digest, "set": given})
    else:
        answers().print(
            cell(f"{file}: {len(given)} settings, all usable (digest {resolved.digest})")
        )


@app.command("schema")
def schema(as_json: JsonOption = False) -> None:
    """Print the JSON Schema of a settings file."""
    from stoker.config.schema import settings_schema

    del as_json  # it is JSON in any case
    write_json(settings_schema())
