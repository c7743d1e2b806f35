"""What every backend with checkpoints and branches must show; run in this process or a user's."""

from pathlib import Path
from typing import NamedTuple

from stoker.model.checkpoint import Checkpoint
from stoker.model.execution import Baseline, ExecutionPolicy, Limits, Rung
from stoker.model.tools import LimitKind, RunRequest
from stoker.sandbox.entries import MAGIC, Entry, encode
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBackend, LocalBox
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.sandbox.vm.keeping import KeptBox
from support import sandbox

PATIENCE = 90.0
"""Seconds: only reached when something hangs."""
FILLED = """
import os, socket
os.makedirs("deep/down", exist_ok=True)
open("deep/down/data", "wb").write(bytes(range(256)) * 4)
open("tool", "w").write("#!/bin/sh\\necho ran\\n")
os.chmod("tool", 0o4755)
os.symlink("/etc/passwd", "out")
os.symlink("nowhere", b"\\xff\\n-dangling")
os.link("tool", "deep/again")
os.mkfifo("pipe")
socket.socket(socket.AF_UNIX).bind("talk")
with open("sparse", "wb") as file:
    file.truncate(3_000_000)
    file.seek(1_000_000)
    file.write(b"middle")
os.mkdir("closed")
open("closed/inside", "w").write("kept")
os.chmod("closed/inside", 0)
os.chmod("closed", 0)
os.mkdir("half")
open("half/inside", "w").write("kept")
os.chmod("half", 0o400)
open(os.path.join(os.environ["TMPDIR"], "left"), "w").write("tmp")
"""
LOOKED = """
import os, stat
assert open("deep/down/data", "rb").read() == bytes(range(256)) * 4
assert os.stat("tool").st_mode & 0o7777 == 0o755, oct(os.stat("tool").st_mode)
assert os.stat("tool").st_uid == os.getuid()
assert os.readlink("out") == "/etc/passwd" and os.readlink(b"\\xff\\n-dangling") == b"nowhere"
assert os.stat("deep/again").st_ino == os.stat("tool").st_ino
assert stat.S_ISFIFO(os.stat("pipe").st_mode)
assert not os.path.exists("talk")
with open("sparse", "rb") as file:
    assert os.fstat(file.fileno()).st_size == 3_000_000
    assert os.fstat(file.fileno()).st_blocks * 512 < 1_000_000
    file.seek(1_000_000)
    assert file.read(6) == b"middle"
assert os.stat("half").st_mode & 0o7777 == 0o400
assert os.stat("closed").st_mode & 0o7777 == 0
os.chmod("closed", 0o700)
assert os.stat("closed/inside").st_mode & 0o7777 == 0
os.chmod("closed/inside", 0o600)
assert open("closed/inside").read() == "kept"
os.chmod("closed/inside", 0)
os.chmod("closed", 0)
print("as it was")
"""
FILLER = """
import os
with open("filler", "wb") as file:
    while True:
        file.write(b"x" * 65536)
"""


def crafted(*entries: Entry, content: bytes = b"") -> bytes:
    """Return a stream with ``entries``, whatever they say."""
    whole = MAGIC
    for entry in entries:
        record = encode(entry)
        whole += len(record).to_bytes(4) + record
    return whole + content


def entry(kind: str, *parts: bytes, folder: bytes = b"workspace", **fields: object) -> Entry:
    """Return one record."""
    return Entry(folder, parts, kind, 0o777, 0, **fields)  # type: ignore[arg-type]


FORGED = {
    "climbing": crafted(entry("directory", b"..", b"..", b"out")),
    "a slash in a name": crafted(entry("directory", b"../../out")),
    "no name": crafted(entry("directory")),
    "through a link": crafted(
        entry("link", b"a", target=b"/etc"), entry("file", b"a", b"stoker-was-here")
    ),
    "another name of a file outside": crafted(
        entry("link", b"a", target=b"/etc"), entry("same", b"b", target=b"a/passwd")
    ),
    "a folder of its own": crafted(entry("directory", b"x", folder=b"../etc")),
    "a device": crafted(entry("device", b"x")),
    "extents out of order": crafted(
        entry("file", b"x", size_bytes=9, extents=((4, 1), (0, 1))), content=b"ab"
    ),
    "another name, climbing": crafted(
        entry("same", b"b", target=b"../../../../../../../../etc/passwd")
    ),
    "a name twice": crafted(entry("directory", b"x"), entry("directory", b"x")),
    "beneath nothing": crafted(entry("file", b"x", b"y")),
    "beneath a file": crafted(entry("file", b"x"), entry("file", b"x", b"y")),
    "a size below nothing": crafted(entry("file", b"x", size_bytes=-1)),
    "a size over everything": crafted(entry("file", b"x", size_bytes=(1 << 64) - 1)),
    "an extent over everything": crafted(
        entry("file", b"x", extents=(((1 << 64) - 2, 1),)), content=b"a"
    ),
    "an extent of nothing": crafted(entry("file", b"x", extents=((0, 0),))),
    "cut short": crafted(entry("file", b"x", size_bytes=9, extents=((0, 9),)), content=b"ab"),
    "a record without end": MAGIC + b"\xff\xff\xff\xff",
    "no stream": b"PK\x03\x04 something else",
    "nothing": b"",
}


def names_in(directory: Path) -> list[str]:
    """Return what lies in ``directory``, in order."""
    return sorted(path.name for path in directory.iterdir())


Kept = LocalBox | KeptBox
Keeping = LocalBackend | QemuBackend


class Traits(NamedTuple):
    """What differs between kinds of boxes."""

    walled: bool
    """Its disk is a wall, not watched: else best effort, and said so."""
    keeps_tmp: bool
    """Its ``/tmp`` is not as old as an action."""


async def ran(box: Kept, source: str) -> str:
    """Run Python in ``box`` and return what it printed; anything but success fails the test."""
    request = RunRequest(argv=("python", "-c", source))
    result = (await box.run(request, timeout_seconds=PATIENCE)).result
    assert result.ok, result.text
    return result.stdout.kept.decode()


async def holds(state: Path, rung: Rung) -> None:
    """Try the contract of checkpoint, branch and restore on ``rung``."""
    saves = state / "saves"
    saves.mkdir()
    async with SandboxHost.open(state / "boxes") as host:
        backend = sandbox.backend_of(host, rung)
        policy = sandbox.policy_of(rung, sandbox.SMALL)
        fresh = rung in (Rung.DELEGATED, Rung.USER_NAMESPACE)
        traits = Traits(rung in sandbox.OWN_UID, not fresh)
        await holds_in(backend, policy, saves, traits)
        await backend.close()
        assert host.leaked() == 0, "something was left behind"
        assert not host.alive


async def holds_in(
    backend: Keeping, policy: ExecutionPolicy, saves: Path, traits: Traits
) -> Checkpoint:
    """Try the contract on a backend; return a checkpoint of what ``FILLED`` makes."""
    box = await backend.create("box_first", Baseline(), policy)
    await ran(box, FILLED)
    await _branches(backend, box, traits)
    saved = await _saved(backend, box, policy, saves)
    await _bounded(box, traits, policy.limits)
    await box.destroy()
    return saved


async def _branches(backend: Keeping, box: Kept, traits: Traits) -> None:
    before = set(backend.boxes)
    first, second = await box.branch(2)
    assert first.digest == second.digest
    assert (first.parent, first.generation) == (box.baseline.digest, 1)
    one, two = (backend.boxes[branch.box.box_id] for branch in (first, second))
    assert len({box.box_id, one.box_id, two.box_id}) == 3
    records = backend.host.ledger.records()
    uids = [r.uid for r in records if r.box_id in (box.box_id, one.box_id, two.box_id)]
    assert uids == [None] * 3 or len(set(uids)) == 3
    assert await ran(one, LOOKED) == "as it was\n"
    temporary = "import os; print(open(os.path.join(os.environ['TMPDIR'], 'left')).read())"
    if traits.keeps_tmp:
        assert await ran(one, temporary) == "tmp\n"
    await ran(one, "open('deep/down/data', 'w').write('other'); open('mine', 'w').write('1')")
    assert await ran(two, LOOKED) == "as it was\n"
    assert "mine" not in await ran(box, "import os; print(os.listdir())")
    (deeper,) = await one.branch(1)
    assert (deeper.parent, deeper.generation) == (first.digest, 2)
    await one.destroy()
    assert await ran(backend.boxes[deeper.box.box_id], "print(open('mine').read())") == "1\n"
    for other in set(backend.boxes) - before:
        await backend.boxes[other].destroy()


async def _saved(backend: Keeping, box: Kept, policy: ExecutionPolicy, saves: Path) -> Checkpoint:
    saved = await box.checkpoint(saves)
    assert saved == await box.checkpoint(saves), "equal states, equal checkpoints"
    assert names_in(saves) == [saved.digest]
    assert (saved.parent, saved.generation) == (box.baseline.digest, 0)
    assert saved.left_out == ("workspace/talk: a socket",)
    back = await backend.restore("box_back", box.baseline, policy, saved)
    assert back.generation == 1
    assert await ran(back, LOOKED) == "as it was\n"
    again = await back.checkpoint(saves)
    assert (again.digest, again.parent) == (saved.digest, saved.digest)
    await back.destroy()
    return saved


async def _bounded(box: Kept, traits: Traits, limits: Limits) -> None:
    (branch,) = await box.branch(1)
    request = RunRequest(argv=("python", "-c", FILLER))
    result = (await branch.box.run(request, timeout_seconds=PATIENCE)).result
    if traits.walled:
        assert result.limit is LimitKind.DISK, result.text
        filler = await branch.box.read_file("filler", bytes_max=1)
        assert filler.total_bytes < limits.disk_bytes, "what it began with counts as well"
    await branch.box.destroy()
