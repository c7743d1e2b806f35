"""The warm part of ``stoker bench boxes``: forked actions beside a bare fork, how many a second.

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
_PATIENCE_SECONDS = 120.0
_PROGRAM = "print(6 * 7)"
_SAID = b"42\n"

_clock = SystemClock()


class WarmTimes(NamedTuple):
    """Milliseconds of each action and of each bare fork, in turn; actions a second and core."""

    action: list[float]
    fork: list[float]
    per_second_per_core: float


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
    began = _clock.monotonic()
    await asyncio.gather(*(_many(box) for box in boxes))
    seconds = _clock.monotonic() - began
    for box in boxes:
        await box.destroy()
    return WarmTimes(action, fork, len(boxes) * _TOGETHER_RUNS / seconds / cores)


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
