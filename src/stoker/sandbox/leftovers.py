"""Boxes on this machine whose worker is dead and whose state directory nobody comes back to.

A next incarnation over the same state directory sweeps it (``ledger``). Where that directory is
gone, or will not be used again, its boxes' files, mounts and control groups would stay until the
machine is started anew. So each process that makes boxes as root holds a shared lock on a file
named after its state directory's mark; a mark that nobody holds is dead, and what bears it may go.

    python -m stoker.sandbox.leftovers            # say what there is
    python -m stoker.sandbox.leftovers --remove   # and remove it
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stoker.sandbox.host import ROOT_WORK, SandboxHost
from stoker.sandbox.ledger import BoxRecord
from stoker.sandbox.marks import HOSTS, MACHINES, is_held, remove_home

COMMAND = "python -m stoker.sandbox.leftovers --remove"
_BOX_PARTS = 3
"""``stoker.MARK.BOX`` names a control group."""


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """What one dead state directory left on this machine."""

    mark: str
    state_directory: str
    """Where it was, or empty where that is unknown."""
    boxes: tuple[str, ...]
    home: str = ""
    """Of its Smol Machines, which ended with their worker."""


def find(host: SandboxHost) -> list[Leftover]:
    """Return what dead workers of root left; empty for an ordinary user, who leaves it at home."""
    if not host.root:
        return []
    found: dict[str, set[str]] = {}
    for mark, box in _names(host):
        found.setdefault(mark, set()).add(box)
    homes = {home.name: str(home) for home in MACHINES.iterdir()} if MACHINES.is_dir() else {}
    for mark in homes:
        found.setdefault(mark, set())
    return [
        Leftover(
            mark=mark,
            state_directory=_state_of(mark),
            boxes=tuple(sorted(boxes)),
            home=homes.get(mark, ""),
        )
        for mark, boxes in sorted(found.items())
        if not is_held(mark)
    ]


def _names(host: SandboxHost) -> Iterable[tuple[str, str]]:
    if ROOT_WORK.is_dir():
        for entry in ROOT_WORK.iterdir():
            mark, _, box = entry.name.partition(".")
            yield mark, box
    groups = host.tree.find("stoker.") if host.tree is not None else ()
    for name in groups:
        parts = name.split(".", _BOX_PARTS - 1)
        if len(parts) == _BOX_PARTS:
            yield parts[1], parts[2]


def _state_of(mark: str) -> str:
    try:
        return (HOSTS / mark).read_text()
    except OSError:
        return ""


async def remove(host: SandboxHost, leftovers: Iterable[Leftover]) -> int:
    """Kill, unmount and remove; return how many boxes went.

    Raises:
        BoxFailed: something could not be removed; what came before it is gone.
    """
    count = 0
    for leftover in leftovers:
        if is_held(leftover.mark):  # somebody came back to it meanwhile
            continue
        for box in leftover.boxes:
            await host.remove(_record(host, leftover.mark, box))
            count += 1
        await asyncio.to_thread(remove_home, leftover.mark)
        (HOSTS / leftover.mark).unlink(missing_ok=True)
    return count


def _record(host: SandboxHost, mark: str, box: str) -> BoxRecord:
    """Return what a box of this name has, from what lies there."""
    directory = ROOT_WORK / f"{mark}.{box}"
    folders = ("workspace", "tmp", "shm")
    mounts = tuple(str(directory / f) for f in folders if os.path.ismount(directory / f))
    # The host kills what runs under a uid only while it holds that uid's lock itself.
    owner = Path(mounts[0]).lstat().st_uid or None if mounts else None
    return BoxRecord(
        box_id=f"leftover.{mark}.{box}",
        incarnation=host.ledger.incarnation,
        boot_id=host.ledger.boot_id,
        kind="leftover",
        uid=owner,
        group=f"stoker.{mark}.{box}",
        mounts=mounts,
        directory=str(directory),
    )


async def _main(*, removing: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="stoker-leftovers-") as state:
        async with SandboxHost.open(Path(state)) as host:
            leftovers = find(host)
            for leftover in leftovers:
                where = leftover.state_directory or "an unknown state directory"
                machines = " and the home of its Smol Machines" if leftover.home else ""
                sys.stdout.write(f"{len(leftover.boxes)} boxes{machines} of {where}\n")
            if removing:
                sys.stdout.write(f"{await remove(host, leftovers)} boxes removed\n")
            elif not leftovers:
                sys.stdout.write("no boxes of dead workers\n")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Boxes that dead workers left on this machine.")
    parser.add_argument("--remove", action="store_true", help="remove them")
    sys.exit(asyncio.run(_main(removing=parser.parse_args().remove)))
