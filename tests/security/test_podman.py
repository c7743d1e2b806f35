"""Where podman is installed its runtime starts our boxes, and its images are their roots."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.model.execution import Baseline, Rung
from stoker.model.tools import RunRequest
from stoker.sandbox.baselines import Baselines
from stoker.sandbox.host import SandboxHost
from support import images, needs, sandbox
from support.sandbox import CONTAINER

pytestmark = [
    sandbox.needs_root,
    pytest.mark.root,
    pytest.mark.every_backend,
    pytest.mark.skipif(shutil.which("podman") is None, reason=needs.PODMAN),
    pytest.mark.skipif(not images.BUSYBOX, reason=images.NEEDS_BUSYBOX),
]


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that a leased uid can pass, its name as short as podman wants it."""
    with tempfile.TemporaryDirectory(prefix="stoker-roots-") as path:
        Path(path).chmod(0o711)
        (Path(path) / "states").mkdir()
        yield Path(path)


def _saved_by_podman(place: Path, form: str) -> Path:
    """Make an image in a store of its own, and have podman save it."""
    own = ("--root", f"{place}/store", "--runroot", f"{place}/run", "--storage-driver", "vfs")
    (place / "fs.tar").write_bytes(images.tar(images.base()))
    shown = ("-c", "ENV COLOUR=of_the_image", "-c", "WORKDIR /etc")
    for words in (
        ("import", *shown, "fs.tar", "localhost/tried:1"),
        ("save", "--format", form, "-o", "saved", "localhost/tried:1"),
    ):
        done = subprocess.run(
            ["podman", *own, *words],
            cwd=place,
            check=False,
            capture_output=True,
            timeout=sandbox.PATIENCE,
        )
        assert done.returncode == 0, done.stderr.decode()
    return place / "saved"


@pytest.mark.parametrize("form", ["docker-archive", "oci-archive", "oci-dir"])
@pytest.mark.parametrize("rung", [pytest.param(Rung.ROOT, id="a"), *CONTAINER])
def test_an_image_that_podman_saved_is_the_root_of_boxes(
    tmp_path: Path, open_path: Path, rung: Rung, form: str
) -> None:
    saved = _saved_by_podman(open_path, form)

    async def body() -> None:
        async with SandboxHost.open(tmp_path / "state") as host:
            host.baselines = Baselines(open_path / "states", open_path / "roots")
            backend = sandbox.backend_of(host, rung)
            wanted = Baseline(name="tried", root=str(saved))
            box = await backend.create("box_1", wanted, sandbox.policy_of(rung))
            line = RunRequest(argv=("sh", "-c", "pwd; echo $COLOUR; ls /bin/busybox"))
            result = (await box.run(line, timeout_seconds=sandbox.PATIENCE)).result
            assert result.text == "/etc\nof_the_image\n/bin/busybox"
            await backend.close()

    sandbox.run(body)
