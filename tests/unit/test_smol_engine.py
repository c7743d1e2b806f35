"""The engine of Smol Machines, with a stand-in for its SDK: what a worker hears and hides.

What the real SDK does is tried by ``tests/security/test_guests.py`` where KVM works.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stoker.errors import IsolationUnavailable
from stoker.model.execution import ExecutionPolicy, Isolation
from stoker.sandbox import select
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.smol import backend, machines
from stoker.sandbox.smol.engine import Engine, EngineError
from stoker.sandbox.smol.machines import Machines, machine_name
from support import sandbox

STAND_IN = """
import os, threading

child_is_gone = []

class Refused(Exception):
    code = "CONFLICT"

class ConnectOptions:
    def __init__(self, target): assert target == "local"

class Row:
    def __init__(self, name, pid): self.name, self.pid = name, pid

class Machine:
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
        await held.delete("first")
        await held.delete("one")
        assert (place / "engine.log").read_text() == ""
        await held.delete("two")
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


def test_machines_are_named_after_their_boxes() -> None:
    assert machine_name("box_1") != machine_name("box_2")
    assert machine_name("box_" + "1" * 70) == machine_name("box_" + "1" * 70)
    assert len(machine_name("box_" + "1" * 70)) < 30


@pytest.mark.parametrize("isolation", [Isolation.MICROVM, Isolation.AUTO])
def test_it_is_not_offered_without_the_sdk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: Isolation
) -> None:
    monkeypatch.setattr(backend, "installed", lambda: False)
    monkeypatch.setattr(select, "installed", lambda: False)
    monkeypatch.setattr(select, "has_kvm", lambda: False)

    async def body() -> str:
        async with SandboxHost.open(tmp_path) as host:
            with pytest.raises(IsolationUnavailable) as refused:
                await select.choose_backend(ExecutionPolicy(isolation=isolation), host)
            return str(refused.value)

    said = asyncio.run(body())
    if isolation is Isolation.MICROVM:
        assert "not installed" in said
        assert 'pip install "stoker[microvm]"' in said
    else:
        assert "accept" in said
