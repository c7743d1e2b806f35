"""Packages of a baseline: the site-packages of its boxes, read-only and pinned by content."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from security.test_warm import WARM, result_of
from stoker.cli.bench_boxes_warm import numpy_packages
from stoker.config.boxes import BaselineSettings
from stoker.coordinator.actions import baseline_of
from stoker.errors import BranchUnavailable, ConfigInvalid, IsolationUnavailable, StokerError
from stoker.model.execution import Baseline, BaselineBuild, ExecutionPolicy, Isolation, Rung
from stoker.model.tools import RunRequest
from stoker.sandbox import baseline_cache, runtime
from stoker.sandbox.baseline_cache import prune
from stoker.sandbox.baselines import Baselines
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBox
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.sandbox.removal import remove_tree
from stoker.testing.boxes import MemoryBackend
from support import images, sandbox
from support.images import as_directory, file
from support.sandbox import CONTAINER, needs_root, run

ON = [pytest.param(Rung.ROOT, marks=[needs_root, pytest.mark.root], id="a"), *CONTAINER]
SITE = f"/opt/python/{runtime._SITE_PACKAGES}"
CHANGES = {
    "a new file": f"open('{SITE}/new.py', 'w')",
    "its module": f"open('{SITE}/made/__init__.py', 'a')",
    "a mode": f"import os; os.chmod('{SITE}/made', 0o777)",
    "its name": f"import os; os.rename('{SITE}/made', '{SITE}/other')",
    "a link to it": f"import os; os.link('{SITE}/made/__init__.py', '/workspace/x')",
    "its removal": f"import os; os.unlink('{SITE}/made/__init__.py')",
}
REFUSED = ("Read-only file system", "cross-device link", "Permission denied")
needs_own_interpreter = pytest.mark.skipif(
    not runtime.inside_packages(),
    reason="this interpreter is the system's, whose boxes take no packages: use pyenv's or uv's",
)
pytestmark = needs_own_interpreter


@pytest.fixture
def kept() -> Iterator[Path]:
    """A directory that a leased uid can pass; pytest's own are closed to it."""
    path = Path(tempfile.mkdtemp(prefix="stoker-packages-"))
    path.chmod(0o711)
    (path / "states").mkdir()
    yield path
    remove_tree(path)


def made_in(directory: Path, value: str) -> Path:
    """Make a directory of packages, closed to everybody else, as a user's may be."""
    (directory / "made").mkdir(parents=True)
    (directory / "made" / "__init__.py").write_text(f"VALUE = {value!r}\n")
    (directory / "path.pth").write_text("import made\n")
    directory.chmod(0o700)
    return directory


async def says(box: LocalBox, *argv: str) -> str:
    result = (await box.run(RunRequest(argv=argv), timeout_seconds=sandbox.PATIENCE)).result
    assert result.ok, result.text
    return result.text


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", ON)
def test_a_box_imports_the_packages_of_its_baseline_and_cannot_change_them(
    tmp_path: Path, kept: Path, rung: Rung
) -> None:
    source = made_in(tmp_path / "packages", "first")
    wanted = Baseline(packages=str(source))
    policy = sandbox.policy_of(rung)

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            host.baselines = Baselines(kept / "states", kept / "roots")
            backend = sandbox.backend_of(host, rung)
            box = await backend.create("box_one", wanted, policy)
            (told,) = baseline_cache.kept(states=kept / "states", roots=kept / "roots")
            assert (told.kind, told.made_of) == ("packages", str(source))
            source.joinpath("made", "__init__.py").write_text("VALUE = 'changed on the host'\n")
            for options in ([], ["-I"]):
                line = "import sys; print('made' in sys.modules, __import__('made').VALUE)"
                assert await says(box, "python", *options, "-c", line) == "True first"
            for what, line in CHANGES.items():
                tried = await result_of(box, ("python", "-c", line))
                assert not tried.ok, what
                assert any(word in tried.text for word in REFUSED), (what, tried.text)
            (branch,) = await box.branch(1)
            assert isinstance(branch.box, LocalBox)
            line = "import made; print(made.VALUE)"
            assert await says(branch.box, "python", "-c", line) == "first"
            assert prune(1, states=kept / "states", roots=kept / "roots") == [], "in use"
            without = await backend.create("box_without", Baseline(), policy)
            assert (
                "No module named 'made'"
                in (await result_of(without, ("python", "-c", "import made"))).text
            )
            await backend.close()
            assert host.leaked() == 0
            assert len(prune(1, states=kept / "states", roots=kept / "roots")) == 1

    run(body)


@needs_root
@pytest.mark.root
def test_they_are_pinned_by_content_and_built_with(tmp_path: Path, kept: Path) -> None:
    first, other = made_in(tmp_path / "first", "1"), made_in(tmp_path / "other", "2")
    copied = tmp_path / "venv"  # a virtual environment that holds the same
    shutil.copytree(first, copied / runtime._SITE_PACKAGES)
    (copied / "pyvenv.cfg").write_text("home = /nowhere\n")
    policy = sandbox.policy_of(Rung.ROOT)

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            host.baselines = Baselines(kept / "states", kept / "roots")
            backend = sandbox.backend_of(host, Rung.ROOT)
            digests = []
            for number, packages in enumerate((first, copied, other)):
                wanted = Baseline(packages=str(packages))
                box = await backend.create(f"box_{number}", wanted, policy)
                digests.append(box.baseline.digest)
                await box.destroy()
            assert digests[0] == digests[1] != digests[2]
            assert Baseline().digest not in digests
            pinned = Baseline(packages=str(other), digest=digests[0])
            with pytest.raises(IsolationUnavailable, match="was pinned as"):
                await backend.create("box_pinned", pinned, policy)
            setup = BaselineBuild(setup=("python -c 'import made; print(made.VALUE)' > said",))
            for packages, value in ((first, b"1\n"), (other, b"2\n")):
                built = Baseline(packages=str(packages), build=setup)
                box = await backend.create("box_built", built, policy)
                assert (await box.read_file("said", bytes_max=9)).content == value
                await box.destroy()
            assert host.leaked() == 0

    run(body)


@needs_root
@pytest.mark.root
def test_a_warm_box_loads_them_ahead_and_another_baseline_has_its_own(
    tmp_path: Path, kept: Path
) -> None:
    policy = msgspec.structs.replace(WARM, preload=("made",))
    line = ("python", "-c", "import sys, made; print(made.VALUE, made.__file__, sys.path)")

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            host.baselines = Baselines(kept / "states", kept / "roots")
            backend = sandbox.backend_of(host, Rung.ROOT)
            for value in ("1", "2"):
                wanted = Baseline(packages=str(made_in(tmp_path / value, value)))
                warm = await backend.create(f"warm_{value}", wanted, policy)
                fresh = await backend.create(f"fresh_{value}", wanted, sandbox.policy_of(Rung.ROOT))
                said = await result_of(warm, line)
                assert said == await result_of(fresh, line)
                assert said.text.startswith(f"{value} {SITE}/made/__init__.py"), said.text
                assert warm.server is not None
                assert warm.server.without == ()
            await backend.close()
            assert host.leaked() == 0

    run(body)


@pytest.mark.slow
@needs_root
@pytest.mark.root
def test_numpy_is_loaded_ahead_and_each_program_has_chance_of_its_own(
    tmp_path: Path, kept: Path
) -> None:
    if not numpy_packages(tmp_path / "packages"):
        pytest.skip("numpy is not here: pip install -r requirements-dev.txt")
    wanted = Baseline(packages=str(tmp_path / "packages"))
    policy = msgspec.structs.replace(
        WARM,
        preload=("numpy.random",),
        limits=msgspec.structs.replace(WARM.limits, memory_bytes=1 << 28),
    )
    line = (
        "import sys; loaded = 'numpy' in sys.modules; import numpy; a = numpy.ones((300, 300))\n"
        "print(loaded, (a @ a)[0, 0], numpy.random.rand())"
    )

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            host.baselines = Baselines(kept / "states", kept / "roots")
            backend = sandbox.backend_of(host, Rung.ROOT)
            box = await backend.create("box_one", wanted, policy)
            said = [(await says(box, "python", "-c", line)).split() for _ in range(3)]
            assert [words[:2] for words in said] == [["True", "300.0"]] * 3
            assert len({words[2] for words in said}) == 3
            await backend.close()
            assert host.leaked() == 0

    run(body)


@needs_root
@pytest.mark.root
def test_what_cannot_be_had_is_refused_with_the_reason(tmp_path: Path, kept: Path) -> None:
    packages = made_in(tmp_path / "packages", "1")
    image = as_directory(images.image((file("a", "x"),)).parts(), tmp_path / "image")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    refused = {
        "nothing there": (Baseline(packages=str(tmp_path / "none")), "pip install --target"),
        "another Python's": (Baseline(packages=str(tmp_path / "venv")), "No such file"),
        "an image": (Baseline(packages=str(image)), "saved image"),
        "both": (Baseline(packages=str(packages), root=str(packages)), "leave one of the two"),
    }

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            host.baselines = Baselines(kept / "states", kept / "roots")
            backend = sandbox.backend_of(host, Rung.ROOT)
            for what, (wanted, why) in refused.items():
                with pytest.raises(ConfigInvalid, match=why):
                    await backend.create("box", wanted, sandbox.policy_of(Rung.ROOT))
                assert list(host.ledger.records()) == [], what
            wanted = Baseline(packages=str(packages))
            process = sandbox.backend_of(host, Rung.PROCESS)
            with pytest.raises(BranchUnavailable, match="with packages"):
                await process.create("box", wanted, sandbox.policy_of(Rung.PROCESS))
            policy = ExecutionPolicy(isolation=Isolation.QEMU)
            with pytest.raises(BranchUnavailable, match="with packages"):
                await QemuBackend(host).create("box", wanted, policy)
            with pytest.raises(StokerError, match="with packages"):
                await MemoryBackend().create("box", wanted, sandbox.policy_of(Rung.PROCESS))
            assert host.leaked() == 0

    run(body)


def test_a_baseline_of_the_settings_has_packages_or_a_root() -> None:
    settings = BaselineSettings(packages="/srv/packages")
    assert baseline_of("numbers", settings).packages == "/srv/packages"
    assert baseline_of("plain", BaselineSettings()).packages is msgspec.UNSET
    with pytest.raises(ValidationError, match="a root brings its own"):
        BaselineSettings(packages="/srv/packages", root="/srv/root")
    with pytest.raises(ValidationError, match="should match pattern"):
        BaselineSettings(packages="packages")
