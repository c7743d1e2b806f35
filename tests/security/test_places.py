"""The mount namespace of an action: short, with its own box's mounts and nobody else's."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.model.execution import Baseline, Rung
from stoker.model.tools import RunRequest
from stoker.sandbox import kernel, places
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.maker_client import MakerClient
from stoker.sandbox.making import WorkOrder
from stoker.sandbox.places import Place, is_needed, mount_points
from stoker.sandbox.runtime import make_public
from support import sandbox
from support.sandbox import backend_of, needs_root, policy_of

pytestmark = [needs_root, pytest.mark.root]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[str]:
    place = tmp_path / "mount"
    place.mkdir()
    kernel.mount_tmpfs(str(place), "size=1m")
    (place / "mine").write_text("x")
    yield str(place)
    kernel.unmount(str(place))


def looked_at(mount: str, order: WorkOrder) -> str:
    """Return what a program started by ``order`` prints, with ``mount`` handed to it."""

    async def body() -> str:
        maker = MakerClient.start()
        read, write = os.pipe2(os.O_CLOEXEC)
        detached = kernel.detached_mount(mount)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        started = await maker.spawn(order, [null, write, null], [detached])
        exited = await started.exited
        for descriptor in (write, detached, null):
            os.close(descriptor)
        assert (exited.status, exited.error) == (0, "")
        await maker.close()
        with os.fdopen(read, "rb") as pipe:
            return pipe.read().decode()

    return sandbox.run(body)


def test_an_action_sees_its_mounts_in_a_short_table_and_the_host_sees_nothing(mount: str) -> None:
    make_public(places.ROOT / "workspace")
    target = str(places.ROOT / "workspace")
    before = mount_points()
    order = WorkOrder(
        argv=[b"/bin/sh", b"-c", b"cat /run/stoker/place/workspace/mine /proc/self/mountinfo"],
        place=Place(targets=[target], shown=[]),
    )
    said = looked_at(mount, order)
    assert said.startswith("x")
    points = [line.split(" ")[4] for line in said.removeprefix("x").splitlines()]
    assert target in points
    assert all(is_needed(point, set(places.SHOWN)) for point in points)
    assert len(points) < len(before)
    assert not any("/cgroup" in point or point == mount for point in points)
    assert mount_points() == before
    assert not list(Path(target).iterdir())


def test_where_no_short_table_can_be_made_the_host_s_is_copied(
    mount: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "mount_points", lambda: ["/somewhere"])  # as in a chroot
    assert places.Namespaces().short(Place(targets=[], shown=[])) is None


def test_boxes_at_once_see_their_own_mounts(tmp_path: Path) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            backend = backend_of(host, Rung.ROOT)
            boxes = [
                await backend.create(f"box_{n}", Baseline(), policy_of(Rung.ROOT)) for n in range(6)
            ]
            for number, box in enumerate(boxes):
                await box.write_files({"who": str(number).encode()})
            script = "cat who; echo $(cat who) > /tmp/told; ls /tmp /dev/shm"
            for _ in range(2):
                runs = await asyncio.gather(
                    *(
                        b.run(RunRequest(argv=("sh", "-c", script)), timeout_seconds=60)
                        for b in boxes
                    )
                )
                assert [run.result.stdout.kept for run in runs] == [
                    f"{n}/dev/shm:\n\n/tmp:\ntold\n".encode() for n in range(6)
                ]
            await backend.close()
            assert host.leaked() == 0

    sandbox.run(body)


def test_what_lies_above_and_below_what_is_shown_stays() -> None:
    needed = {"/usr", "/run/stoker/place"}
    kept = ["/", "/usr", "/usr/local", "/run", "/run/stoker"]
    gone = ["/sys", "/run/stoker/boxes/x", "/usrx", "/home"]
    assert [p for p in (*kept, *gone) if is_needed(p, needed)] == kept
    assert places._unescaped(b"/a\\040b\\134c\\011") == b"/a b\\c\t"
