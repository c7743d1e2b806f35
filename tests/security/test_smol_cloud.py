"""Boxes whose machines are made by a cloud of Smol Machines: its API as the SDK calls it.

The service is a stand-in (``support.smol_cloud``) and everything else is real: the SDK, the engine,
the link, the runner that is uploaded.
"""

import asyncio
import contextlib
import importlib.util
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.errors import BoxFailed, BranchUnavailable, IsolationUnavailable
from stoker.model.execution import MEBIBYTE, Baseline, ExecutionPolicy, Isolation, Limits, Rung
from stoker.model.faults import FaultSide
from stoker.model.tools import RunRequest
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.select import choose_backend
from stoker.sandbox.smol import machines
from stoker.sandbox.smol.backend import SmolBackend
from stoker.sandbox.smol.target import CloudTarget
from support import sandbox
from support.smol_cloud import KEY, Cloud, Trouble

pytestmark = [
    sandbox.needs_root,
    pytest.mark.root,
    pytest.mark.skipif(
        importlib.util.find_spec("smol") is None,
        reason='the SDK of Smol Machines is not installed; pip install "stoker[microvm]"',
    ),
    pytest.mark.skipif(
        shutil.which("busybox") is None,
        reason="no busybox for the machines' tree; apt install busybox-static",
    ),
]
POLICY = ExecutionPolicy(
    isolation=Isolation.MICROVM,
    limits=Limits(memory_bytes=128 * MEBIBYTE, disk_bytes=16 * MEBIBYTE),
)


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with Cloud(tmp_path / "cloud").serving() as served:
        yield served


def target(cloud: Cloud, tmp_path: Path, key: str = KEY) -> CloudTarget:
    (tmp_path / "key").write_text(f"{key}\n")
    return CloudTarget(url=cloud.url, key_file=str(tmp_path / "key"), image="debian")


def with_backend(
    state: Path, at: CloudTarget, body: Callable[[SmolBackend], Awaitable[None]]
) -> None:
    async def opened() -> None:
        async with held(state, at) as backend:
            await body(backend)

    sandbox.run(opened)


@contextlib.asynccontextmanager
async def held(state: Path, at: CloudTarget) -> AsyncIterator[SmolBackend]:
    async with SandboxHost.open(state, cloud=at) as host:
        backend = SmolBackend(host)
        try:
            yield backend
        finally:
            await backend.close()


def said_anywhere(folder: Path) -> list[Path]:
    """Return the files below ``folder`` in which the account's key stands."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_box_of_a_cloud_runs_keeps_files_and_leaves_nothing_there(
    cloud: Cloud, tmp_path: Path
) -> None:
    async def body(backend: SmolBackend) -> None:
        offer = await backend.offer()
        assert offer.available, offer.missing
        box = await backend.create("box_1", Baseline(), POLICY)
        content = bytes(range(256)) * 400
        await box.write_files({"in": content})
        ran = await box.run(
            RunRequest(argv=("sh", "-c", "cat in; echo no >&2; exit 3")), timeout_seconds=60
        )
        assert (ran.result.exit_code, ran.result.stderr.kept) == (3, b"no\n")
        assert ran.result.stdout.kept == content
        assert (await box.read_file("in", bytes_max=1 << 20)).content == content
        late = await box.run(RunRequest(argv=("sleep", "1000")), timeout_seconds=0.2)
        assert late.result.timed_out
        for refused in (box.branch(1), box.checkpoint(tmp_path)):
            with pytest.raises(BranchUnavailable, match="of a cloud"):
                await refused
        (origin,) = (one for one in cloud.machines.values() if not one.source)
        assert origin.body["network"] == {"mode": "blocked"}
        assert origin.body["source"] == {"type": "image", "reference": "debian"}
        await box.destroy()
        assert list(cloud.machines.values()) == [origin]

    with_backend(tmp_path / "state", target(cloud, tmp_path), body)
    assert cloud.machines == {}
    assert said_anywhere(tmp_path / "state") == []


def test_only_the_settings_choose_a_cloud(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMOL_CLOUD_TOKEN", KEY)
    monkeypatch.setenv("SMOL_CLOUD_URL", cloud.url)

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            backend = SmolBackend(host)
            with contextlib.suppress(BoxFailed):
                await backend.machines.probe()
            await backend.close()

    sandbox.run(body)
    assert cloud.seen == []


def test_a_key_that_is_refused_or_missing_is_said_without_it(cloud: Cloud, tmp_path: Path) -> None:
    async def refusal(at: CloudTarget) -> str:
        async with SandboxHost.open(tmp_path / "state", cloud=at) as host:
            with pytest.raises(IsolationUnavailable) as refused:
                await choose_backend(POLICY, host)
            return str(refused.value)

    wrong = target(cloud, tmp_path, "smk_wrong")
    said = sandbox.run(lambda: refusal(wrong))
    assert "UNAUTHORIZED" in said
    assert "smk_wrong" not in said
    gone = msgspec.structs.replace(wrong, key_file=str(tmp_path / "nowhere"))
    assert "cannot be read" in sandbox.run(lambda: refusal(gone))
    two_lines = sandbox.run(lambda: refusal(target(cloud, tmp_path, "smk_first\nsmk_second")))
    assert "more than one word" in two_lines
    assert "smk" not in two_lines


def test_a_service_cannot_send_the_key_elsewhere_nor_have_a_part_of_it_told(
    cloud: Cloud, tmp_path: Path
) -> None:
    async def missing() -> str:
        async with held(tmp_path / "state", target(cloud, tmp_path)) as backend:
            return (await backend.offer()).missing

    with Cloud(tmp_path / "elsewhere").serving() as elsewhere:
        # The SDK asks again by another way, which would follow.
        cloud.troubles = [Trouble("GET ", 302, elsewhere=f"{elsewhere.url}/v1/machines")] * 2
        assert "302" in sandbox.run(missing)
        assert elsewhere.seen == []
    cloud.troubles = [Trouble("GET ", 400, said=KEY * 200)]
    said = sandbox.run(missing)
    assert "400" in said
    assert KEY[:5] not in said


@pytest.mark.parametrize(
    "trouble",
    [
        *[Trouble(r"POST /v1/machines$", status) for status in (401, 429, 500, 503)],
        Trouble(r"POST /v1/machines$", 502, after=True),
        Trouble(r"PUT /v1/machines/.*", 500),
        Trouble(r"POST /v1/machines/[^/]*/branches", 500, after=True),
        Trouble(r"POST /v1/machines/[^/]*/exec/stream", 503),
        Trouble(r"POST /v1/machines/[^/]*/exec/stream", 200),
        Trouble(r"POST /v1/machines$", 0, after=True),
    ],
    ids=lambda t: f"{t.request.split('/')[-1].strip('$.*')} {t.status} {t.after}",
)
def test_a_box_that_cannot_be_made_is_an_infrastructure_fault_and_leaves_nothing(
    cloud: Cloud, tmp_path: Path, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = 4 if trouble.status == 429 else 1  # the SDK tries three times more
    cloud.troubles = [trouble] * times
    if not trouble.status:
        monkeypatch.setattr(machines, "_BOOT_SECONDS", 0.5)

    async def body(backend: SmolBackend) -> None:
        making = asyncio.ensure_future(backend.create("box_1", Baseline(), POLICY))
        if not trouble.status:
            while not cloud.machines:
                await asyncio.sleep(0.01)
            asyncio.get_running_loop().call_later(1.5, cloud.ended.set)
        with pytest.raises(BoxFailed) as failed:
            await making
        assert KEY not in str(failed.value)
        assert failed.value.side is FaultSide.INFRASTRUCTURE
        assert cloud.troubles == []

    with_backend(tmp_path / "state", target(cloud, tmp_path), body)
    assert cloud.machines == {}
    assert said_anywhere(tmp_path / "state") == []


def test_what_a_dead_worker_left_there_goes_with_the_next_sweep_and_nobody_elses(
    cloud: Cloud, tmp_path: Path
) -> None:
    at = target(cloud, tmp_path)

    async def left(backend: SmolBackend) -> None:
        name = backend.name_of("box_dead")
        cloud.add({"name": name})
        record = backend.host.record("box_dead", Rung.SMOL)
        backend.host.ledger.write(msgspec.structs.replace(record, incarnation="inc_dead"))
        cloud.add({"name": "somebody-elses"})
        cloud.add({"name": machines.machine_name("box_dead")})  # of another state directory
        assert await backend.sweep() == 1
        assert backend.host.ledger.records() == []
        assert name not in {one.name for one in cloud.machines.values()}
        assert len(cloud.machines) == 2

    with_backend(tmp_path / "state", at, left)


def test_a_machine_that_cannot_be_deleted_is_told_and_goes_with_the_next_sweep(
    cloud: Cloud, tmp_path: Path
) -> None:
    at = target(cloud, tmp_path)

    async def body(backend: SmolBackend) -> None:
        name = backend.name_of("box_1")
        cloud.add({"name": name})
        record = backend._records[name] = backend.host.record("box_1", Rung.SMOL)
        backend.host.ledger.write(record)
        cloud.troubles = [Trouble("DELETE ", 500)]
        with pytest.raises(BoxFailed, match="next sweep"):
            await backend._undone("box_1", None)
        assert [r.box_id for r in backend.host.ledger.records()] == ["box_1"]

    with_backend(tmp_path / "state", at, body)
    assert len(cloud.machines) == 1

    async def swept(backend: SmolBackend) -> None:
        await backend.sweep()

    with_backend(tmp_path / "state", at, swept)
    assert cloud.machines == {}
