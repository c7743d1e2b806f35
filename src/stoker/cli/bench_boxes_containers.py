"""Containers in ``stoker bench boxes``: ours, the runtime by hand, and a namespace box, in turn.

By hand means as it is usually run: as root, with control groups of its own, one container that
shows the same system directories. Not measured where there is no runtime, or no root.
"""

import asyncio
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from stoker.model.execution import Baseline, ExecutionPolicy
from stoker.model.tools import RunRequest
from stoker.sandbox import kernel
from stoker.sandbox.container import container_backends, system_binds
from stoker.sandbox.local import LocalBackend
from stoker.sandbox.oci import Container, specification
from stoker.sandbox.seccomp_profile import profile
from stoker.seams.clock import SystemClock

_RUNS = 20
_SECONDS = 60.0
_TRUE = ("true",)

_clock = SystemClock()


class ContainerTimes(NamedTuple):
    """Milliseconds of actions that do nothing, taken in turn."""

    ours: list[float]
    by_hand: list[float]
    namespace: list[float]


async def container_times(namespace: LocalBackend) -> ContainerTimes | None:
    """Measure, or return ``None`` where no runtime holds here."""
    backend = container_backends(namespace.host)[-1]  # the one most hosts have
    times = ContainerTimes([], [], [])
    try:
        if not (await backend.offer()).available or backend.runtime is None:
            return None
        policy = ExecutionPolicy(accept_shared_kernel=True)
        boxes = [await one.create(f"bench_{n}", Baseline(), policy)
                 for n, one in enumerate((backend, namespace))]  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="stoker-bench-") as place:
            by_hand = _bundle(Path(place), backend.runtime.path)
            for _ in range(_RUNS):
                for box, into in zip(boxes, (times.ours, times.namespace), strict=True):
                    began = _clock.monotonic()
                    await box.run(RunRequest(argv=_TRUE), timeout_seconds=_SECONDS)
                    into.append((_clock.monotonic() - began) * 1000)
                times.by_hand.append(await asyncio.to_thread(_run, by_hand))
        for box in boxes:
            await box.destroy()
    finally:
        await backend.close()
    return times


def _bundle(place: Path, runtime: str) -> list[str]:
    root = place / "root"
    for name in ("proc", "dev", "workspace", *(bind.target[1:] for bind in system_binds())):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(Path("/", name).readlink())
    told = Container(
        root=str(root), directory="/workspace", binds=system_binds(), argv=["/usr/bin/true"],
        environment={}, user=1000, masks=[], seccomp=profile(kernel.machine()),
    )  # fmt: skip
    (place / "config.json").write_bytes(specification(told))
    state = str(place / "state")
    return [runtime, "--root", state, "run", "--bundle", str(place), f"bench-{place.name}"]


def _run(argv: list[str]) -> float:
    began = _clock.monotonic()
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, env={}, cwd="/")  # noqa: S603 - a runtime of this host
    return (_clock.monotonic() - began) * 1000
