"""An action that never began: told from one that did, and tried once more where that may help."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.errors import BoxFailed, ConfigInvalid
from stoker.model.execution import Baseline, Mount, Rung
from stoker.model.tools import RunRequest
from stoker.sandbox import mounts
from stoker.sandbox.cgroups import is_zombie
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBox
from stoker.sandbox.maker_client import MakerClient
from stoker.sandbox.making import WorkOrder
from stoker.sandbox.mounts import MountCheck
from stoker.sandbox.namespace import NamespaceBackend
from stoker.sandbox.starts import Prepared
from support import sandbox
from support.sandbox import policy_of

RUNG = Rung.ROOT if sandbox.ROOT else Rung.USER_NAMESPACE
SHORTAGE = "bwrap: Creating new namespace failed: " + os.strerror(errno.EAGAIN)


class Stumbling(NamespaceBackend):
    """Its launcher is replaced by ``stumble`` for the first ``falls`` starts."""

    falls = 0
    stumble = ""
    starts = 0

    def prepare(self, box: LocalBox, request: RunRequest, channels: int) -> Prepared:
        self.starts += 1
        prepared = super().prepare(box, request, channels)
        if self.starts <= self.falls:
            prepared.order.argv = [b"/bin/sh", b"-c", self.stumble.encode()]
        return prepared


def ran(state: Path, falls: int, stumble: str) -> tuple[Stumbling, bytes]:
    async def body() -> tuple[Stumbling, bytes]:
        async with SandboxHost.open(state) as host:
            backend = Stumbling(host, rung=RUNG)
            backend.falls, backend.stumble = falls, stumble
            box = await backend.create("box_start", Baseline(), policy_of(RUNG))
            try:
                run = await box.run(RunRequest(argv=("echo", "done")), timeout_seconds=30)
            except BoxFailed as error:
                return backend, str(error).encode()
            finally:
                await backend.close()
                assert host.leaked() == 0
            return backend, run.result.stdout.kept

    return sandbox.run(body)


def test_a_shortage_that_passes_is_not_even_noticed(tmp_path: Path) -> None:
    backend, said = ran(tmp_path, 1, f"echo '{SHORTAGE}' >&2; exit 1")
    assert said == b"done\n"
    assert backend.starts == 2


def test_a_shortage_that_stays_is_an_infrastructure_fault_after_two_starts(tmp_path: Path) -> None:
    backend, said = ran(tmp_path, 9, f"echo '{SHORTAGE}' >&2; exit 1")
    assert b"nothing was run" in said
    assert SHORTAGE.encode() in said
    assert backend.starts == 2


def test_a_refusal_of_another_kind_is_not_repeated(tmp_path: Path) -> None:
    backend, said = ran(tmp_path, 9, "echo 'bwrap: No permissions' >&2; exit 1")
    assert b"nothing was run" in said
    assert backend.starts == 1


def test_a_killed_launcher_may_have_run_the_program_and_is_never_repeated(tmp_path: Path) -> None:
    backend, said = ran(tmp_path, 9, f"echo '{SHORTAGE}' >&2; kill -9 $$")
    assert b"may have run" in said
    assert b"nothing was run" not in said
    assert backend.starts == 1


NO_FORK = """
import errno, os, sys
from stoker.sandbox import maker
real, forks = os.fork, []
def fork():
    forks.append(1)
    if len(forks) in (2, 3):  # the one made ahead, and the one made instead
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return real()
os.fork = fork
maker.main()
"""


def test_a_fork_the_kernel_refuses_fails_that_start_alone() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", NO_FORK, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    async def body(standard: list[int]) -> None:
        maker = MakerClient(process, ours)
        running = await maker.spawn(WorkOrder(argv=[b"/bin/sleep", b"1000"]), standard)
        refused = await maker.spawn(WorkOrder(argv=[b"/bin/true"]), standard)
        after = await maker.spawn(WorkOrder(argv=[b"/bin/true"]), standard)
        ended = await refused.exited
        assert ended.errno == errno.EAGAIN
        assert ended.error
        assert (await after.exited).status == 0
        assert not running.exited.done()
        await maker.kill(running)
        await running.exited
        await maker.close()

    with Path(os.devnull).open("r+b") as null:
        asyncio.run(asyncio.wait_for(body([null.fileno()] * 3), sandbox.PATIENCE))


def test_a_mount_is_walked_again_only_where_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "one" / "two"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    walks: list[str] = []
    walk = mounts._walk

    def counted(path: str) -> object:
        walks.append(path)
        return walk(path)

    monkeypatch.setattr(mounts, "_walk", counted)
    check, mount = MountCheck(), Mount(source=str(tmp_path), target="/data")
    for _ in range(3):
        check.check(mount)
    assert len(walks) == 1
    os.utime(deep, ns=(0, 0))  # a name more or less changes the time; so does this, at once
    check.check(mount)
    assert len(walks) == 2
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(deep / "socket"))
        os.utime(deep, ns=(1, 1))
        for _ in range(2):
            with pytest.raises(ConfigInvalid, match="socket"):
                check.check(mount)
    (deep / "socket").unlink()
    check.check(mount)


def _waiting(maker: MakerClient) -> int:
    """Return the child that the maker forked ahead."""
    (pid,) = Path(f"/proc/{maker.pid}/task/{maker.pid}/children").read_bytes().split()
    return int(pid)


async def _gone(pid: int) -> None:
    while not is_zombie(pid):
        await asyncio.sleep(0.01)


def test_a_child_forked_ahead_may_die_and_dies_with_its_maker() -> None:
    async def body(standard: list[int]) -> None:
        maker = MakerClient.start()
        order = WorkOrder(argv=[b"/bin/true"])
        for _ in range(3):
            started = await maker.spawn(order, standard)
            assert (await started.exited).status == 0
            waiting = _waiting(maker)
            os.kill(waiting, signal.SIGKILL)
            await _gone(waiting)
        started = await maker.spawn(order, standard)
        assert (await started.exited).status == 0
        waiting = _waiting(maker)
        os.kill(maker.pid, signal.SIGKILL)
        await _gone(waiting)
        await maker.close()

    with Path(os.devnull).open("r+b") as null:
        asyncio.run(asyncio.wait_for(body([null.fileno()] * 3), sandbox.PATIENCE))
