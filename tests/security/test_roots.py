"""Root file systems of baselines: what a box sees of them, and that no image leaves its tree."""

import asyncio
import fcntl
import os
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest

from stoker.errors import BoxFailed, BranchUnavailable, ConfigInvalid, IsolationUnavailable
from stoker.model.execution import (
    Baseline,
    BaselineBuild,
    Destination,
    ExecutionPolicy,
    Mount,
    Rung,
)
from stoker.model.tools import RunRequest
from stoker.sandbox.baseline_cache import prune
from stoker.sandbox.baselines import Baselines
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.layers import Tree
from stoker.sandbox.local import LocalBox
from stoker.sandbox.removal import remove_tree
from stoker.sandbox.roots import Roots
from stoker.testing.boxes import MemoryBackend
from support import images, sandbox
from support.images import Entry, as_directory, as_tar, base, directory, file, image, link, same
from support.sandbox import CONTAINER, needs_root, run

ON = [
    pytest.param(Rung.ROOT, marks=[needs_root, pytest.mark.root], id="a"),
    *CONTAINER,
]
needs_busybox = pytest.mark.skipif(not images.BUSYBOX, reason=images.NEEDS_BUSYBOX)

WORK = (
    directory("srv/app", 0o700),
    file("srv/app/code.txt", "as shipped\n", mode=0o600),
    directory("opt"),
    file("opt/tool", "#!/bin/sh\necho tool of the image\n", mode=0o4700),
    file("etc/secret", "readable\n", mode=0o600),
    link("app", "/srv/app"),
)


async def said(box: LocalBox, line: str) -> str:
    request = RunRequest(argv=("sh", "-c", line))
    result = (await box.run(request, timeout_seconds=30.0)).result
    assert result.ok, result.text
    return result.stdout.kept.decode().strip()


@pytest.fixture
def kept() -> Iterator[Path]:
    """A directory that a leased uid can pass; pytest's own are closed to it."""
    path = Path(tempfile.mkdtemp(prefix="stoker-roots-"))
    path.chmod(0o711)
    (path / "states").mkdir()
    yield path
    remove_tree(path)


def kept_in(host: SandboxHost, path: Path) -> None:
    host.baselines = Baselines(path / "states", path / "roots")


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", ON)
@needs_busybox
def test_a_box_is_made_of_an_image_and_works_in_its_directory(
    tmp_path: Path, kept: Path, rung: Rung
) -> None:
    built = image(base(), WORK, env=["PATH=/opt:/bin", "COLOUR=of the image"], working_dir="/app")
    saved = as_tar(built.parts(), tmp_path / "image.tar")
    wanted = Baseline(name="app", root=str(saved))

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            kept_in(host, kept)
            backend = sandbox.backend_of(host, rung)
            policy = sandbox.policy_of(rung)
            box = await backend.create("box_one", wanted, policy)
            assert await said(box, "pwd; cat code.txt; echo $COLOUR") == (
                "/srv/app\nas shipped\nof the image"
            )
            assert await said(box, "tool; cat /etc/secret") == "tool of the image\nreadable"
            assert await said(box, "id -u; ls /") == "1000\n" + "\n".join(
                sorted(
                    ["app", "bin", "dev", "etc", "opt", "proc", "srv", "tmp", "usr", "workspace"]
                )
            ), "nothing of the host's"
            assert await said(
                box, "echo mine > code.txt; cat /workspace/code.txt /app/code.txt"
            ) == ("mine\nmine")
            for path in ("/opt/tool", "/etc/new", "/srv/new", "/.stoker/new"):
                assert "ead-only" in await said(box, f"touch {path} 2>&1 || true"), path
            assert await said(box, "stat -c %a /opt/tool") == "755", "no setuid bit"
            (branch,) = await box.branch(1)
            assert isinstance(branch.box, LocalBox)
            assert (
                await said(branch.box, "cat /srv/app/code.txt; tool") == "mine\ntool of the image"
            )
            saved_state = await box.checkpoint(tmp_path)
            again = await backend.restore("box_two", box.baseline, policy, saved_state)
            assert await said(again, "cat code.txt") == "mine"
            fresh = await backend.create("box_three", wanted, policy)
            assert await said(fresh, "cat code.txt") == "as shipped"
            missing = await fresh.run(RunRequest(argv=("nowhere",)), timeout_seconds=20.0)
            assert missing.result.exit_code == 127
            await backend.close()
            assert host.leaked() == 0

    run(body)


@pytest.mark.parametrize("rung", ON)
@needs_busybox
def test_setup_lines_run_in_the_root_and_a_directory_is_one_too(
    tmp_path: Path, kept: Path, rung: Rung
) -> None:
    root = tmp_path / "unpacked"
    for name in ("bin", "etc"):
        (root / name).mkdir(parents=True)
    shutil.copy(images.BUSYBOX, root / "bin" / "busybox")
    for name in ("sh", "env", "cat", "echo", "stat"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc" / "who").write_text("unpacked\n")
    (root / "etc" / "who").chmod(0o4600)
    build = BaselineBuild(setup=("cat /etc/who > made",), timeout_seconds=20.0)
    wanted = Baseline(name="own", root=str(root), build=build)

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            kept_in(host, kept)
            backend = sandbox.backend_of(host, rung)
            box = await backend.create("box_one", wanted, sandbox.policy_of(rung))
            assert await said(box, "cat made; stat -c %a /etc/who") == "unpacked\n644"
            await backend.close()

    run(body)


def test_the_same_image_has_one_name_in_every_form(tmp_path: Path) -> None:
    layers = [(directory("etc"), file("etc/a", "1")), (file("etc/b", "2"),)]
    plain, packed = image(*layers), image(*layers, packed=True)
    forms = [
        as_tar(plain.parts(), tmp_path / "one.tar"),
        as_tar(packed.parts(), tmp_path / "two.tar"),
        as_tar(plain.older(), tmp_path / "three.tar"),
        as_directory(packed.parts(), tmp_path / "layout"),
    ]

    async def body() -> None:
        roots = Roots(tmp_path / "roots")
        found = [await roots.hold(f"box_{n}", str(form)) for n, form in enumerate(forms)]
        assert len({root.digest for root in found}) == 1
        assert found[0].digest == images.digest(plain.config)
        assert len(list((tmp_path / "roots").glob("sha256-*[0-9a-f]"))) == 1
        tree = Path(found[0].tree)
        assert sorted(path.name for path in (tree / "etc").iterdir()) == ["a", "b"]
        await roots.close()

    asyncio.run(body())


def names_below(tree: Path) -> list[str]:
    found = [path for path in tree.rglob("*") if path.is_symlink() or not path.is_dir()]
    return sorted(str(path.relative_to(tree)) for path in found)


def test_a_layer_takes_away_what_lies_below_and_never_its_own(tmp_path: Path) -> None:
    lower = (
        directory("a"), file("a/one", "1"), file("a/two", "2"), directory("b"), file("b/old", "o"),
        directory("c/deep"), file("c/deep/x", "x"), file("d", "file"), link("e", "b"),
    )  # fmt: skip
    upper = (
        file("a/.wh.one"), file("a/one", "again"), file("b/new", "n"), file("b/.wh..wh..opq"),
        file(".wh.c"), directory("d"), file("d/in", "in"), file("e/through", "link"),
        same("hard", "b/new"), file(".wh.missing"), file("no/parent/file", "p"),
    )  # fmt: skip
    saved = as_tar(image(lower, upper).parts(), tmp_path / "image.tar")

    async def body() -> None:
        roots = Roots(tmp_path / "roots")
        tree = Path((await roots.hold("box", str(saved))).tree)
        await roots.close()
        assert names_below(tree) == [
            "a/one", "a/two", "b/new", "b/through", "d/in", "e", "hard", "no/parent/file",
        ]  # fmt: skip
        assert (tree / "a/one").read_text() == "again"
        assert (tree / "b/through").read_text() == "link"
        assert (tree / "hard").stat().st_ino == (tree / "b/new").stat().st_ino

    asyncio.run(body())


CLIMBING: dict[str, tuple[Entry, ...]] = {
    "a name with ..": (file("../outside", "x"),),
    "a name deep with ..": (directory("a"), file("a/../../outside", "x")),
    "a hard link to ..": (same("mine", "../outside"),),
    "a hard link to a directory": (directory("a"), same("b", "a")),
    "a hard link to nothing": (same("mine", "nowhere"),),
    "a whiteout of its parent": (directory("a"), file("a/.wh...", "x")),
    "a file as a directory": (file("a", "x"), file("a/b", "x")),
    "a loop of links": (link("a", "b"), link("b", "a"), file("a/c", "x")),
    "a name that is too long": (file("n" * 300, "x"),),
    "more than fits": tuple(file(f"f{n}", b"x" * 40_000) for n in range(4)),
    "an unknown kind": (Entry(name="odd", kind=b"Z"),),
}


@pytest.mark.parametrize("name", CLIMBING)
def test_an_image_that_leaves_its_tree_is_refused_whole(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("of the host")
    saved = as_tar(image(CLIMBING[name]).parts(), tmp_path / "image.tar")

    async def body() -> None:
        roots = Roots(tmp_path / "kept" / "roots")
        roots.bytes_max = 100_000
        with pytest.raises(ConfigInvalid, match="no baseline can be made"):
            await roots.hold("box", str(saved))
        await roots.close()

    asyncio.run(body())
    assert (tmp_path / "outside").read_text() == "of the host"
    left = [p.name for p in (tmp_path / "kept" / "roots").iterdir()]
    assert [n for n in left if not n.endswith(".lock")] == []


def test_links_of_an_image_lead_into_it_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    layer: tuple[Entry, ...] = (
        link("abs", str(outside)), file("abs/in", "x"),
        link("up", "../../../../../../.." + str(outside)), file("up/in", "x"),
        link("self", "/proc/self/root"), file("self/in", "x"),
        link("victim", str(outside / "victim")), file("victim", "mine"),
        Entry(name="disk", kind=tarfile.BLKTYPE), Entry(name="pipe", kind=tarfile.FIFOTYPE),
    )  # fmt: skip
    saved = as_tar(image(layer).parts(), tmp_path / "image.tar")

    async def body() -> Path:
        roots = Roots(tmp_path / "roots")
        tree = Path((await roots.hold("box", str(saved))).tree)
        await roots.close()
        return tree

    with pytest.raises(ConfigInvalid, match="no tree can"):
        asyncio.run(body())
    assert list(outside.iterdir()) == []
    # The same where what the links lead to is in the image: it is put there.
    layer = (directory(str(outside)[1:]), *layer[:4], *layer[6:])
    as_tar(image(layer).parts(), tmp_path / "image.tar")
    tree = asyncio.run(body())
    assert list(outside.iterdir()) == []
    assert (tree / str(outside)[1:] / "in").read_text() == "x"
    assert (tree / "victim").read_text() == "mine"
    assert not os.path.lexists(tree / "disk")
    assert not os.path.lexists(tree / "pipe")


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", ON)
def test_no_mount_point_is_made_through_a_link_of_an_image(
    tmp_path: Path, kept: Path, rung: Rung
) -> None:
    outside = kept / "outside"
    outside.mkdir()
    outside.chmod(0o777)
    links = (link("data", str(outside)), link("old", f"/oldroot{outside}"), directory("srv"))
    saved = as_tar(image((*links, link("srv/deep", str(outside)))).parts(), tmp_path / "image.tar")

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            kept_in(host, kept)
            backend = sandbox.backend_of(host, rung)
            for target in ("/data/in", "/old/in", "/srv/deep/in", "/srv/../data/in", "/data"):
                mount = Mount(source=str(kept / "states"), target=target)
                policy = msgspec.structs.replace(sandbox.policy_of(rung), mounts=(mount,))
                with pytest.raises((IsolationUnavailable, ConfigInvalid, BoxFailed)) as refused:
                    await backend.create("box_one", Baseline(root=str(saved)), policy)
                assert list(outside.iterdir()) == [], target
                assert "link" in refused.value.message or ".." in target
            await backend.close()

    run(body)


def damaged(parts: dict[str, bytes], which: str) -> dict[str, bytes]:
    sizes = sorted(
        (name for name in parts if name.startswith("blobs")), key=lambda n: len(parts[n])
    )
    if which == "torn":
        return {**parts, sizes[-1]: parts[sizes[-1]][:-700]}
    if which == "another layer":
        return {**parts, sizes[-1]: images.tar([file("evil", "x")])}
    if which == "missing":
        return {name: content for name, content in parts.items() if name != sizes[-1]}
    if which == "another manifest":
        return {n: c.replace(b'"layers"', b'"layerz"') for n, c in parts.items()}
    if which == "no image":
        return {"readme": b"nothing"}
    return {**parts, "index.json": b"[" * 100_000}


@pytest.mark.parametrize(
    "which", ["torn", "another layer", "missing", "another manifest", "no image", "nested"]
)
def test_an_image_that_is_not_what_its_digests_say_is_refused(tmp_path: Path, which: str) -> None:
    content = file("data", os.urandom(5000))
    saved = as_tar(damaged(image((content,)).parts(), which), tmp_path / "image.tar")

    async def body() -> None:
        roots = Roots(tmp_path / "roots")
        with pytest.raises(ConfigInvalid, match="no baseline can be made"):
            await roots.hold("box", str(saved))
        await roots.close()

    asyncio.run(body())


def test_what_cannot_be_used_here_is_said_in_one_sentence(tmp_path: Path) -> None:
    other = image((file("a"),), architecture="s390x")
    cases = {
        "s390x": as_tar(other.parts(), tmp_path / "other.tar"),
        "No such file": tmp_path / "nowhere",
        "absolute": Path("relative.tar"),
    }
    (tmp_path / "zipped").write_bytes(b"\x1f\x8b rest")
    cases["gunzip"] = tmp_path / "zipped"

    async def body() -> None:
        roots = Roots(tmp_path / "roots")
        for words, path in cases.items():
            with pytest.raises(ConfigInvalid, match=words):
                await roots.hold("box", str(path))
        await roots.close()

    asyncio.run(body())


def test_one_makes_a_root_the_others_find_it_and_what_a_killed_one_left_goes(
    tmp_path: Path,
) -> None:
    saved = as_tar(image((file("a", "x"),)).parts(), tmp_path / "image.tar")
    told: list[str] = []

    async def body() -> None:
        both = [Roots(tmp_path / "roots", told.append) for _ in range(2)]
        target = (
            tmp_path / "roots" / images.digest(image((file("a", "x"),)).config).replace(":", "-")
        )
        (target.with_suffix(".part") / "half").mkdir(parents=True)
        found = await asyncio.gather(
            *(roots.hold(f"box_{n}", str(saved)) for roots in both for n in range(4))
        )
        assert len({root.tree for root in found}) == 1
        assert not target.with_suffix(".part").exists()
        for roots in both:
            await roots.close()

    asyncio.run(body())
    assert len([line for line in told if line.startswith("unpacking")]) == 1


def test_a_directory_that_changed_is_refused_once_and_then_looked_at_again(tmp_path: Path) -> None:
    inside = tmp_path / "unpacked" / "etc" / "who"
    inside.parent.mkdir(parents=True)
    inside.write_text("one")

    async def body() -> str:
        roots = Roots(tmp_path / "roots")
        first = await roots.hold("box", str(tmp_path / "unpacked"))
        roots.release("box")
        prune(0, states=tmp_path / "states", roots=roots.directory)
        inside.write_text("two")  # below: the directory itself is as it was
        with pytest.raises(ConfigInvalid, match="changed since it was first looked at"):
            await roots.hold("box", str(tmp_path / "unpacked"))
        second = await roots.hold("box", str(tmp_path / "unpacked"))
        assert second.digest != first.digest
        await roots.close()
        return second.tree

    assert Path(asyncio.run(body()), "etc", "who").read_text() == "two"


def test_making_goes_on_though_whoever_asked_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = as_tar(image((file("a", "x"),)).parts(), tmp_path / "image.tar")
    begun, go_on = threading.Event(), threading.Event()
    add = Tree.add

    def slow(tree: Tree, layer: BinaryIO) -> None:
        begun.set()
        assert go_on.wait(60)
        add(tree, layer)

    monkeypatch.setattr(Tree, "add", slow)

    async def body() -> None:
        roots = Roots(tmp_path / "roots")
        asking = asyncio.ensure_future(roots.hold("box_one", str(saved)))
        await asyncio.to_thread(begun.wait, 60)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        go_on.set()
        root = await roots.hold("box_two", str(saved))
        assert (Path(root.tree) / "a").exists()
        assert roots.of("box_one") is None
        await roots.close()

    asyncio.run(body())


def test_a_worker_that_ends_stops_what_it_makes(tmp_path: Path) -> None:
    saved = as_tar(image((file("a", "x"),)).parts(), tmp_path / "image.tar")
    (tmp_path / "roots").mkdir()

    async def body() -> None:
        name = images.digest(image((file("a", "x"),)).config).replace(":", "-")
        other = os.open(tmp_path / "roots" / f"{name}.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(other, fcntl.LOCK_EX)  # another process makes it, and takes its time
        roots = Roots(tmp_path / "roots")
        asking = asyncio.ensure_future(roots.hold("box", str(saved)))
        while not roots._making:
            await asyncio.sleep(0)
        await roots.close()
        with pytest.raises(BoxFailed, match="when this worker ended"):
            await asking
        os.close(other)

    asyncio.run(body())


def test_a_full_disk_is_our_fault_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = as_tar(image((file("a", "x" * 100),)).parts(), tmp_path / "image.tar")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def body() -> None:
        roots = Roots(tmp_path / "roots")
        monkeypatch.setattr("stoker.sandbox.layers.Tree.add", full)
        with pytest.raises(BoxFailed, match=r"No space left.*baselines prune"):
            await roots.hold("box", str(saved))
        monkeypatch.undo()
        assert [p.suffix for p in (tmp_path / "roots").iterdir()] == [".lock"]
        await roots.hold("box", str(saved))
        await roots.close()

    asyncio.run(body())


def test_backends_without_roots_refuse_them(tmp_path: Path) -> None:
    wanted = Baseline(root="/nowhere")

    async def body() -> None:
        with pytest.raises(BranchUnavailable, match="root of their own"):
            await MemoryBackend().create("box", wanted, sandbox.policy_of(Rung.PROCESS))
        async with SandboxHost.open(tmp_path / "state") as host:
            backend = sandbox.backend_of(host, Rung.PROCESS)
            with pytest.raises(BranchUnavailable, match="root of their own"):
                await backend.create("box", wanted, sandbox.policy_of(Rung.PROCESS))
            network = ExecutionPolicy(
                accept_shared_kernel=True, network=(Destination(host="example.org"),)
            )
            with pytest.raises(IsolationUnavailable, match="leave the network out"):
                await host.baselines.pinned(
                    sandbox.backend_of(host, Rung.ROOT), "box", wanted, network
                )
            assert host.leaked() == 0

    run(body)
