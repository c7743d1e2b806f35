"""The warm part of ``stoker bench boxes``: forked actions beside a bare fork, how many a second.

The result of an action is timed apart, by what its program writes to a pipe of ours: the rest is
seeing that nothing of it is left.

The peer (``bench_boxes_fork``) is what is left of such an action when everything that makes it one
of a box is taken away: no uid, filter, limits, ``/proc``, pipes or verdict.
"""

import asyncio
import os
import subprocess
import sys
from typing import NamedTuple

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
    action, fork = [], []
    with _peer() as peer:
        for _ in range(_RUNS):
            began = _clock.monotonic()
            await _forked(boxes[0])
            action.append((_clock.monotonic() - began) * 1000)
            fork.append(await asyncio.to_thread(_asked, peer))
        assert peer.stdin is not None
        peer.stdin.close()
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
    return WarmTimes(action, fork, result, rate, await _hundred(backend, policy))


def _peer() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 - our own interpreter and script
        [sys.executable, "-I", "-S", bench_boxes_fork.__file__],
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
