"""``stoker config``: what each setting is and where it came from; whether a file can be used."""

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import ConfigOption, JsonOption, SetOption
from stoker.cli.output import answers, counted, table, write_json
from stoker.cli.text import cell

_HELP = """Settings: values, origins, checks, schema.

Precedence: defaults < TOML (--config FILE) < environment (STOKER_RUN__SEED=1)
< --set KEY=VALUE. Unknown keys are refused with file and line.

Examples:
  stoker config show --config stoker.toml
  stoker config check stoker.toml
  stoker config schema > stoker.schema.json

Exit codes:
  0    the settings can be used
  1    the answer could not be written
  2    a setting is unknown or cannot be used
  130  interrupted
"""

app = typer.Typer(help=_HELP, no_args_is_help=True)


@app.command("show")
def show(config: ConfigOption = None, sets: SetOption = None, as_json: JsonOption = False) -> None:
    """Print every setting with its value and where it came from.

    Values are shown as TOML, with units, and can be copied into a file; secrets
    print as dots. The digest is the one that is recorded with a run.

    Examples:
      stoker config show
      stoker config show --config stoker.toml --set run.seed=7 --json

    Exit codes:
      0    shown
      1    the answer could not be written
      2    a setting is unknown or has a value that cannot be used
      130  interrupted
    """
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
    """Say whether a settings file can be used; exit code 2 and the line when not.

    Checks names, kinds, ranges and what settings say about each other. The
    environment is left aside: the answer is about the file alone.

    Examples:
      stoker config check stoker.toml
      stoker config check stoker.toml --json

    Exit codes:
      0    it can be used
      1    the answer could not be written
      2    it cannot; the message names file, line and what is allowed
      130  interrupted
    """
    from stoker.config.load import load_settings

    resolved = load_settings([file])
    given = [key for key, origin in resolved.origins.items() if origin != "default"]
    if as_json:
        write_json({"file": str(file), "digest": resolved.digest, "set": given})
    else:
        answers().print(
            cell(f"{file}: {counted(len(given), 'setting')}, all usable (digest {resolved.digest})")
        )


@app.command("schema")
def schema(as_json: JsonOption = False) -> None:
    """Print the JSON Schema of a settings file.

    Every key with its kind, range, unit (x-unit), default and meaning, for
    editors that check TOML and for programs that write it. It is JSON with or
    without --json.

    Examples:
      stoker config schema > stoker.schema.json

    Exit codes:
      0    printed
      1    the answer could not be written
      2    the command line cannot be used
      130  interrupted
    """
    from stoker.config.schema import settings_schema

    del as_json  # it is JSON in any case
    write_json(settings_schema())
