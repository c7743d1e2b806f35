"""The engine of Smol Machines, with a stand-in for its SDK: what a worker hears and hides.

What the real SDK does is tried by ``tests/security/test_guests.py`` where KVM works.
"""

import asyncio
import os
import select as polling
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.sandbox.smol import box, machines
from stoker.sandbox.smol.engine import Engine, EngineError
from stoker.sandbox.smol.machines import Machines
from support import sandbox

STAND_IN = """
import base64, os, threading

child_is_gone = []

class Refused(Exception):
    code = "CONFLICT"

class SmolError(Exception): pass

class ConnectOptions:
    api_key = None
    def __init__(self, target):
        assert target == "local"
        self.target = target

class Row:
    def __init__(self, name, pid): self.name, self.pid = name, pid

def MachineConfig(**given): return given
ResourceSpec = ExecOptions = MachineConfig

class Said:
    exit_code = 0

class Stream:
    def __iter__(self):
        open(os.environ["HOME"] + "/go").close()
        yield {"kind": "stdout", "data": ".\\n" + base64.b64encode(b"said").decode() + ".\\n"}
        threading.Event().wait()

class Machine:
    @staticmethod
    def create(config, conn): return Machine()
    @staticmethod
    def restore_checkpoint(path, name, conn):
        print("restored", name, flush=True)
        return Machine()
    def checkpoint(self, path):
        open(path, "x").write("half")
        open(os.environ["HOME"] + "/go").close()
    def write_file(self, place, content): pass
    def exec(self, command, options):
        if options.get("stdin"): print("told", options["stdin"].strip(), flush=True)
        return Said
    def exec_stream(self, command): return Stream()
    def branch(self, name, branchable, freeze_source):
        open(os.environ["HOME"] + "/go").close()
        print("branched", name, flush=True)
    @staticmethod
    def list(conn):
        return [Row(f"{k}={v}", 1) for k, v in os.environ.items()]
    @staticmethod
    def delete_by_name(name, conn):
        if name == "hangs": threading.Event().wait()
        if name == "dies": os._exit(3)
        if name == "refused": raise Refused("machine is in use")
        if name == "source" and not child_is_gone: raise Refused("it has dependent forks")
        if name == "child": child_is_gone.append(name)
        print("deleted", name, flush=True)

def local_availability():
    return False, "KVM_UNAVAILABLE", "there is no KVM"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sdk").mkdir()
    (tmp_path / "sdk" / "smol.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path / "sdk"))
    monkeypatch.setenv("SMOL_CLOUD_TOKEN", "secret")
    return tmp_path / "home"


def with_engine(place: Path, body: Callable[[Engine], Awaitable[None]]) -> None:
    async def opened() -> None:
        engine = Engine.start(place)
        try:
            await body(engine)
        finally:
            await engine.close()

    sandbox.run(opened)


def test_an_engine_sees_its_own_place_and_nothing_of_the_workers_environment(place: Path) -> None:
    async def body(engine: Engine) -> None:
        seen = set(await engine.call("list", seconds=30))
        assert f"HOME={place}" in seen
        assert {row.partition("=")[0] for row in seen} <= {
            "HOME", "PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH", "LC_CTYPE",
        }  # fmt: skip

    with_engine(place, body)


def test_a_call_that_fails_or_hangs_is_an_error_and_others_go_on(place: Path) -> None:
    async def body(engine: Engine) -> None:
        with pytest.raises(EngineError, match="CONFLICT: machine is in use"):
            await engine.call("delete", seconds=30, name="refused")
        with pytest.raises(EngineError, match="did not end within"):
            await engine.call("delete", seconds=0.05, name="hangs")
        assert await engine.call("probe", seconds=30) == ["KVM_UNAVAILABLE", "there is no KVM"]
        with pytest.raises(EngineError, match="is gone"):
            await engine.call("delete", seconds=30, name="dies")
        with pytest.raises(EngineError, match="is gone"):
            await engine.call("probe", seconds=30)

    with_engine(place, body)


def test_a_deletion_that_hangs_ends_the_engine(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "_DELETE_SECONDS", 0.05)

    async def body() -> None:
        held = Machines(place)
        assert await held.probe() == ("KVM_UNAVAILABLE", "there is no KVM")
        with pytest.raises(EngineError, match="did not end"):
            await held.delete("hangs")
        assert held.lost
        assert (await held.probe())[0] == "KVM_UNAVAILABLE"  # another one was started
        await held.close()

    sandbox.run(body)


def test_a_machine_with_branches_is_deleted_with_the_last_of_them(place: Path) -> None:
    async def body() -> None:
        held = Machines(place)
        await held.probe()
        held._off.update({"one": "first", "two": "one"})
        assert await held.delete("first") == []
        assert await held.delete("one") == []
        assert (place / "engine.log").read_text() == ""
        assert await held.delete("two") == ["two", "one", "first"]
        said = (place / "engine.log").read_text()
        assert said.split() == ["deleted", "two", "deleted", "one", "deleted", "first"]
        await held.close()

    sandbox.run(body)


def test_machines_of_dead_workers_are_deleted_in_whatever_order_they_can_be(place: Path) -> None:
    async def body() -> None:
        held = Machines(place)
        await held.purge(["source", "child"])
        assert (place / "engine.log").read_text().split() == [
            "deleted", "child", "deleted", "source",
        ]  # fmt: skip
        with pytest.raises(EngineError, match="in use"):
            await held.purge(["refused", "child"])
        await held.close()

    sandbox.run(body)


def test_a_branch_that_nobody_waits_for_any_more_is_deleted_once_it_is_made(place: Path) -> None:
    async def body(engine: Engine) -> None:
        os.mkfifo(place / "go")
        await engine.call("create", seconds=30, name="origin", **GIVEN)
        with pytest.raises(EngineError, match="did not end"):
            await engine.call(
                "branch", seconds=0.05, source="origin", name="late", frozen=True, leaf=False
            )
        deletion = asyncio.ensure_future(engine.call("delete", seconds=30, name="late"))
        await opened_to(place, deletion)
        await deletion
        assert (place / "engine.log").read_text().split() == [
            "branched", "late", "deleted", "late",
        ]  # fmt: skip

    with_engine(place, body)


async def opened_to(place: Path, waiting: asyncio.Future[Any]) -> None:
    """Let what waits for the pipe ``go`` go on, once it is seen to wait."""
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    await asyncio.to_thread((place / "go").write_bytes, b"")


GIVEN: dict[str, Any] = {
    "labels": {}, "memory_mb": 1, "ready_seconds": 1, "image": None, "cuda": False,
    "begin": {"place": "", "script": "", "archive": os.devnull},
}  # fmt: skip


def test_a_runner_is_told_nothing_before_it_is_known_to_answer_here(place: Path) -> None:
    async def body(engine: Engine) -> None:
        os.mkfifo(place / "go")
        await engine.call("create", seconds=30, name="branch", **GIVEN)
        attaching = asyncio.ensure_future(engine.attach("branch", "answers_2", seconds=30))
        await opened_to(place, attaching)
        end = await attaching
        assert (place / "engine.log").read_text() == ""
        await asyncio.get_running_loop().sock_sendall(end, b"adopt")
        assert await asyncio.get_running_loop().sock_recv(end, 99) == b"said"
        end.close()

    with_engine(place, body)


def test_a_checkpoint_nobody_waits_for_leaves_no_file(place: Path, tmp_path: Path) -> None:
    async def body() -> None:
        held = Machines(place)
        await held.engine.call("create", seconds=30, name="one", **GIVEN)
        os.mkfifo(place / "go")
        file = tmp_path / "file"
        writing = asyncio.ensure_future(box.wholly(held.checkpoint("one", file)))
        async with asyncio.timeout(30):
            while not file.exists():
                await asyncio.sleep(0.01)
        writing.cancel()
        await opened_to(place, writing)
        with pytest.raises(asyncio.CancelledError):
            await writing
        file.unlink()  # as whoever asked does: nothing comes after it
        await held.restore("two", file)
        assert (place / "engine.log").read_text().split() == ["restored", "two"]
        await held.close()

    sandbox.run(body)


WORKER = """
import asyncio, sys
from pathlib import Path
from stoker.sandbox.smol.engine import Engine
async def main():
    engine = Engine.start(Path(sys.argv[1]))
    await engine.call("probe", seconds=30)
    print(engine._process.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_an_engine_that_hears_nothing_ends_with_a_killed_worker(place: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(place)],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert worker.stdout is not None
        with worker.stdout:
            engine = os.pidfd_open(int(worker.stdout.readline()))
        signal.pidfd_send_signal(engine, signal.SIGSTOP)
    finally:
        worker.kill()
        worker.wait(sandbox.PATIENCE)
    ended, _, _ = polling.select([engine], [], [], sandbox.PATIENCE)
    if not ended:
        signal.pidfd_send_signal(engine, signal.SIGKILL)
    os.close(engine)
    assert ended
