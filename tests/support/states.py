"""What every backend with checkpoints and branches must show; run in this process or a user's."""

from pathlib import Path

from stoker.model.execution import Baseline, ExecutionPolicy, Limits, Rung
from stoker.model.tools import LimitKind, RunRequest
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBackend, LocalBox
from support import sandbox

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


def names_in(directory: Path) -> list[str]:
    """Return what lies in ``directory``, in order."""
    return sorted(path.name for path in directory.iterdir())


async def ran(box: LocalBox, source: str) -> str:
    """Run Python in ``box`` and return what it printed; anything but success fails the test."""
    request = RunRequest(argv=("python", "-c", source))
    result = (await box.run(request, timeout_seconds=20.0)).result
    assert result.ok, result.text
    return result.stdout.kept.decode()


async def holds(state: Path, rung: Rung) -> None:
    """Try the contract of checkpoint, branch and restore on ``rung``."""
    saves = state / "saves"
    saves.mkdir()
    async with SandboxHost.open(state / "boxes") as host:
        backend = sandbox.backend_of(host, rung)
        policy = sandbox.policy_of(rung, sandbox.SMALL)
        box = await backend.create("box_first", Baseline(), policy)
        await ran(box, FILLED)
        await _branches(backend, box)
        await _saved(backend, box, policy, saves)
        await _bounded(box, rung, policy.limits)
        await backend.close()
        assert host.leaked() == 0, "something was left behind"
        assert not host.alive


async def _branches(backend: LocalBackend, box: LocalBox) -> None:
    before = set(backend.boxes)
    first, second = await box.branch(2)
    assert first.digest == second.digest
    assert (first.parent, first.generation) == (box.baseline.digest, 1)
    one, two = (backend.boxes[branch.box.box_id] for branch in (first, second))
    assert len({box.box_id, one.box_id, two.box_id}) == 3
    if box.record.uid is not None:
        assert len({box.record.uid, one.record.uid, two.record.uid}) == 3
    assert await ran(one, LOOKED) == "as it was\n"
    temporary = "import os; print(open(os.path.join(os.environ['TMPDIR'], 'left')).read())"
    if box.record.kind != Rung.USER_NAMESPACE:  # there /tmp is as old as the action
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


async def _saved(
    backend: LocalBackend, box: LocalBox, policy: ExecutionPolicy, saves: Path
) -> None:
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


async def _bounded(box: LocalBox, rung: Rung, limits: Limits) -> None:
    (branch,) = await box.branch(1)
    request = RunRequest(argv=("python", "-c", FILLER))
    result = (await branch.box.run(request, timeout_seconds=20.0)).result
    if rung in sandbox.OWN_UID:  # elsewhere disk is watched, not walled: best effort, and said so
        assert result.limit is LimitKind.DISK, result.text
        filler = await branch.box.read_file("filler", bytes_max=1)
        assert filler.total_bytes < limits.disk_bytes, "what it began with counts as well"
    await branch.box.destroy()
