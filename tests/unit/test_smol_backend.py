"""The backend of Smol Machines, with machines that only have names: whose, and who goes when."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec
import pydantic
import pytest

from stoker.config.boxes import SmolSettings
from stoker.config.classes import WorkerClassSettings
from stoker.errors import BoxFailed, BranchUnavailable, ConfigInvalid, IsolationUnavailable
from stoker.model.completion import Usage
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Rung
from stoker.model.tools import RunRequest, RunResult, Stream
from stoker.sandbox import alone, select
from stoker.sandbox.base import BoxRun
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.smol import backend, cuda
from stoker.sandbox.smol.engine import EngineError
from stoker.sandbox.smol.machines import machine_name
from stoker.sandbox.smol.target import CloudTarget
from support import sandbox


class StandInMachines:
    """Machines that only have names; ``seen`` runs while the rows are being read."""

    lost = False

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gone: list[str] = []
        self.booted: list[bool] = []
        """Whether each machine that was booted has a device."""
        self.seen: Callable[[], None] = lambda: None
        self.deleted: list[list[str]] = []
        """What goes with each deletion."""

    async def rows(self) -> dict[str, int | None]:
        self.seen()
        return dict.fromkeys(self.names)

    async def purge(self, names: Iterable[str]) -> None:
        self.gone += names

    async def delete(self, name: str) -> list[str]:
        del name
        return self.deleted.pop(0)

    async def boot(self, name: str, *_: object, cuda: bool) -> None:
        del name
        self.booted.append(cuda)

    async def branch(self, source: str, name: str, *, frozen: bool, leaf: bool) -> None:
        del source, name, frozen, leaf
        raise EngineError("no room")


def with_machines(
    tmp_path: Path, body: Callable[[backend.SmolBackend, StandInMachines], Awaitable[None]]
) -> None:
    async def opened() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            held, boxes = StandInMachines(), backend.SmolBackend(host)
            boxes.machines = held  # type: ignore[assignment]
            await body(boxes, held)

    sandbox.run(opened)


def test_a_sweep_spares_a_machine_that_another_worker_makes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "installed", lambda: True)
    monkeypatch.setattr(backend, "_home", lambda _: tmp_path)

    async def body(boxes: backend.SmolBackend, held: StandInMachines) -> None:
        def made_meanwhile() -> None:
            boxes.host.ledger.write(boxes.host.record("box_new", Rung.SMOL))

        held.names, held.seen = [machine_name("box_new"), machine_name("box_dead")], made_meanwhile
        await boxes.sweep()
        assert held.gone == [machine_name("box_dead")]

    with_machines(tmp_path, body)


def test_what_else_dead_workers_left_is_swept_where_their_machines_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "installed", lambda: True)
    monkeypatch.setattr(backend, "_home", lambda _: tmp_path)

    async def body(boxes: backend.SmolBackend, held: StandInMachines) -> None:
        def fails() -> None:
            raise EngineError("gone")

        held.seen = fails
        record = boxes.host.record("box_dead", Rung.SMOL)
        boxes.host.ledger.write(msgspec.structs.replace(record, incarnation="inc_dead"))
        with pytest.raises(BoxFailed, match="machines of dead workers"):
            await boxes.sweep()
        assert boxes.host.ledger.records() == []

    with_machines(tmp_path, body)


def test_a_machine_that_is_kept_for_its_branches_stays_written_down(tmp_path: Path) -> None:
    async def body(boxes: backend.SmolBackend, held: StandInMachines) -> None:
        names = [machine_name(box_id) for box_id in ("box_1", "box_2")]
        for name, box_id in zip(names, ("box_1", "box_2"), strict=True):
            boxes._records[name] = boxes.host.record(box_id, Rung.SMOL)
            boxes.host.ledger.write(boxes._records[name])
        held.deleted = [[], names[::-1]]
        await boxes._undone("box_1", None)
        assert [r.box_id for r in boxes.host.ledger.records()] == ["box_1", "box_2"]
        await boxes._undone("box_2", None)
        assert boxes.host.ledger.records() == []

    with_machines(tmp_path, body)


def test_a_branch_that_fails_drops_its_origin_alone_while_another_boots(tmp_path: Path) -> None:
    async def body(boxes: backend.SmolBackend, held: StandInMachines) -> None:
        del held
        booting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        booted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        booted.set_result("origin_1")
        boxes._origins = {backend._Kind(512): booting, backend._Kind(256): booted}  # type: ignore[dict-item]
        with pytest.raises(EngineError, match="no room"):
            await boxes._off_origin("origin_1", "name")
        assert list(boxes._origins) == [backend._Kind(512)]

    with_machines(tmp_path, body)


def test_an_engine_lost_lets_go_of_what_was_booted_and_not_of_what_boots(tmp_path: Path) -> None:
    async def body(boxes: backend.SmolBackend, held: StandInMachines) -> None:
        held.lost = True
        boots: list[asyncio.Event] = []

        async def boot(kind: object) -> str:
            boots.append(asyncio.Event())
            await boots[-1].wait()
            return f"origin_{kind}_{len(boots)}"

        boxes._booted = boot  # type: ignore[method-assign]
        asked = [
            asyncio.ensure_future(boxes.origin_of(backend._kind(ExecutionPolicy())))
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for event in boots:
            event.set()
        assert len(set(await asyncio.gather(*asked))) == 1 == len(boots)

    with_machines(tmp_path, body)


def test_a_baseline_with_a_root_of_its_own_is_refused(tmp_path: Path) -> None:
    async def body(boxes: backend.SmolBackend, held: StandInMachines) -> None:
        del held
        rooted = Baseline(root="/srv/images/app")
        with pytest.raises(BranchUnavailable, match="root of their own"):
            await boxes.create("box_1", rooted, ExecutionPolicy(isolation=Isolation.MICROVM))

    with_machines(tmp_path, body)


CUDA = ExecutionPolicy(isolation=Isolation.MICROVM, cuda="torch")


def with_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str = "") -> None:
    """Let it look as if the host had a driver, its device and its library, but for one."""
    devices = tmp_path / "devices"
    devices.mkdir()
    for name, part in (("version", "driver"), ("nvidia0", "device")):
        if part != missing:
            (devices / name).touch()
    monkeypatch.setattr(cuda, "DRIVER", devices / "version")
    monkeypatch.setattr(cuda, "DEVICES", devices)
    library = None if missing == "library" else "libcuda.so.1"
    monkeypatch.setattr("ctypes.util.find_library", lambda _: library)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("driver", "no NVIDIA driver is loaded"),
        ("device", "has no device"),
        ("library", "libcuda.so.1 is not installed"),
    ],
)
def test_a_device_is_refused_in_a_sentence_where_its_driver_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, said: str
) -> None:
    with_driver(tmp_path, monkeypatch, missing)

    async def body(boxes: backend.SmolBackend, held: StandInMachines) -> None:
        with pytest.raises(IsolationUnavailable, match=said) as refused:
            await boxes.create("box_1", Baseline(), CUDA)
        assert "leave cuda out" in refused.value.message
        boxes.check(ExecutionPolicy(isolation=Isolation.MICROVM))
        assert held.booted == []
        boxes.host.cloud = CloudTarget(url="https://x", key_file="/k", image="debian")
        with pytest.raises(IsolationUnavailable, match="of a cloud"):
            boxes.check(CUDA)

    with_machines(tmp_path, body)


class Guest:
    """A box in which a framework says something; ``destroyed`` counts."""

    destroyed = 0

    def __init__(self, said: bytes) -> None:
        self._said = said

    async def run(self, request: RunRequest, *, timeout_seconds: float) -> BoxRun:
        assert "torch.cuda.is_available()" in request.argv[-1]
        del timeout_seconds
        out = Stream(kept=self._said, total_bytes=len(self._said))
        return BoxRun(result=RunResult(exit_code=0, stdout=out, stderr=Stream()), usage=Usage())

    async def destroy(self) -> None:
        Guest.destroyed += 1


def test_boxes_with_a_device_are_given_once_their_framework_found_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_driver(tmp_path, monkeypatch)
    monkeypatch.setattr("stoker.sandbox.smol.tree.prepare", lambda *_: tmp_path)
    monkeypatch.setattr(Guest, "destroyed", 0)
    made: list[str] = []

    async def body(boxes: backend.SmolBackend, held: StandInMachines) -> None:
        async def make(box_id: str, *_: object) -> Guest:
            made.append(box_id)
            return Guest(said)

        boxes._made = make  # type: ignore[assignment, method-assign]
        said = b"no device\n"
        with pytest.raises(IsolationUnavailable, match="torch finds no device in one: no device"):
            await boxes.create("box_1", Baseline(), CUDA)
        assert (Guest.destroyed, len(made)) == (1, 1)
        said = b"found\n"
        await boxes.create("box_2", Baseline(), CUDA)
        await boxes.create("box_3", Baseline(), CUDA)
        assert (Guest.destroyed, made[2:]) == (2, ["box_2", "box_3"])
        assert held.booted == [True]
        with pytest.raises(BranchUnavailable, match="with cuda"):
            boxes.check_kept("branches", CUDA)

    with_machines(tmp_path, body)


def test_a_place_that_cannot_be_made_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "installed", lambda: True)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr(backend, "_home", lambda _: tmp_path / "file" / "home")

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            offer = await backend.SmolBackend(host).offer()
            assert not offer.available
            assert "does not answer" in offer.missing

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


@pytest.mark.parametrize(
    ("url", "key_file"),
    [
        ("https://fleet.example", ""),
        ("", "/etc/key"),
        ("http://fleet.example", "/etc/key"),
        ("http://127.0.0.1.example", "/etc/key"),
        ("https://smk_key@fleet.example", "/etc/key"),
        ("https://fleet.example", "key"),
    ],
)
def test_a_cloud_needs_both_settings_and_never_sends_its_key_in_the_open(
    url: str, key_file: str
) -> None:
    assert SmolSettings() == SmolSettings(url="", key_file="")
    SmolSettings(url="https://fleet.example/v", key_file="/etc/key")
    SmolSettings(url="http://127.0.0.1:80", key_file="/etc/key")
    with pytest.raises(pydantic.ValidationError):
        SmolSettings(url=url, key_file=key_file)


def test_only_machines_reach_a_device() -> None:
    WorkerClassSettings(isolation=Isolation.MICROVM, cuda="jax")
    with pytest.raises(pydantic.ValidationError, match='isolation = "microvm"'):
        WorkerClassSettings(cuda="jax")
    with pytest.raises(ConfigInvalid, match='isolation = "microvm"'):
        alone._policy(ExecutionPolicy(cuda="jax"))
