"""Containers: what is theirs alone. The contract they share is tried by the other files here."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.errors import BoxFailed, IsolationUnavailable, ToolRefused
from stoker.model.execution import ExecutionPolicy, Isolation, Mount, Rung
from stoker.model.tools import RunRequest, RunResult
from stoker.sandbox import container, oci_runtimes, user_namespace
from stoker.sandbox.base import BoxOffer, BoxRun
from stoker.sandbox.container import ContainerBackend
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBackend, LocalBox
from stoker.sandbox.oci_runtimes import Runtime
from stoker.sandbox.select import choose_backend
from support import needs, sandbox
from support.sandbox import CONTAINER, MARK, attacked, boxed

RUNSC = Runtime(rung=Rung.RUNSC, path="/usr/bin/runsc", options=(), shared_kernel=False)
RUNC = Runtime(rung=Rung.RUNC, path="/usr/sbin/runc", options=())
ACCEPTED = ExecutionPolicy(accept_shared_kernel=True)

every_backend = pytest.mark.every_backend


def test_crun_runs_the_same_suite_where_it_is_installed() -> None:
    if shutil.which("crun") is None:
        pytest.skip(needs.CRUN)
    assert len(CONTAINER) == 2


def _uids(pid: int) -> list[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    return [int(word) for word in status.split("Uid:")[1].split("\n")[0].split()]


def _processes_of(directory: Path) -> list[int]:
    """Return the processes that were told of a box's directory: its runtime's."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.fsencode(directory) in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


async def _until_it_sleeps(running: "asyncio.Future[BoxRun]") -> None:
    while not sandbox.marked_pids():
        assert not running.done(), running.result()
        await asyncio.sleep(0.01)


@every_backend
@pytest.mark.parametrize("rung", CONTAINER)
def test_a16_the_runtime_itself_is_nobody_on_the_host(tmp_path: Path, rung: Rung) -> None:
    async def body() -> None:
        async with boxed(tmp_path, rung) as (_, box):
            running = asyncio.ensure_future(
                box.run(RunRequest(argv=("sleep", MARK)), timeout_seconds=600)
            )
            await _until_it_sleeps(running)
            owner, uid = box.record.server_uid, box.record.uid
            runtimes = _processes_of(box.directory)
            assert runtimes, "the runtime waits for its container"
            assert {tuple(_uids(pid)) for pid in runtimes} == {(owner,) * 4}
            assert {tuple(_uids(pid)) for pid in sandbox.marked_pids()} == {(uid,) * 4}
            running.cancel()
            await asyncio.wait([running])

    sandbox.run(body)


HOLDER = f"""
import asyncio, sys
from pathlib import Path
from stoker.model.tools import RunRequest
from support import sandbox
async def main():
    async with sandbox.boxed(Path(sys.argv[1]), sandbox.Rung(sys.argv[2])) as (_, box):
        await box.run(RunRequest(argv=("sh", "-c", "sleep {MARK} & sleep {MARK}")),
                      timeout_seconds=600)
asyncio.run(main())
"""


@every_backend
@pytest.mark.parametrize("rung", CONTAINER)
def test_a20_containers_end_with_a_killed_worker_before_any_sweep(
    tmp_path: Path, rung: Rung
) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("what ends a container with its runtime is x86_64's; elsewhere the sweep does")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), rung.value],
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )

    async def body() -> None:
        while len(sandbox.marked_pids()) < 2:
            assert holder.poll() is None
            await asyncio.sleep(0.01)
        holder.send_signal(signal.SIGKILL)
        while sandbox.marked_pids():
            await asyncio.sleep(0.01)
        async with SandboxHost.open(tmp_path) as host:
            assert await host.sweep() == 1
            assert host.leaked() == 0

    try:
        sandbox.run(body)
    finally:
        holder.kill()
        holder.wait(30)


@every_backend
@pytest.mark.parametrize("rung", CONTAINER)
def test_a_runtime_that_is_killed_is_our_fault_and_no_result(tmp_path: Path, rung: Rung) -> None:
    async def body() -> None:
        async with boxed(tmp_path, rung) as (_, box):
            running = asyncio.ensure_future(
                box.run(RunRequest(argv=("sleep", MARK)), timeout_seconds=600)
            )
            await _until_it_sleeps(running)
            for pid in _processes_of(box.directory):
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(BoxFailed, match="may have run in part"):
                await running

    sandbox.run(body)


async def _in_directory(box: LocalBox, directory: str, script: str) -> RunResult:
    request = RunRequest(argv=("sh", "-c", script), directory=directory)
    return (await box.run(request, timeout_seconds=30)).result


@every_backend
@pytest.mark.parametrize("rung", CONTAINER)
def test_a26_a_directory_is_entered_inside_never_by_the_runtime(tmp_path: Path, rung: Rung) -> None:
    # A link to a descriptor that the runtime has open was a way out (CVE-2024-21626).
    links = "mkdir -p sub; for n in $(seq 3 40); do ln -s /proc/self/fd/$n to$n; done"

    async def body() -> None:
        async with boxed(tmp_path, rung) as (_, box):
            assert (await _in_directory(box, ".", links)).ok
            inside = await _in_directory(box, "sub", "pwd; echo $PWD")
            assert inside.stdout.kept == b"/workspace/sub\n" * 2
            missing = await _in_directory(box, "missing", "pwd")
            assert missing.exit_code == 127
            for number in (3, 7, 8, 30, 31, 32):
                gone = await _in_directory(box, f"to{number}", "ls ../../../../../../run/stoker")
                assert gone.exit_code in (2, 127), gone.text
                assert b"boxes" not in gone.stdout.kept

    sandbox.run(body)


@pytest.mark.parametrize("rung", CONTAINER)
def test_an_argument_json_cannot_carry_is_refused(tmp_path: Path, rung: Rung) -> None:
    with pytest.raises(ToolRefused, match="not UTF-8"):
        attacked(tmp_path, rung, "echo", "\udcff")


@every_backend
@pytest.mark.parametrize("rung", CONTAINER)
def test_a22_a_runtime_whose_container_does_not_hold_is_not_offered(
    tmp_path: Path, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = user_namespace.make
    monkeypatch.setattr(container, "profile", lambda _: {"defaultAction": "SCMP_ACT_ALLOW"})
    monkeypatch.setattr(user_namespace, "make", lambda o, i, **_: make(o, i, sealed=False))

    async def body() -> BoxOffer:
        async with SandboxHost.open(tmp_path) as host:
            backend = sandbox.backend_of(host, rung)
            try:
                return await backend.offer()
            finally:
                await backend.close()

    offer = sandbox.run(body)
    assert not offer.available
    assert "further user namespaces can be made" in offer.missing


@every_backend
@pytest.mark.parametrize("rung", CONTAINER)
def test_a22_a_runtime_that_passes_over_the_filter_is_not_offered(
    tmp_path: Path, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "profile", lambda _: {"defaultAction": "SCMP_ACT_ALLOW"})

    async def body() -> BoxOffer:
        async with SandboxHost.open(tmp_path) as host:
            backend = sandbox.backend_of(host, rung)
            try:
                return await backend.offer()
            finally:
                await backend.close()

    offer = sandbox.run(body)
    assert not offer.available
    assert offer.missing == "a box ran but did not hold: system calls are not filtered"


@sandbox.needs_root
@pytest.mark.root
def test_a22_crun_takes_no_mounts_where_it_would_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(rung=Rung.CRUN, path="/usr/bin/crun", options=())
    mount = Mount(source="/usr/share", target="/data")
    policy = ExecutionPolicy(accept_shared_kernel=True, mounts=(mount,))

    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            backend = ContainerBackend(host, runtime)
            for both in (False, True):
                monkeypatch.setattr(os.path, "ismount", lambda _, both=both: both)
                if not both:
                    backend.check(policy)
                    continue
                with pytest.raises(IsolationUnavailable, match="both versions"):
                    backend.check(policy)
                backend.check(ACCEPTED)
            monkeypatch.undo()

    sandbox.run(body)


def test_a22_a_host_without_a_runtime_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci_runtimes, "find", list)
    policy = ExecutionPolicy(isolation=Isolation.CONTAINER, accept_shared_kernel=True)

    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            with pytest.raises(IsolationUnavailable, match=r"no OCI runtime.*apt install runc"):
                await choose_backend(policy, host)

    sandbox.run(body)


def test_a22_without_root_containers_are_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci_runtimes, "find", lambda: [RUNC])
    policy = ExecutionPolicy(isolation=Isolation.CONTAINER, accept_shared_kernel=True)

    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            monkeypatch.setattr(host, "root", False)
            with pytest.raises(IsolationUnavailable, match=r"uids of their own.*run as root"):
                await choose_backend(policy, host)

    sandbox.run(body)


@pytest.mark.parametrize(
    ("policy", "holds", "chosen"),
    [
        (ExecutionPolicy(), True, Rung.RUNSC),
        (ACCEPTED, True, Rung.RUNSC),
        (ACCEPTED, False, Rung.ROOT),
        (ExecutionPolicy(isolation=Isolation.CONTAINER, accept_shared_kernel=True), False, None),
        (ExecutionPolicy(), False, None),
    ],
    ids=["untrusted", "accepted", "its canary fails", "and no other runtime", "and not accepted"],
)
@sandbox.needs_root
@pytest.mark.root
def test_a22_gvisor_comes_first_and_needs_nobody_s_consent(
    tmp_path: Path,
    policy: ExecutionPolicy,
    holds: bool,  # noqa: FBT001 - a parameter of the test
    chosen: Rung | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(oci_runtimes, "find", lambda: [RUNSC])

    async def said(backend: ContainerBackend) -> BoxOffer:
        return BoxOffer(
            isolation=Isolation.CONTAINER,
            rung=backend.parts.rung,
            available=holds,
            shared_kernel=backend.shared_kernel,
            missing="it did not hold",
        )

    monkeypatch.setattr(ContainerBackend, "offer", said)

    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            if chosen is None:
                with pytest.raises(IsolationUnavailable, match="it did not hold"):
                    await choose_backend(policy, host)
                return
            backend = await choose_backend(policy, host)
            assert isinstance(backend, LocalBackend)
            assert backend.parts.rung is chosen
            assert backend.shared_kernel == (chosen is not Rung.RUNSC)

    sandbox.run(body)


@every_backend
@pytest.mark.parametrize("rung", CONTAINER)
def test_auto_prefers_namespaces_and_takes_a_container_where_they_are_missing(
    tmp_path: Path, rung: Rung
) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            assert (await (await choose_backend(ACCEPTED, host)).offer()).rung is Rung.ROOT
            asked = ExecutionPolicy(isolation=Isolation.CONTAINER, accept_shared_kernel=True)
            taken = await (await choose_backend(asked, host)).offer()
            assert taken.rung in (rung, Rung.CRUN)

    sandbox.run(body)
