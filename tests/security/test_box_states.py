"""Checkpoints and branches on every backend that promises them, and hostile content in them."""

import asyncio
import os
import stat
import threading
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.errors import ArtifactDamaged, BoxFailed, ToolRefused
from stoker.model.checkpoint import Checkpoint
from stoker.model.execution import Rung
from stoker.model.tools import RunRequest
from stoker.model.value import content_digest
from stoker.sandbox import branching, entries, states, unpacking
from stoker.sandbox.local import LocalBackend, LocalBox
from support import sandbox
from support.sandbox import boxed, needs_root, run
from support.states import FILLED, FORGED, crafted, entry, holds, names_in, ran

DEEP = """
import os
for _ in range(60):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
"""


@pytest.mark.parametrize("rung", sandbox.EVERY)
def test_a_branch_begins_as_its_box_stands_and_shares_nothing(tmp_path: Path, rung: Rung) -> None:
    if rung is Rung.USER_NAMESPACE and sandbox.ROOT:
        sandbox.ordinary_output(ORDINARY, rung.value)
    else:
        run(lambda: holds(tmp_path, rung))


ORDINARY = """
import asyncio, sys
from pathlib import Path
from support import sandbox, states
asyncio.run(states.holds(Path(sys.argv[1]), sandbox.Rung(sys.argv[2])))
"""


def with_box(
    tmp_path: Path, rung: Rung, body: Callable[[LocalBackend, LocalBox], Awaitable[None]]
) -> None:
    """Run ``body`` with a box; afterwards nothing may be left."""

    async def held() -> None:
        async with boxed(tmp_path / "state", rung) as (backend, box):
            await body(backend, box)

    run(held)


@needs_root
@pytest.mark.root
def test_a19_every_branch_draws_its_own_randomness(tmp_path: Path) -> None:
    drawn = "import os, random, uuid; print(uuid.uuid4(), random.random(), os.urandom(8).hex())"

    async def body(_backend: LocalBackend, box: LocalBox) -> None:
        await ran(box, drawn)
        branches = await box.branch(25)
        seen = [await ran(branch.box, drawn) for branch in branches]  # type: ignore[arg-type]
        assert len(set(" ".join(seen).split())) == 75

    with_box(tmp_path, Rung.ROOT, body)


@pytest.mark.parametrize("rung", sandbox.HERE)
def test_a_tree_too_deep_to_keep_is_refused_whole_and_the_box_goes_on(
    tmp_path: Path, rung: Rung
) -> None:
    async def body(backend: LocalBackend, box: LocalBox) -> None:
        await ran(box, DEEP)
        with pytest.raises(ToolRefused, match="too deep"):
            await box.checkpoint(tmp_path)
        with pytest.raises(ToolRefused, match="too deep"):
            await box.branch(2)
        assert names_in(tmp_path) == ["state"]
        assert list(backend.boxes) == ["box_test"]
        assert await ran(box, "print(1)") == "1\n"

    with_box(tmp_path, rung, body)


def _huge(workspace: Path) -> None:
    with (workspace / "huge").open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("rung", sandbox.HERE)
def test_a_sparse_tebibyte_costs_no_more_than_what_is_in_it(tmp_path: Path, rung: Rung) -> None:
    async def body(_backend: LocalBackend, box: LocalBox) -> None:
        _huge(box.directory / "workspace")
        saved = await box.checkpoint(tmp_path)
        assert saved.size_bytes < 10_000
        (branch,) = await box.branch(1)
        looked = "import os; s = os.stat('huge'); print(s.st_size, s.st_blocks)"
        assert await ran(branch.box, looked) == f"{1 << 40} 0\n"  # type: ignore[arg-type]

    with_box(tmp_path, rung, body)


@needs_root
@pytest.mark.root
def test_devices_and_attributes_do_not_travel(tmp_path: Path) -> None:
    async def body(_backend: LocalBackend, box: LocalBox) -> None:
        _planted(box.directory / "workspace")
        saved = await box.checkpoint(tmp_path)
        assert set(saved.left_out) == {"workspace/null: a device", "workspace/whiteout: a device"}
        (branch,) = await box.branch(1)
        assert isinstance(branch.box, LocalBox)
        _unplanted(branch.box.directory / "workspace")

    with_box(tmp_path, Rung.ROOT, body)


def _planted(workspace: Path) -> None:
    os.mknod(workspace / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.mknod(workspace / "whiteout", stat.S_IFCHR, os.makedev(0, 0))
    (workspace / "plain").write_bytes(b"x")
    (workspace / "plain").chmod(0o6755)
    os.setxattr(workspace / "plain", "trusted.overlay.redirect", b"/etc")


def _unplanted(workspace: Path) -> None:
    assert names_in(workspace) == ["plain"]
    assert stat.S_IMODE((workspace / "plain").stat().st_mode) == 0o755
    assert os.listxattr(workspace / "plain") == []


@pytest.mark.parametrize("rung", sandbox.HERE)
@pytest.mark.parametrize("named", FORGED)
def test_a_forged_checkpoint_is_refused_and_touches_nothing(
    tmp_path: Path, rung: Rung, named: str
) -> None:
    file = tmp_path / "forged"
    file.write_bytes(FORGED[named])
    saved = Checkpoint(
        digest=content_digest(FORGED[named]), parent="", generation=0, file=str(file)
    )

    async def body(backend: LocalBackend, box: LocalBox) -> None:
        with pytest.raises(ArtifactDamaged):
            await backend.restore("box_forged", box.baseline, box.policy, saved)
        assert list(backend.boxes) == ["box_test"]

    with_box(tmp_path, rung, body)
    assert not Path("/etc/stoker-was-here").exists()
    assert names_in(tmp_path) == ["forged", "state"]


def test_without_openat2_another_name_still_never_climbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_has_openat2", lambda: False)
    (tmp_path / "secret").write_text("of the host")
    (tmp_path / "workspace").mkdir()
    stream = crafted(entry("same", b"b", target=b"../secret"))
    root = os.open(tmp_path / "workspace", os.O_PATH | os.O_DIRECTORY)
    try:
        with pytest.raises(ArtifactDamaged):
            unpacking.unpack(
                BytesIO(stream),
                {b"workspace": root},
                None,
                content_digest(stream),
                entries.Bounds(bytes_max=100, entries_max=100),
            )
    finally:
        os.close(root)
    assert names_in(tmp_path / "workspace") == []


def test_names_alone_are_bounded_on_the_way_out_and_in(tmp_path: Path) -> None:
    bounds = entries.Bounds(bytes_max=1000, entries_max=8)
    (tmp_path / "long").mkdir()
    (tmp_path / "into").mkdir()
    for number in range(3):
        (tmp_path / "long" / f"{number}").symlink_to("t" * 4000)
    long = os.open(tmp_path / "long", os.O_PATH | os.O_DIRECTORY)
    into = os.open(tmp_path / "into", os.O_PATH | os.O_DIRECTORY)
    try:
        with pytest.raises(entries.Unkept, match="names take more than"):
            states.pack({b"workspace": long}, BytesIO(), bounds)
        stream = BytesIO()
        more = bounds._replace(entries_max=100)
        packed = states.pack({b"workspace": long}, stream, more)
        stream.seek(0)
        with pytest.raises(OSError, match="names take more than"):
            unpacking.unpack(stream, {b"workspace": into}, None, packed.digest, bounds)
    finally:
        os.close(long)
        os.close(into)


@pytest.mark.parametrize("rung", sandbox.HERE)
def test_a_state_larger_than_the_limits_is_no_box(tmp_path: Path, rung: Rung) -> None:
    async def body(backend: LocalBackend, box: LocalBox) -> None:
        await ran(box, "open('big', 'wb').write(bytes([1]) * 4_000_000)")
        saved = await box.checkpoint(tmp_path)
        less = msgspec.structs.replace(box.policy.limits, disk_bytes=1024 * 1024)
        small = msgspec.structs.replace(box.policy, limits=less)
        with pytest.raises(BoxFailed, match="Errno 28"):
            await backend.restore("box_two", box.baseline, small, saved)
        few = msgspec.structs.replace(box.policy.limits, files_max=4)
        many = crafted(*(entry("link", b"%d" % n, target=b"x") for n in range(2000)))
        (tmp_path / "many").write_bytes(many)
        saved = Checkpoint(
            digest=content_digest(many), parent="", generation=0, file=str(tmp_path / "many")
        )
        with pytest.raises(BoxFailed, match="Errno 28"):
            await backend.restore(
                "box_two", box.baseline, msgspec.structs.replace(box.policy, limits=few), saved
            )
        assert list(backend.boxes) == ["box_test"]

    with_box(tmp_path, rung, body)


@pytest.mark.parametrize("rung", sandbox.HERE)
def test_a_cancelled_checkpoint_leaves_an_equal_one_that_was_kept_before(
    tmp_path: Path, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(_backend: LocalBackend, box: LocalBox) -> None:
        saved = await box.checkpoint(tmp_path)
        at, go = threading.Event(), threading.Event()

        def held(point: str) -> None:
            if point == branching.STATE_NAMED:
                at.set()
                assert go.wait(10)

        monkeypatch.setattr(branching, "reach", held)
        again = asyncio.ensure_future(box.checkpoint(tmp_path))
        assert await asyncio.to_thread(at.wait, 10)
        again.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await again
        assert names_in(tmp_path) == sorted([saved.digest, "state"])

    with_box(tmp_path, rung, body)


@pytest.mark.parametrize("rung", sandbox.HERE)
def test_a_box_that_goes_while_its_state_is_taken_has_none(
    tmp_path: Path, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(_backend: LocalBackend, box: LocalBox) -> None:
        at, go = threading.Event(), threading.Event()
        packing = states.pack

        def held(*given: Any) -> states.Packed:
            at.set()
            assert go.wait(10)
            return packing(*given)

        monkeypatch.setattr(states, "pack", held)
        taken = asyncio.ensure_future(box.checkpoint(tmp_path))
        assert await asyncio.to_thread(at.wait, 10)
        going = asyncio.ensure_future(box.destroy())
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(BoxFailed):
            await taken
        await going
        assert names_in(tmp_path) == ["state"]

    with_box(tmp_path, rung, body)


@pytest.mark.parametrize("rung", sandbox.HERE)
def test_a_box_that_is_not_wanted_while_it_is_made_leaves_nothing(
    tmp_path: Path, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(backend: LocalBackend, box: LocalBox) -> None:
        at, go = threading.Event(), threading.Event()
        building = type(box).build

        def held(self: LocalBox, begins: Any) -> None:
            at.set()
            assert go.wait(10)
            building(self, begins)

        monkeypatch.setattr(type(box), "build", held)
        making = asyncio.ensure_future(backend.create("box_two", box.baseline, box.policy))
        assert await asyncio.to_thread(at.wait, 10)
        making.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert backend.host.leaked() == 0
        assert [r.box_id for r in backend.host.ledger.records()] == ["box_test"]
        assert not box.directory.with_name(box.directory.name.replace("test", "two")).exists()

    with_box(tmp_path, rung, body)


@pytest.mark.parametrize("rung", sandbox.HERE)
def test_a_damaged_checkpoint_is_never_a_box(tmp_path: Path, rung: Rung) -> None:
    async def body(backend: LocalBackend, box: LocalBox) -> None:
        await ran(box, FILLED)
        saved = await box.checkpoint(tmp_path)
        _flipped(Path(saved.file), b"middle")
        with pytest.raises(ArtifactDamaged, match="something else"):
            await backend.restore("box_two", box.baseline, box.policy, saved)
        gone = Checkpoint(digest="0" * 64, parent="", generation=0, file="/nowhere")
        with pytest.raises(ArtifactDamaged, match="cannot be read"):
            await backend.restore("box_two", box.baseline, box.policy, gone)
        assert list(backend.boxes) == ["box_test"]

    with_box(tmp_path, rung, body)


def _flipped(file: Path, word: bytes) -> None:
    file.write_bytes(file.read_bytes().replace(word, word.upper()))


@pytest.mark.parametrize("rung", sandbox.HERE)
def test_no_state_is_taken_while_an_action_runs(tmp_path: Path, rung: Rung) -> None:
    async def body(_backend: LocalBackend, box: LocalBox) -> None:
        request = RunRequest(argv=("sleep", "60"))
        running = asyncio.ensure_future(box.run(request, timeout_seconds=60))
        while box._action is None:
            await asyncio.sleep(0)
        with pytest.raises(ToolRefused, match="between actions"):
            await box.checkpoint(tmp_path)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await box.checkpoint(tmp_path)

    with_box(tmp_path, rung, body)
