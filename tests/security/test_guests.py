"""Boxes with a kernel of their own (CASES A1-A9, A12, A14-A16, A18-A20, A23, A26, A28).

The same tests for guests of QEMU and for Smol Machines, and some for what only one of them has. One
guest is booted for the module; every box is a fork of it.
Programs of a guest are slow where it is emulated, so each attack is as small as it can be and no
test depends on speed.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.errors import ArtifactDamaged, BoxFailed, IsolationUnavailable
from stoker.model.checkpoint import StateKind
from stoker.model.execution import Destination, ExecutionPolicy, Mount
from stoker.model.tools import LimitKind, RunRequest, RunResult, Tests
from stoker.sandbox.cgroups import is_zombie
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.qemu import parts
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.sandbox.select import choose_backend
from stoker.sandbox.smol.backend import SmolBackend
from stoker.sandbox.smol.box import SmolBox
from stoker.sandbox.uids import pids_of_uid
from stoker.sandbox.vm.box import GuestBox
from support import attacks, sandbox
from support.attacks import BOMB, SPIN
from support.worlds import (
    LIMITS,
    MICROVM,
    PATIENCE,
    QEMU,
    World,
    opened,
    result_of,
)

TESTS = Tests(source="def check(candidate):\n    assert candidate(2) == 4\n", entry_point="f")

every = pytest.mark.parametrize("world", [QEMU, MICROVM], indirect=True)
of_qemu = pytest.mark.parametrize("world", [QEMU], indirect=True)
of_machines = pytest.mark.parametrize("world", [MICROVM], indirect=True)


@pytest.fixture(scope="module")
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    yield from opened(request.param, tmp_path_factory.mktemp("state"))


@every
def test_a_guest_is_offered_after_its_canary_with_a_kernel_of_its_own(world: World) -> None:
    offer = world.do(world.backend.offer)
    assert offer.available, offer.missing
    assert not offer.shared_kernel
    said = world.ran("python", "-c", "import os; print(os.uname().release, os.getuid())").text
    release, uid = said.split()
    assert release != os.uname().release
    assert uid == "1000"


@every
def test_what_guests_do_not_have_is_refused_by_name(world: World, tmp_path: Path) -> None:
    lacking: list[tuple[dict[str, object], str]] = [
        ({"mounts": (Mount(source="/usr", target="/x"),)}, "mounts")
    ]
    if isinstance(world.backend, SmolBackend):
        lacking.append(({"network": (Destination(host="example.org"),)}, "network"))
    for changes, word in lacking:
        with pytest.raises(IsolationUnavailable, match=word):
            world.backend.check(msgspec.structs.replace(world.policy, **changes))

    async def auto() -> None:
        await choose_backend(ExecutionPolicy(), world.backend.host)

    if not parts.has_kvm():
        with pytest.raises(IsolationUnavailable, match='isolation = "qemu"'):
            world.do(auto)


@every
def test_a1_a2_what_a_program_leaves_is_dead_and_holds_nothing(world: World) -> None:
    async def body() -> tuple[RunResult, RunResult, RunResult]:
        async with world.box() as box:
            first = await result_of(box, *attacks.BACKGROUND_CHILD)
            second = await result_of(box, *attacks.TWICE_FORKED)
            return first, second, await result_of(box, "sh", "-c", "ps -o args | grep -c [s]leep")

    first, second, counted = world.do(body)
    assert (first.exit_code, first.stdout.kept) == (0, b"now\n")
    assert second.exit_code == 0
    assert counted.stdout.kept == b"0\n"


@every
def test_a3_the_wall_deadline_holds_and_the_box_goes_on(world: World) -> None:
    async def body() -> tuple[RunResult, RunResult]:
        async with world.box() as box:
            await box.write_files({"kept": b"still here"})
            script = f"trap '' TERM INT; kill -9 -1; sleep {sandbox.MARK}"
            late = await result_of(box, "sh", "-c", script, seconds=0.5)
            return late, await result_of(box, "cat", "kept")

    late, after = world.do(body)
    assert late.timed_out
    assert late.limit is None
    assert (after.stdout.kept, after.interrupted_before) == (b"still here", True)


@every
def test_a4_the_cpu_budget_is_the_boxs(world: World) -> None:
    script = f"import os\nos.fork()\n{SPIN}"
    assert world.ran("python", "-c", script, cpu_seconds=1.0).limit is LimitKind.CPU


@every
def test_a5_a_hog_in_a_child_is_a_memory_limit(world: World) -> None:
    hog = "x = bytearray(200 << 20)"
    assert world.ran("sh", "-c", f"python -c '{hog}'; exit 0").limit is LimitKind.MEMORY


@every
def test_a6_a_fork_bomb_is_held_and_the_next_action_runs(world: World) -> None:
    async def body() -> tuple[RunResult, RunResult]:
        async with world.box() as box:
            bomb = await result_of(box, "python", "-c", BOMB)
            return bomb, await result_of(box, "echo", "on")

    bomb, after = world.do(body)
    assert bomb.limit is LimitKind.PROCESSES
    assert after.stdout.kept == b"on\n"


@every
@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/workspace"])
def test_a7_every_writable_place_is_sized(world: World, place: str) -> None:
    result = world.ran("dd", "if=/dev/zero", f"of={place}/full", "bs=1M", "count=64")
    assert result.limit is LimitKind.DISK


@every
def test_a8_a_flood_is_stopped_with_its_true_count(world: World) -> None:
    result = world.ran("dd", "if=/dev/zero", "bs=64k", "count=100000")
    assert result.limit is LimitKind.OUTPUT
    assert len(result.stdout.kept) == LIMITS.output_bytes
    assert result.stdout.total_bytes > 2 * LIMITS.output_bytes


@every
def test_a9_a10_a12_bytes_go_in_and_out_exactly(world: World) -> None:
    every = bytes(range(256)) * 8000
    result = world.ran("cat", stdin=every, output_bytes=3_000_000)
    assert result.stdout.kept == every
    assert result.ok


@every
def test_a14_a26_files_are_never_followed(world: World) -> None:
    async def body() -> None:
        async with world.box() as box:
            content = os.urandom(500_000)
            await box.write_files({"deep/er/file": content})
            script = "ln -s /etc/passwd link; ln -s /etc folder; mkfifo pipe; echo x > a; ln a b"
            assert (await result_of(box, "sh", "-c", script)).ok
            for path in ("link", "folder/passwd", "../etc/passwd", "/etc/passwd", "pipe", "a"):
                assert (await box.read_file(path, bytes_max=10)).refused
            out = await box.export((".",), bytes_max=1 << 20)
            assert out.files == {"deep/er/file": content}
            assert set(out.refused) == {"link", "folder", "pipe", "a", "b"}

    world.do(body)


REFUSED = """
import ctypes, os, socket
def tried(name, action):
    try:
        action()
        print(name)
    except (OSError, ValueError):
        pass
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*arguments) < 0: raise OSError
tried("connect", lambda: socket.create_connection(("1.1.1.1", 53), 1))
tried("raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
for cid in (1, 2, 3):
    for port in (1, 6000):  # the second is where an agent of Smol Machines listens
        tried("vsock", lambda: socket.socket(40, socket.SOCK_STREAM).connect((cid, port)))
tried("setting", lambda: open("/proc/sys/kernel/core_pattern", "w"))
tried("memory", lambda: open("/dev/mem", "rb"))
tried("disk", lambda: open("/dev/vda", "rb"))
tried("port", lambda: open("/dev/vport1p1", "rb"))
tried("console", lambda: open("/dev/ttyS0", "wb"))
tried("runner", lambda: open("/proc/1/mem", "rb"))
tried("its environment", lambda: open("/proc/1/environ", "rb").read())
tried("mount", lambda: call(165, b"x", b"/tmp", b"tmpfs", 0, None))
tried("user namespace", lambda: call(272, 0x10000000))
tried("system", lambda: open("/bin/new", "w"))
tried("group", lambda: open("/sys/fs/cgroup/box/memory.max", "w"))
# dummy0: a device that the kernel of Smol Machines makes by itself, and that leads nowhere
print(sorted({*os.listdir("/sys/class/net")} - {"dummy0"}), len(os.listdir("/proc/self/fd")))
"""


@every
def test_a15_a16_a27_what_a_program_must_not_reach_is_refused(world: World) -> None:
    result = world.ran("python", "-I", "-c", REFUSED)
    assert result.stdout.kept == b"['lo'] 4\n", result.text


@every
def test_a18_a19_two_forks_share_nothing_and_are_random_apart(world: World) -> None:
    script = (
        "import os, random, uuid; print(uuid.uuid4(), random.random(), os.urandom(8).hex(), "
        "open('/proc/sys/kernel/random/uuid').read().strip(), os.uname().nodename, "
        "os.path.exists('mine')); open('mine', 'w')"
    )

    async def body() -> list[list[str]]:
        async with world.box() as one, world.box() as other:
            said = [await result_of(box, "python", "-c", script) for box in (one, other)]
            return [result.text.split() for result in said]

    one, other = world.do(body)
    assert len(one) == 6, one
    assert all(a != b for a, b in zip(one[:-1], other[:-1], strict=True))
    assert (one[-1], other[-1]) == ("False", "False")


@every
@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("def f(x): return x + x", True),
        ("import os\ndef f(x): print('passed', flush=True); os._exit(0)", False),
    ],
    ids=["right", "exits 0"],
)
def test_a28_two_guests_grade_an_answer(world: World, answer: str, *, passed: bool) -> None:
    async def body() -> bool:
        verdict, _ = await world.backend.judge(
            "graded", {"solution.py": answer.encode()}, TESTS, policy=world.policy,
            timeout_seconds=PATIENCE,
        )  # fmt: skip
        return verdict.passed

    assert world.do(body) is passed


async def processes_of(world: World, box: GuestBox) -> list[int]:
    """Return the processes in which the machine of a box runs."""
    if isinstance(world.backend, QemuBackend):
        return pids_of_uid(uid_of(world, box))
    pid = (await world.backend.machines.rows())[world.backend.name_of(box.box_id)]
    assert pid is not None
    return [pid]


@every
def test_a23_a_guest_that_dies_is_a_lost_box_and_never_an_ordinary_failure(world: World) -> None:
    async def body() -> None:
        async with world.box() as box:
            running = asyncio.ensure_future(
                box.run(
                    RunRequest(argv=("sh", "-c", "echo begun; touch begun; sleep 1000")),
                    timeout_seconds=PATIENCE,
                )
            )
            while (await box.read_file("begun", bytes_max=1)).refused:
                await asyncio.sleep(0.02)
            for pid in await processes_of(world, box):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run = await running
            assert run.box_lost
            assert not run.result.ok
            assert run.result.stdout.kept == b"begun\n"
            with pytest.raises(BoxFailed, match="lost"):
                await box.read_file("begun", bytes_max=1)

    world.do(body)


@of_qemu
def test_the_emulator_is_confined(world: World) -> None:
    async def body() -> tuple[int, int]:
        async with world.box() as box:
            uid = uid_of(world, box)
            [pid] = [p for p in pids_of_uid(uid) if _line(p).startswith(b"/usr/bin/qemu")]
            _is_confined(uid, Path(f"/proc/{pid}"))
            return uid, pid

    world.do(body)


def uid_of(world: World, box: GuestBox) -> int:
    records = world.backend.host.ledger.records()
    uid = next(r.uid for r in records if r.box_id == box.box_id)
    assert uid is not None
    return uid


def _is_confined(uid: int, process: Path) -> None:
    lines = (process / "status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert set(status["Uid"].split()) == {str(uid)}
    assert int(status["CapEff"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    devices = (process / "net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in devices] == ["lo"]
    seen = {path.name for path in (process / "root").iterdir()}
    assert seen <= {"usr", "lib", "lib64", "bin", "dev", "proc", "etc", "guest"}


def _line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


HOLDER = """
import asyncio, importlib, sys
from pathlib import Path
import msgspec
from stoker.model.execution import Baseline, ExecutionPolicy
from stoker.model.tools import RunRequest
from stoker.sandbox.host import SandboxHost

async def main():
    policy = msgspec.json.decode(sys.argv[2], type=ExecutionPolicy)
    async with SandboxHost.open(Path(sys.argv[1])) as host:
        backend = getattr(importlib.import_module(sys.argv[3]), sys.argv[4])(host)
        box = await backend.create("box_left", Baseline(), policy)
        running = asyncio.ensure_future(
            box.run(RunRequest(argv=("sh", "-c", "touch on; sleep 1000")), timeout_seconds=1000))
        while (await box.read_file("on", bytes_max=1)).refused:
            await asyncio.sleep(0.05)
        print(next(r.uid for r in host.ledger.records() if r.box_id == "box_left"), flush=True)
        await running

asyncio.run(main())
"""


def abandon_a_box(state: Path, backend: type, policy: ExecutionPolicy) -> str:
    """Have a worker make a box, run something in it, and be killed; return what it said."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(state), msgspec.json.encode(policy).decode(),
         backend.__module__, backend.__name__],
        stdout=subprocess.PIPE,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        said = holder.stdout.readline().decode().strip()
        holder.kill()
    return said


@of_qemu
@pytest.mark.slow  # another guest is booted
def test_a20_a_killed_worker_leaves_nothing_after_the_next_sweep(
    world: World, tmp_path: Path
) -> None:
    uid = int(abandon_a_box(tmp_path, QemuBackend, world.policy))

    async def swept() -> tuple[int, int, int]:
        async with SandboxHost.open(tmp_path) as host:
            return await host.sweep(), host.leaked(), len(host.ledger.records())

    assert sandbox.run(swept) == (1, 0, 0)
    assert [pid for pid in pids_of_uid(uid) if not is_zombie(pid)] == []


# --- what only Smol Machines have ---------------------------------------------------------------


def _machine_pids() -> set[int]:
    """Return the processes of machines on this host."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if b"smol-vmm" in (entry / "cmdline").read_bytes() and not is_zombie(
                    int(entry.name)
                ):
                    found.add(int(entry.name))
    return found


@of_machines
@pytest.mark.slow  # another machine is booted
def test_a20_machines_of_a_killed_worker_are_deleted_by_the_next_sweep(
    world: World, tmp_path: Path
) -> None:
    before = _machine_pids()
    abandon_a_box(tmp_path, SmolBackend, world.policy)

    async def swept() -> tuple[list[str], int, list[str], int, int]:
        async with SandboxHost.open(tmp_path) as host:
            backend = SmolBackend(host)
            try:
                left = list(await backend.machines.rows())
                count = await backend.sweep()
                after = list(await backend.machines.rows())
                return left, count, after, host.leaked(), len(host.ledger.records())
            finally:
                await backend.close()

    left, count, after, leaked, records = world.do(swept)
    assert len(left) == 2  # the box, and what it was branched off
    assert (count, after, leaked, records) == (2, [], 0, 0)
    assert _machine_pids() - before == set()


IDENTITY = (
    "import os, random, uuid; print(uuid.uuid4(), random.random(), os.urandom(8).hex(), "
    "open('/proc/sys/kernel/random/uuid').read().strip(), os.uname().nodename)"
)


@of_machines
def test_branches_go_on_from_memory_and_outlive_what_they_are_of(world: World) -> None:
    async def body() -> None:
        async with world.box() as box:
            await box.write_files({"kept": b"from the first"})
            first, second = await box.branch(2)
            one, two = first.box, second.box
            assert isinstance(one, GuestBox)
            assert isinstance(two, GuestBox)
            assert first.digest == second.digest
            assert [(b.parent, b.generation) for b in (first, second)] == [
                (box.baseline.digest, 1)
            ] * 2
            await one.write_files({"mine": b"1"})
            for other in (box, two):
                assert (await other.read_file("mine", bytes_max=1)).refused
        (deeper,) = await one.branch(1)
        assert (deeper.parent, deeper.generation) == (first.digest, 2)
        await one.destroy()
        assert isinstance(deeper.box, GuestBox)
        said = [
            (await result_of(b, "python", "-c", IDENTITY)).text.split() for b in (two, deeper.box)
        ]
        assert all(a != b for a, b in zip(*said, strict=True)), said
        assert (await deeper.box.read_file("mine", bytes_max=9)).content == b"1"
        assert (await two.read_file("kept", bytes_max=99)).content == b"from the first"
        with pytest.raises(BoxFailed, match="being removed"):
            await one.read_file("kept", bytes_max=1)
        await two.destroy()
        await deeper.box.destroy()

    world.do(body)


@of_machines
def test_a_checkpoint_of_memory_is_restored_under_the_limits_given_and_a_damaged_one_is_not(
    world: World, tmp_path: Path
) -> None:
    async def body() -> None:
        backend = world.backend
        async with world.box() as box:
            await box.write_files({"kept": b"kept"})
            saved = await box.checkpoint(tmp_path)
            assert (await box.read_file("kept", bytes_max=9)).content == b"kept"
        assert (saved.kind, saved.generation) == (StateKind.MEMORY, 0)
        assert await asyncio.to_thread(os.listdir, tmp_path) == [saved.digest]
        limits = msgspec.structs.replace(LIMITS, processes_max=8, disk_bytes=4 << 20)
        smaller = msgspec.structs.replace(world.policy, limits=limits)
        back = await backend.restore("box_back", box.baseline, smaller, saved)
        assert isinstance(back, SmolBox)
        assert (await back.read_file("kept", bytes_max=9)).content == b"kept"
        script = "hostname; cat /sys/fs/cgroup/box/pids.max; stat -fc %b /workspace"
        seen = (await result_of(back, "sh", "-c", script)).text
        assert seen.split() == ["box-back", "8", str(limits.disk_bytes // 4096)]
        assert (back.began_from, back.generation) == (saved.digest, 1)
        await back.destroy()
        os.truncate(saved.file, saved.size_bytes - 1)
        with pytest.raises(ArtifactDamaged):
            await backend.restore("box_worse", box.baseline, world.policy, saved)
        left = [record.box_id for record in backend.host.ledger.records()]
        assert [box_id for box_id in left if not box_id.startswith("origin_")] == []

    world.do(body)
