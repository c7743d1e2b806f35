"""``stoker baselines``: root file systems and built workspaces on this machine."""

import asyncio
import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import JsonOption
from stoker.cli.output import answers, size, table, write_json
from stoker.cli.text import cell
from stoker.config.units import size_bytes

if TYPE_CHECKING:
    from stoker.sandbox.baseline_cache import Kept

_NAME_SHOWN = 19
_MADE_OF_SHOWN = 100
_HELP = """What baselines keep on this machine, of this user.

Root file systems unpacked from images, and workspaces made by set-up lines.
Runs build what they need and keep it within sandbox.baselines_max.

Examples:
  stoker baselines list
  stoker baselines prepare /srv/images/app.tar
  stoker baselines prune --to 5GiB

Exit codes:
  0    done
  1    something failed on this machine (a full disk)
  2    the input cannot be used
  130  interrupted
"""

app = typer.Typer(help=_HELP, no_args_is_help=True)


@app.command("list")
def list_baselines(as_json: JsonOption = False) -> None:
    """Show what is kept, the least recently used first.

    Each with what it was made of when it was asked for first: where an image or
    a directory lay, or name, files and set-up lines of a baseline. What living
    boxes are made of is marked; it stays when room is made.

    Examples:
      stoker baselines list
      stoker baselines list --json

    Exit codes:
      0    shown
      1    what is kept cannot be read
      2    an option cannot be used
      130  interrupted
    """
    from stoker.sandbox import runtime
    from stoker.sandbox.baseline_cache import kept

    directory = runtime.default_directory()
    _show(kept(states=directory / "baselines", roots=directory / "roots"), as_json=as_json)


@app.command("prune")
def prune_baselines(
    to: Annotated[
        str, typer.Option("--to", metavar="SIZE", help="Remove until the rest takes this (5GiB).")
    ] = "1B",
    as_json: JsonOption = False,
) -> None:
    """Remove what was not used for longest, and what no living box is made of.

    Whatever goes is built again by the next box that needs it.

    Examples:
      stoker baselines prune
      stoker baselines prune --to 5GiB

    Exit codes:
      0    what could go is gone; what went is shown
      1    something could not be removed
      2    the size cannot be read; nothing was removed
      130  interrupted; the next prune goes on
    """
    from stoker.sandbox import runtime
    from stoker.sandbox.baseline_cache import prune

    try:
        most = int(str(size_bytes(to)))
    except ValueError as error:
        raise typer.BadParameter(f"--to is {to!r}: {error}") from error
    directory = runtime.default_directory()
    gone = prune(most, states=directory / "baselines", roots=directory / "roots")
    _show(gone, as_json=as_json)


@app.command("prepare")
def prepare_baselines(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Roots or saved images.")],
) -> None:
    """Unpack roots before a run needs them, telling how far it is.

    Nothing is fetched: PATH is an unpacked root file system, an OCI layout, its
    tar, or what docker save wrote. What is unpacked already is found.

    Examples:
      stoker baselines prepare /srv/images/*.tar

    Exit codes:
      0    all of them are there; their digests are shown
      1    the disk is full, or the directory cannot be written
      2    one of them is none, or damaged; those before it are there
      130  interrupted; nothing half-made is left
    """
    asyncio.run(_prepared(paths))


async def _prepared(paths: list[Path]) -> None:
    from stoker.sandbox import runtime
    from stoker.sandbox.roots import Roots

    files = await asyncio.to_thread(runtime.prepare)
    roots = Roots(files.roots, lambda line: typer.echo(line, err=True))
    try:
        for path in paths:
            root = await roots.hold("prepare", str(path.absolute()))
            typer.echo(f"{root.digest}  {path}")
    finally:
        await roots.close()


def _show(found: "list[Kept]", *, as_json: bool) -> None:
    if as_json:
        write_json(found)
        return
    made = table("baseline", "kind", "made of", ">size", "last used", "in use")
    for one in found:
        used = dt.datetime.fromtimestamp(one.used_at).astimezone()
        made.add_row(
            cell(one.name[:_NAME_SHOWN]),
            one.kind,
            cell(one.made_of or "-", length=_MADE_OF_SHOWN),
            size(one.size_bytes),
            used.strftime("%Y-%m-%d %H:%M"),
            "yes" if one.in_use else "",
        )
    answers().print(made if found else "none")
