"""``stoker bench ledger``: what a durable hand-off costs, against a bare log in the same run.

The ledger is a real owner process on a real disk, power-safe; coordinator and worker are one client
process with a connection each. The floor writes the same rows with the same syncs behind the same
socket and promises nothing (``testing.append_log``). Both are measured in turn, round by round, so
that a slow minute of a shared machine hits both.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stoker.broker.base import EventsRequest, LeaseRequest, LedgerLimits
from stoker.broker.client import LedgerClient, connect
from stoker.broker.place import SOCKET_PATH, owner_pid
from stoker.cli.bench_ledger_load import CLASS, RUN, Load
from stoker.cli.bench_ledger_peers import Peers
from stoker.cli.bench_machine import Probe, figure, machine
from stoker.cli.bench_processes import cpu_seconds
from stoker.seams.clock import SystemClock

OUTSTANDING = 256
CYCLES = 20_000
_SINGLE_CYCLES = 200
_BESIDE_SYNCS_MS = 1.0
_CANCELS = 100
_IDLE_SECONDS = 5.0
_SETTLE_SECONDS = 10.0
"""One lease: until then the owner still looks at the leases of the load before."""
_SUBMIT_BATCH = 1_000
_DEEP_WINDOWS = 5
_START_SECONDS = 20.0
_QUEUED_MAX = 4_000_000
_LIMITS = LedgerLimits(
    queued_max=_QUEUED_MAX, queued_per_class_max=_QUEUED_MAX, results_max=_QUEUED_MAX
)

Say = Callable[[str], object]


class Rounds(msgspec.Struct):
    """What the rounds gave, one value each."""

    ours: list[float] = []
    log: list[float] = []
    per_commit: list[float] = []
    single_syncs: list[float] = []
    cancel_ms_p99: list[float] = []
    idle_share: list[float] = []


def measure(*, runs: int, queued: int, peers: Path, say: Say) -> dict[str, Any]:
    """Measure ``runs`` rounds and the deep queue once; return the bench document (DESIGN §9).

    ``peers``: the environment of ``make bench-peers``.
    """
    rounds = Rounds()
    others = Peers(peers, say)
    with _place() as place:
        probe = Probe(place)
        for number in range(runs):
            say(f"bench ledger: round {number + 1} of {runs} …")
            probe.sample()
            (place / f"log-{number}").mkdir()
            rounds.log.append(asyncio.run(_log_rate(place / f"log-{number}")))
            asyncio.run(_round(place / f"ledger-{number}", rounds, probe))
            others.round()
        probe.sample()
        say(f"bench ledger: {queued:,} queued …")
        deep = asyncio.run(_deep(place / "deep", queued)) if queued else None
        syncs = probe.median_ms()
    ratios = [ours / log for ours, log in zip(rounds.ours, rounds.log, strict=True)]
    figures = {
        "cycles_per_second": figure(rounds.ours, "1/s", None),
        "append_log_cycles_per_second": figure(rounds.log, "1/s", None),
        "cycles_vs_append_log": figure(ratios, "ratio", 0.5),
        "transitions_per_commit": figure(rounds.per_commit, "", 200.0),
        "single_cycle_p50_syncs": figure(rounds.single_syncs, "syncs", 2.5),
        "cancel_ms_p99": figure([ms - syncs for ms in rounds.cancel_ms_p99], "ms", 50.0),
        "idle_cpu_share": figure(rounds.idle_share, "share", 0.01),
    }
    beside, notes = others.figures(rounds.ours)
    figures |= beside
    if deep is None:
        notes |= dict.fromkeys(("backlog_rate_ratio", "recovery_seconds"), "--queued 0")
    else:
        figures["backlog_rate_ratio"] = figure(deep[0], "ratio", 0.95)
        figures["recovery_seconds"] = figure([deep[1]], "s", 5.0)
    return {
        "bench": "ledger",
        "machine": machine(sync_ms_p50=syncs),
        "figures": figures,
        "notes": notes,
    }


async def _round(place: Path, rounds: Rounds, probe: Probe) -> None:
    async with _ledger(place) as (load, coordinator, worker):
        await load.cycles(OUTSTANDING * 4, OUTSTANDING)  # code and pages are warm from here on
        before = await coordinator.stats()
        measured = await load.cycles(CYCLES, OUTSTANDING)
        after = await coordinator.stats()
        rounds.ours.append(measured.rate)
        rounds.per_commit.append(
            (after.transitions_total - before.transitions_total)
            / (after.commits_total - before.commits_total)
        )
        rounds.single_syncs.append(await _single(load, probe))
        cancels = sorted([await load.cancelled() for _ in range(_CANCELS)])
        rounds.cancel_ms_p99.append(cancels[-1 - _CANCELS // 100] * 1000)
        rounds.idle_share.append(await _idle(place, load, coordinator, worker))


async def _single(load: Load, probe: Probe) -> float:
    """Return one outstanding cycle's p50 less what is allowed beside syncs, in syncs as of now."""
    own = Probe(probe.place)
    own.sample()
    measured = await load.cycles(_SINGLE_CYCLES, 1)
    own.sample()
    return (measured.latency_p50 * 1000 - _BESIDE_SYNCS_MS) / own.median_ms()


async def _idle(place: Path, load: Load, coordinator: LedgerClient, worker: LedgerClient) -> float:
    """Return the share of a core the owner takes while ``OUTSTANDING`` slots and a coordinator
    wait for something to happen.
    """  # noqa: D205 - one thought
    wait = _SETTLE_SECONDS + 2 * _IDLE_SECONDS
    polls = [
        asyncio.create_task(
            worker.lease(
                LeaseRequest(
                    worker_id=load.worker_id, slots={CLASS: OUTSTANDING}, wait_seconds=wait
                )
            )
        ),
        asyncio.create_task(
            coordinator.events(
                EventsRequest(run_id=RUN, fence=load.fence, after=load.told, wait_seconds=wait)
            )
        ),
    ]
    pid = owner_pid(place)
    assert pid is not None, "the owner lives while we are connected"
    await asyncio.sleep(_SETTLE_SECONDS)
    before = cpu_seconds(pid)
    await asyncio.sleep(_IDLE_SECONDS)
    used = cpu_seconds(pid) - before
    for poll in polls:
        poll.cancel()
    await asyncio.wait(polls)
    return used / _IDLE_SECONDS


async def _deep(place: Path, queued: int) -> tuple[list[float], float]:
    """Return rates with ``queued`` actions waiting ÷ rates with none, window by window, and the
    seconds from a kill of the owner to the first lease.

    Two ledgers take turns, so that neither has the better part of the machine's moods. A cycle
    takes the oldest of the backlog and adds to its end.
    """  # noqa: D205 - one thought
    clock = SystemClock()
    deep = place / "deep"
    async with _ledger(place / "empty") as (empty, _, _), _ledger(deep) as (full, _, _):
        await full.submit(queued, _SUBMIT_BATCH)
        for load in (empty, full):
            await load.cycles(OUTSTANDING * 4, OUTSTANDING)
        ratios: list[float] = []
        for window in range(_DEEP_WINDOWS):
            turns = [full, empty] if window % 2 else [empty, full]
            rates = {load: (await load.cycles(CYCLES, OUTSTANDING)).rate for load in turns}
            ratios.append(rates[full] / rates[empty])
        pid = owner_pid(deep)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        began = clock.monotonic()
        await full.leased(1)
        return ratios, clock.monotonic() - began


@contextlib.asynccontextmanager
async def _ledger(
    place: Path,
) -> AsyncIterator[tuple[Load, LedgerClient, LedgerClient]]:
    coordinator = await connect(
        place, role="coordinator", limits=_LIMITS, idle_exit_seconds=_IDLE_SECONDS
    )
    worker = await connect(place, role="worker", limits=_LIMITS)
    try:
        load = Load(coordinator, worker)
        await load.begin(OUTSTANDING)
        yield load, coordinator, worker
    finally:
        await worker.close()
        await coordinator.close()
        pid = owner_pid(place)
        if pid is not None:
            os.kill(pid, signal.SIGTERM)


async def _log_rate(place: Path) -> float:
    process = subprocess.Popen(  # noqa: ASYNC220, S603 - our own module; nothing else runs yet
        [sys.executable, "-m", "stoker.testing.append_log", str(place)], stdin=subprocess.DEVNULL
    )
    try:
        await _published(place, process)
        coordinator = await connect(place, role="coordinator", spawn=False)
        worker = await connect(place, role="worker", spawn=False)
        load = Load(coordinator, worker)
        await load.begin(OUTSTANDING)
        await load.cycles(OUTSTANDING * 4, OUTSTANDING)
        measured = await load.cycles(CYCLES, OUTSTANDING)
        await worker.close()
        await coordinator.close()
    finally:
        process.terminate()
        process.wait()
    return measured.rate


async def _published(place: Path, process: "subprocess.Popen[bytes]") -> None:
    clock = SystemClock()
    deadline = clock.monotonic() + _START_SECONDS
    while not (place / SOCKET_PATH).exists():
        assert process.poll() is None, "the log's process ended at once"
        assert clock.monotonic() < deadline, "the log's process did not come up"
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-", ignore_cleanup_errors=True) as place:
        yield Path(place)
