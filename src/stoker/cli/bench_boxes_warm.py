"""The warm part of ``stoker bench boxes``: forked actions beside a bare fork, how many a second.

The result of an action is timed apart, by what its program writes to a pipe of ours: the rest is
seeing that nothing of it is left.

Where numpy is at hand it is a package of the measured box and loaded ahead, in its peer as well; a
box without is measured in turn. The peer (``bench_boxes_fork``) is what is left of such an action
when everything that makes it one of a box is taken away: no uid, filter, limits, ``/proc``, pipes
or verdict.
"""

import asyncio
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from stoker.cli import bench_boxes_fork
from stoker.model.execution import Baseline, ExecutionPolicy, Rung
from stoker.model.tools import RunRequest
from stoker.sandbox.local import LocalBackend, LocalBox
from stoker.seams.clock import SystemClock

_RUNS = 200
_TOGETHER_RUNS = 100
_HUNDRED = 100
_AT_ONCE = 16
_PATIENCE_SECONDS = 120.0
_ARMING_SECONDS = 0.005
"""Between two results, as between an agent's actions: the next child is forked ahead meanwhile."""
_PROGRAM = "print(6 * 7)"
_SAID = b"42\n"
_TELLS = "import os; os.write(3, b'42')"

_clock = SystemClock()


class WarmTimes(NamedTuple):
    """Milliseconds of each action and of each bare fork, in turn, and of each result."""

    action: list[float]
    bare: list[float]
    """Of actions in a box that has no numpy."""
    fork: list[float]
    result: list[float]
    per_second_per_core: float
    hundred_seconds: float
    """For an action in each of so many boxes whose interpreters wait, begun together."""


async def warm_times(backend: LocalBackend) -> WarmTimes | None:
    """Measure; ``None`` where there are no warm boxes (they need rung a)."""
    if backend.parts.rung is not Rung.ROOT:
        return None
    policy = ExecutionPolicy(accept_shared_kernel=True, warm=True)
    cores = os.cpu_count() or 1
    boxes = [await backend.create(f"bench_{n}", Baseline(), policy) for n in range(cores)]
    for box in boxes:
        await _forked(box)
    action, bare, fork = await _beside_forks(backend, policy, boxes[0])
    result = []
    for _ in range(_RUNS):
        result.append(await _told(boxes[0]))
        await asyncio.sleep(_ARMING_SECONDS)
    began = _clock.monotonic()
    await asyncio.gather(*(_many(box) for box in boxes))
    seconds = _clock.monotonic() - began
    for box in boxes:
        await box.destroy()
    rate = len(boxes) * _TOGETHER_RUNS / seconds / cores
    return WarmTimes(action, bare, fork, result, rate, await _hundred(backend, policy))


async def _beside_forks(
    backend: LocalBackend, policy: ExecutionPolicy, without: LocalBox
) -> tuple[list[float], list[float], list[float]]:
    """Return the milliseconds of actions with numpy, of those without, and of bare forks."""
    action: list[float] = []
    bare: list[float] = []
    fork: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        packages, box = Path(place, "packages"), without
        if numpy_packages(packages):
            loaded = msgspec.structs.replace(policy, preload=("numpy",))
            box = await backend.create("bench_numpy", Baseline(packages=str(packages)), loaded)
            await _forked(box)
        with _peer(packages) as peer:
            for _ in range(_RUNS):
                action.append(await _timed(box))
                fork.append(await asyncio.to_thread(_asked, peer))
                bare.append(await _timed(without))
            assert peer.stdin is not None
            peer.stdin.close()
        if box is not without:
            await box.destroy()
    return action, bare, fork


def numpy_packages(into: Path) -> bool:
    """Copy numpy into a directory of packages; false: it is not installed here."""
    try:
        installed = importlib.metadata.distribution("numpy")
    except importlib.metadata.PackageNotFoundError:
        return False
    for name in {path.parts[0] for path in installed.files or () if ".." not in path.parts}:
        shutil.copytree(str(installed.locate_file(name)), into / name)
    return True


async def _timed(box: LocalBox) -> float:
    began = _clock.monotonic()
    await _forked(box)
    return (_clock.monotonic() - began) * 1000


def _peer(packages: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 - our own interpreter and script
        [sys.executable, "-I", "-S", bench_boxes_fork.__file__, str(packages)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


async def _forked(box: LocalBox) -> None:
    run = await box.run(
        RunRequest(argv=("python", "-c", _PROGRAM)), timeout_seconds=_PATIENCE_SECONDS
    )
    assert run.result.stdout.kept == _SAID, run.result.text
    assert box.server is not None, "it was not forked"


async def _told(box: LocalBox) -> float:
    """Return the milliseconds until a program's word is in our hands."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    loop = asyncio.get_running_loop()
    told: list[float] = []
    began = _clock.monotonic()
    loop.add_reader(read, lambda: told.append(_clock.monotonic()))
    try:
        request = RunRequest(argv=("python", "-c", _TELLS))
        run = await box.run_with(request, timeout_seconds=_PATIENCE_SECONDS, channels=[write])
        assert os.read(read, 10) == b"42", run.result.text
    finally:
        loop.remove_reader(read)
        os.close(read)
    return (told[0] - began) * 1000


async def _hundred(backend: LocalBackend, policy: ExecutionPolicy) -> float:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(box: LocalBox) -> None:
        async with gate:
            await _forked(box)

    boxes = [await backend.create(f"bench_{n}", Baseline(), policy) for n in range(_HUNDRED)]
    await asyncio.gather(*map(one, boxes))
    began = _clock.monotonic()
    await asyncio.gather(*map(one, boxes))
    seconds = _clock.monotonic() - began
    await asyncio.gather(*(box.destroy() for box in boxes))
    return seconds


async def _many(box: LocalBox) -> None:
    for _ in range(_TOGETHER_RUNS):
        await _forked(box)


def _asked(peer: "subprocess.Popen[bytes]") -> float:
    assert peer.stdin is not None
    assert peer.stdout is not None
    began = _clock.monotonic()
    peer.stdin.write(_PROGRAM.encode() + b"\n")
    peer.stdin.flush()
    assert peer.stdout.readline() == _SAID
    return (_clock.monotonic() - began) * 1000
