"""Checkpoints, branches and baselines of guests: the contract that all backends keep.

One guest is booted for it; what needs none is tried with a runner without a guest.
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from msgspec.structs import replace

from stoker.errors import ArtifactDamaged, BoxFailed
from stoker.model.checkpoint import Checkpoint
from stoker.model.execution import Baseline, Destination, Rung
from stoker.model.tools import LimitKind, RunRequest
from stoker.model.value import content_digest
from stoker.sandbox import entries
from stoker.sandbox.base import Box
from stoker.sandbox.branching import Beginning
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.sandbox.uids import pids_of_uid
from stoker.sandbox.vm import keeping
from support import sandbox
from support.baselines import (
    FAILING,
    SETUP,
    baseline,
    begins_built,
    kept_in,
    recipes_in,
    refuses,
    said_in,
    source_in,
)
from support.guests import SMALL, filled, of_host, runner
from support.states import (
    FORGED,
    LOOKED,
    Traits,
    crafted,
    entry,
    holds_in,
    names_in,
    ran,
)
from support.worlds import LIMITS, PATIENCE, QEMU, World, memories_of, opened, result_of


@pytest.fixture(scope="module")
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    yield from opened(request.param, tmp_path_factory.mktemp("state"))


of_qemu = pytest.mark.parametrize("world", [QEMU], indirect=True)


MADE = """
mkdir -p deep; echo data > deep/file; ln deep/file again; ln -s /etc/passwd out; mkfifo pipe
chmod 4711 deep/file; chmod 500 deep; touch -d @5 deep; echo left > /tmp/left
"""
SEEN = """
cat deep/file; cat /tmp/left; readlink out; stat -c '%a %h %u' deep/file; stat -c '%a %Y' deep
test -p pipe; test deep/file -ef again; test ! -e mine && echo alone; touch mine
"""
WANTED = "data\nleft\n/etc/passwd\n711 2 1000\n500 5\nalone\n"


@of_qemu
def test_a_branch_of_a_guest_begins_with_its_files_and_a_namespace_reads_its_checkpoint(
    world: World, tmp_path: Path
) -> None:
    async def seen(box: Box) -> None:
        looked = await box.run(RunRequest(argv=("sh", "-ec", SEEN)), timeout_seconds=PATIENCE)
        assert looked.result.stdout.kept.decode() == WANTED

    async def body() -> None:
        assert isinstance(world.backend, QemuBackend)
        async with world.box() as box:
            assert (await result_of(box, "sh", "-ec", MADE)).ok
            first, second = await box.branch(2)
            await seen(first.box)
            await seen(second.box)
            assert first.digest == second.digest
            assert (first.parent, first.generation) == (box.baseline.digest, 1)
            await first.box.destroy()
            await second.box.destroy()
            saved = await box.checkpoint(tmp_path)
            assert (saved.digest, saved.parent) == (first.digest, box.baseline.digest)
            assert names_in(tmp_path) == [saved.digest]
        namespaces = sandbox.backend_of(world.backend.host, Rung.ROOT)
        policy = sandbox.policy_of(Rung.ROOT, sandbox.SMALL)
        back = await namespaces.restore("box_namespace", Baseline(), policy, saved)
        assert (await back.checkpoint(tmp_path)).digest == saved.digest
        await seen(back)
        await back.destroy()

    world.do(body)


@of_qemu
@pytest.mark.slow  # a dozen programs of Python in guests that are emulated
def test_guests_keep_the_contract_of_every_box(world: World, tmp_path: Path) -> None:
    async def body() -> None:
        assert isinstance(world.backend, QemuBackend)
        traits = Traits(walled=True, keeps_tmp=True)
        saved = await holds_in(world.backend, world.policy, tmp_path, traits)
        namespaces = sandbox.backend_of(world.backend.host, Rung.ROOT)
        policy = sandbox.policy_of(Rung.ROOT, sandbox.SMALL)
        back = await namespaces.restore("box_namespace", Baseline(), policy, saved)
        assert await ran(back, LOOKED) == "as it was\n"
        assert (await back.checkpoint(tmp_path)).digest == saved.digest
        await back.destroy()

    world.do(body)


@of_qemu
def test_a_guest_is_not_begun_in_what_is_no_state_and_nothing_is_left(
    world: World, tmp_path: Path
) -> None:
    async def tried(stream: bytes, error: type[Exception], words: str, **limits: int) -> None:
        file = tmp_path / "file"
        file.write_bytes(stream)
        saved = Checkpoint(digest=content_digest(stream), parent="", generation=0, file=str(file))
        policy = replace(world.policy, limits=replace(world.policy.limits, **limits))
        with pytest.raises(error, match=words):
            await world.backend.restore("box_none", Baseline(), policy, saved)
        assert not world.backend.boxes

    async def body() -> None:
        await tried(FORGED["climbing"], ArtifactDamaged, "leaves its folder")
        many = crafted(*(entry("link", b"%d" % n, target=b"x") for n in range(200)))
        # Its kernel says it: more than the checks of the host allow, names of one file apart.
        await tried(many, BoxFailed, "Errno 28", files_max=100)

    world.do(body)
    assert world.backend.host.leaked() == 0


@of_qemu
def test_what_forks_share_cannot_be_written(world: World) -> None:
    async def body() -> None:
        async with world.box():
            _cannot_be_written(memories_of(world)[-1])

    world.do(body)


def _cannot_be_written(memory: int) -> None:
    with pytest.raises(PermissionError):
        os.pwrite(memory, b"x", 0)


# --- baselines ------------------------------------------------------------------------------------


@of_qemu
def test_guests_begin_with_what_was_built_once(world: World, tmp_path: Path) -> None:
    wanted = baseline(source_in(tmp_path), *SETUP)

    async def once() -> tuple[set[str], str]:
        assert isinstance(world.backend, QemuBackend)
        kept_in(world.backend.host, tmp_path / "kept")
        return await begins_built(world.backend, world.policy, wanted, 2)

    async def body() -> None:
        seen, digest = await once()
        assert len(seen) == 1, "what the set-up drew is the same in every box"
        assert [one[:12] for one in seen] == ["given of env"]
        assert (seen, digest) == await once()
        assert len(recipes_in(tmp_path / "kept")) == 1

    world.do(body)


@of_qemu
def test_forks_that_begin_with_a_baseline_share_nothing_and_each_has_its_limits(
    world: World, tmp_path: Path
) -> None:
    wanted = baseline(source_in(tmp_path), "head -c 1536k /dev/zero > big")
    drawn = "cat /proc/sys/kernel/random/uuid; hostname"
    smaller = replace(world.policy, limits=replace(LIMITS, disk_bytes=2 << 20, processes_max=8))
    tight = replace(world.policy, limits=replace(LIMITS, disk_bytes=1 << 20))
    sizes = "cat /sys/fs/cgroup/box/pids.max; stat -fc %b /workspace /tmp"

    async def body() -> None:
        kept_in(world.backend.host, tmp_path / "kept")
        one, two = [await world.backend.create(f"box_{n}", wanted, world.policy) for n in "ab"]
        said = [(await said_in(box, drawn)).split() for box in (one, two)]
        assert all(a != b for a, b in zip(*said, strict=True)), said
        full = await result_of(one, "dd", "if=/dev/zero", "of=more", "bs=1M", "count=7")
        assert full.limit is LimitKind.DISK, "what it began with counts as well"
        assert (await two.read_file("more", bytes_max=1)).refused
        three = await world.backend.create("box_c", wanted, smaller)
        assert (await said_in(three, sizes)).split() == ["8", "512", "512"]
        assert len(memories_of(world)) > 2
        for memory in memories_of(world):
            _cannot_be_written(memory)
        with pytest.raises(BoxFailed, match="could not be made"):
            await world.backend.create("box_d", wanted, tight)
        for box in (one, two, three):
            await box.destroy()

    world.do(body)
    assert world.backend.host.leaked() == 0


@of_qemu
@pytest.mark.parametrize(
    ("setup", "said"),
    [FAILING[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in FAILING[1:])],
)
def test_a_set_up_that_fails_in_a_guest_is_one_sentence_and_leaves_nothing(
    world: World, tmp_path: Path, setup: str, said: str
) -> None:
    wanted = baseline(source_in(tmp_path))

    async def body() -> None:
        assert isinstance(world.backend, QemuBackend)
        kept_in(world.backend.host, tmp_path / "kept")
        await refuses(world.backend, world.policy, wanted, setup, said)
        assert [n for n in names_in(tmp_path / "kept") if not n.endswith(".lock")] == []

    world.do(body)


@of_qemu
def test_a_guest_that_dies_in_a_set_up_is_a_lost_box_and_no_failure_of_the_line(
    world: World, tmp_path: Path
) -> None:
    wanted = baseline(source_in(tmp_path), "touch begun; sleep 1000")

    async def body() -> None:
        host, boxes = world.backend.host, world.backend.boxes
        kept_in(host, tmp_path / "kept")
        asking = asyncio.ensure_future(world.backend.create("box_one", wanted, world.policy))
        while not boxes:
            await asyncio.sleep(0.01)
        (box,) = boxes.values()
        while (await box.read_file("begun", bytes_max=1)).refused:
            await asyncio.sleep(0.01)
        (uid,) = (r.uid for r in host.ledger.records() if r.box_id == box.box_id)
        assert uid is not None
        for pid in pids_of_uid(uid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(BoxFailed, match="command 1 of its setup ran was lost"):
            await asking
        assert (boxes, host.leaked()) == ({}, 0)
        assert recipes_in(tmp_path / "kept") == []

    world.do(body)


@of_qemu
def test_what_is_branched_or_built_has_the_way_out_of_its_policy_and_no_other(
    world: World, tmp_path: Path
) -> None:
    asks = "printf 'GET / HTTP/1.1\\r\\n\\r\\n' | nc 127.0.0.1 3128"
    out = replace(world.policy, network=(Destination(host="example.org"),))
    wanted = baseline(source_in(tmp_path), f"{asks} > answer; grep -q 'HTTP/1.1 405' answer")

    async def body() -> None:
        kept_in(world.backend.host, tmp_path / "kept")
        box = await world.backend.create("box_out", wanted, out)
        (branch,) = await box.branch(1)
        assert (await said_in(branch.box, f"cat answer; {asks}")).count("HTTP/1.1 405") == 2
        await branch.box.destroy()
        await box.destroy()
        async with world.box() as alone:
            said = await result_of(alone, "sh", "-c", asks)
            assert (said.exit_code, said.stdout.kept) == (1, b"")

    world.do(body)


# --- the runner, without a guest ------------------------------------------------------------------


def test_a_runner_gives_the_state_that_the_host_would_and_takes_it(tmp_path: Path) -> None:
    workspace = filled(tmp_path)
    expected, stream = of_host(workspace)
    other = tmp_path / "other"
    other.mkdir()

    async def body() -> None:
        into = BytesIO()
        async with runner(workspace) as given:
            assert await keeping.packed(given, SMALL, into) == expected
            assert into.getvalue() == stream
        async with runner(other) as taking:
            source = BytesIO(stream)
            await keeping.begin_in(taking, SMALL, Beginning(source, expected.digest, 1))

    sandbox.run(body)
    assert of_host(other)[0] == expected


def test_what_a_runner_cannot_keep_is_refused_and_it_goes_on(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()

    async def body() -> None:
        async with runner(workspace) as given:
            (workspace / "big").write_bytes(b"x" * (3 * SMALL.disk_bytes + 1))
            with pytest.raises(entries.Unkept, match="more than"):
                await keeping.packed(given, SMALL, BytesIO())
            (workspace / "big").unlink()
            await keeping.packed(given, SMALL, BytesIO())

    sandbox.run(body)


class Full(BytesIO):
    """A file on a full disk."""

    def write(self, content: object, /) -> int:
        """Refuse."""
        del content
        raise OSError(28, "No space left on device")


def test_a_full_disk_of_the_host_is_not_the_guests_lie(tmp_path: Path) -> None:
    workspace = filled(tmp_path)

    async def body() -> None:
        async with runner(workspace) as given:
            with pytest.raises(OSError, match="No space"):
                await keeping.packed(given, SMALL, Full())
            assert given.lost is None
            await keeping.packed(given, SMALL, BytesIO())

    sandbox.run(body)


def test_a_cancelled_state_leaves_a_runner_that_goes_on(tmp_path: Path) -> None:
    workspace = filled(tmp_path)
    (workspace / "more").write_bytes(bytes(2_000_000))

    begun, may = threading.Event(), threading.Event()

    class Held(BytesIO):
        """Does not take anything until it may."""

        def write(self, content: bytes, /) -> int:  # type: ignore[override]
            begun.set()
            may.wait(30)
            return len(content)

    async def body() -> None:
        async with runner(workspace) as given:
            taking = asyncio.ensure_future(keeping.packed(given, SMALL, Held()))
            await asyncio.to_thread(begun.wait, 30)
            taking.cancel()
            await asyncio.sleep(0)
            may.set()
            with pytest.raises(asyncio.CancelledError):
                await taking
            into = BytesIO()
            await keeping.packed(given, SMALL, into)
            assert into.getvalue() == of_host(workspace)[1]

    sandbox.run(body)
