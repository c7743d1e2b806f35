"""``stoker bench boxes``: what a box costs on this host, and how exactly its limits hold.

Real boxes of the strongest backend that can hold untrusted work here (``process`` boxes where none
can). Ratios are taken against a peer in the same run: a cold action against the bare launcher
started the same way by hand. Overshoot is the time past the limit until the verdict is ours, with
every process of the box dead. Figures whose machinery is not built yet are left out with a note.
"""

import asyncio
import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from stoker.cli.bench_boxes_containers import container_times
from stoker.cli.bench_boxes_guests import guest_forks, machine_branches
from stoker.cli.bench_boxes_warm import warm_times
from stoker.cli.bench_machine import Probe, figure, machine
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Limits, Rung, Trust
from stoker.model.tools import LimitKind, RunRequest, RunResult, Tests
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBackend, LocalBox
from stoker.sandbox.namespace import NamespaceBackend
from stoker.sandbox.process import ProcessBackend
from stoker.seams.clock import SystemClock

_COLD_RUNS = 30
_WALL_RUNS = 20
_LIMIT_RUNS = 10
_JUDGE_RUNS = 5
_TOGETHER = 30
_BRANCHED_FILES = 3
_HUNDRED = 100
_AT_ONCE = 16
"""Actions begun together of the hundred: each needs a dozen descriptors of the usual 1,024."""
_PATIENCE_SECONDS = 120.0
_WALL_SECONDS = 0.3
_CPU_SECONDS = 0.3
_CODE = "while True: pass"
_TESTS = Tests(source="def check(candidate):\n    assert candidate(2) == 4\n", entry_point="f")
_ANSWER = {"solution.py": b"def f(x):\n    return x + x\n"}
_NOTES = dict.fromkeys(
    (
        "armed_result_ms_p50",
        "file_branch_ms_p50",
        "qemu_fork_ms_p50",
        "qemu_files_fork_vs_fork",
        "smol_branch_ms_p50",
    ),
    "not built yet, or not to be had on this host",
)

Say = Callable[[str], object]
Figure = dict[str, Any]

_clock = SystemClock()


class _Round(msgspec.Struct, kw_only=True):
    """What one run measured, milliseconds unless the name says otherwise."""

    launcher: list[float] = []
    process: list[float] = []
    cold: list[float] = []
    python: list[float] = []
    judge: list[float] = []
    create: list[float] = []
    branch: list[float] = []
    teardown: list[float] = []
    wall: list[float] = []
    cpu: list[float] = []
    flood: list[float] = []
    warm: list[float] = []
    warm_bare: list[float] = []
    """Without numpy, which is loaded for the others where there is one."""
    fork: list[float] = []
    container: list[float] = []
    container_by_hand: list[float] = []
    container_beside: list[float] = []
    """A namespace box's actions between those."""
    guest: list[float] = []
    guest_files: list[float] = []
    machine: list[float] = []
    armed: list[float] = []
    warm_per_second: float = 0.0
    warm_hundred_seconds: float = 0.0
    teardown_together_seconds: float = 0.0
    hundred_seconds: float = 0.0
    sweep_seconds: float = 0.0


def measure(*, runs: int, say: Say, guests: bool = True) -> dict[str, Any]:
    """Measure ``runs`` times and return the bench document (DESIGN §9).

    Without ``guests`` none is booted and its figure is left out.
    """
    before = machine()
    rounds, syncs = [], []
    rung = Rung.PROCESS
    for number in range(runs):
        say(f"bench boxes: run {number + 1} of {runs} …")
        with tempfile.TemporaryDirectory(prefix="stoker-bench-") as place:
            probe = Probe(Path(place))
            probe.sample()
            syncs.append(probe.median_ms())
            measured, rung = asyncio.run(_round(Path(place), guests=guests))
            measured.sweep_seconds = _swept(Path(place) / "swept", rung)
            rounds.append(measured)
    return {
        "bench": "boxes",
        "machine": {
            **machine(sync_ms_p50=statistics.median(syncs)),
            "load": before["load"],
            "rung": str(rung),
        },
        "figures": (figures := _figures(rounds)),
        "notes": {name: why for name, why in _NOTES.items() if name not in figures},
    }


def _figures(rounds: Sequence[_Round]) -> dict[str, Figure]:
    def median(name: str) -> list[float]:
        return [statistics.median(getattr(r, name)) for r in rounds if getattr(r, name)]

    def p99(name: str) -> list[float]:
        return [_p99(getattr(r, name)) for r in rounds]

    ratios = [c / bare for c, bare in zip(median("cold"), median("launcher"), strict=False)]
    warm = [w / fork for w, fork in zip(median("warm"), median("fork"), strict=True)]
    loaded = "numpy loaded" if find_spec("numpy") else "forked; no numpy here"
    by_hand = median("container_by_hand")
    contained = [a / b for a, b in zip(median("container"), by_hand, strict=True)]
    beside = [a / b for a, b in zip(median("container_beside"), by_hand, strict=True)]
    files = [a / b for a, b in zip(median("guest_files"), median("guest"), strict=True)]
    made = {
        "container_vs_runtime": figure(contained, "ratio", 1.5, "the runtime by hand, p50"),
        "container_action_ms_p50": figure(median("container"), "ms", None, "true"),
        "cold_box_vs_runtime": figure(beside, "ratio", 1.0, "the runtime by hand, p50"),
        "warm_action_vs_fork": figure(warm, "ratio", 1.5, "a bare fork into such namespaces, p50"),
        "warm_action_ms_p50": figure(median("warm"), "ms", 4.0, f"python -c, {loaded}"),
        "warm_bare_action_ms_p50": figure(median("warm_bare"), "ms", None, "without numpy"),
        "warm_action_ms_p99": figure([_p99(r.warm) for r in rounds if r.warm], "ms", 15.0, ""),
        "armed_result_ms_p50": figure(median("armed"), "ms", 2.5, "a word on a pipe"),
        "hundred_warm_seconds": figure(
            [r.warm_hundred_seconds for r in rounds if r.warm], "s", 0.6, "100 boxes made ahead"
        ),
        "actions_per_second_per_core": figure(
            [r.warm_per_second for r in rounds if r.warm], "1/s", 200.0, "a box for each core"
        ),
        "cold_box_vs_launcher": figure(ratios, "ratio", 1.5, "the bare launcher by hand, p50"),
        "wall_overshoot_ms_p99": figure(p99("wall"), "ms", 50.0, "the wall deadline"),
        "cpu_overshoot_ms_p99": figure(p99("cpu"), "ms", 100.0, "the CPU budget"),
        "flood_stop_ms_p99": figure(p99("flood"), "ms", 100.0, "from start to stopped"),
        "teardown_ms_p99": figure(p99("teardown"), "ms", 100.0, "one box at a time"),
        "sweep_seconds": figure(
            [r.sweep_seconds for r in rounds], "s", 2.0, f"{_TOGETHER} boxes of a killed worker"
        ),
        "hundred_boxes_seconds": figure(
            [r.hundred_seconds for r in rounds], "s", 1.0, "100 boxes made, true run in each"
        ),
        "qemu_fork_ms_p50": figure(median("guest"), "ms", 120.0, "a fork, to its first reply"),
        "qemu_files_fork_vs_fork": figure(files, "ratio", 1.2, "a fork without files, p50"),
        "smol_branch_ms_p50": figure(
            median("machine"), "ms", 100.0, "a branch by KVM, to the end of its first command"
        ),
        "process_action_ms_p50": figure(median("process"), "ms", None, "true"),
        "cold_action_ms_p50": figure(median("cold"), "ms", None, "true"),
        "cold_python_ms_p50": figure(median("python"), "ms", None, "python -c pass"),
        "judge_ms_p50": figure(median("judge"), "ms", None, "two boxes made and removed"),
        "file_branch_ms_p50": figure(
            median("branch"), "ms", 1.0, f"a box made and {_BRANCHED_FILES} files copied into it"
        ),
        "create_ms_p50": figure(median("create"), "ms", None, "with its synced record"),
        "teardown_ms_p50": figure(median("teardown"), "ms", None, ""),
        "teardown_together_seconds": figure(
            [r.teardown_together_seconds for r in rounds], "s", None, f"{_TOGETHER} boxes at work"
        ),
    }
    return {name: figure for name, figure in made.items() if figure["runs"]}


async def _round(place: Path, *, guests: bool) -> tuple[_Round, Rung]:
    made = _Round()
    async with SandboxHost.open(place / "state") as host:
        namespace = NamespaceBackend(host)
        boxed: LocalBackend = namespace
        if not (await namespace.offer()).available:
            boxed = ProcessBackend(host)
        made.process = await _actions(ProcessBackend(host), ("true",))
        await _cold_beside_launcher(boxed, made)
        made.python = await _actions(boxed, ("python", "-c", "pass"))
        for _ in range(_COLD_RUNS):
            made.create.append(await _timed(boxed.create("bench", Baseline(), _policy(boxed))))
            made.teardown.append(await _timed(boxed.boxes["bench"].destroy()))
        await _branches(boxed, made)
        for _ in range(_JUDGE_RUNS):
            judged = boxed.judge(
                "bench", _ANSWER, _TESTS, policy=_policy(boxed), timeout_seconds=60
            )
            made.judge.append(await _timed(judged))
        await _overshoots(boxed, made)
        if (warm := await warm_times(boxed)) is not None:
            made.warm, made.warm_bare, made.fork = warm.action, warm.bare, warm.fork
            made.armed = warm.result
            made.warm_per_second = warm.per_second_per_core
            made.warm_hundred_seconds = warm.hundred_seconds
        if boxed is namespace and (containers := await container_times(boxed)) is not None:
            made.container, made.container_by_hand, made.container_beside = containers
        if guests:
            made.guest, made.guest_files = await guest_forks(host, place)
            made.machine = await machine_branches(host)
        made.hundred_seconds = await _timed(_hundred(boxed)) / 1000
        await boxed.close()
        made.teardown_together_seconds = await _torn_down(boxed)
        await boxed.close()
    return made, boxed.parts.rung


def _policy(backend: LocalBackend, **limits: Any) -> ExecutionPolicy:  # noqa: ANN401 - the fields of Limits
    if backend.parts.rung is Rung.PROCESS:
        return ExecutionPolicy(
            isolation=Isolation.PROCESS, trust=Trust.TRUSTED, limits=Limits(**limits)
        )
    return ExecutionPolicy(accept_shared_kernel=True, limits=Limits(**limits))


async def _timed(work: Awaitable[object]) -> float:
    began = _clock.monotonic()
    await work
    return (_clock.monotonic() - began) * 1000


async def _ran(box: LocalBox, argv: tuple[str, ...], seconds: float) -> RunResult:
    return (await box.run(RunRequest(argv=argv), timeout_seconds=seconds)).result


async def _actions(backend: LocalBackend, argv: tuple[str, ...]) -> list[float]:
    """Return the time of one action after another in one box."""
    box = await backend.create("bench", Baseline(), _policy(backend))
    await _ran(box, argv, _PATIENCE_SECONDS)
    times = [await _timed(_ran(box, argv, _PATIENCE_SECONDS)) for _ in range(_COLD_RUNS)]
    await box.destroy()
    return times


async def _cold_beside_launcher(backend: LocalBackend, made: _Round) -> None:
    """Time an action and the bare launcher in turn, so that both meet the same load."""
    box = await backend.create("bench", Baseline(), _policy(backend))
    argv = _bare_launcher(backend.host)
    for _ in range(_COLD_RUNS):
        made.cold.append(await _timed(_ran(box, ("true",), _PATIENCE_SECONDS)))
        if argv:
            made.launcher.append(await asyncio.to_thread(_by_hand, argv))
    await box.destroy()


def _by_hand(argv: list[str]) -> float:
    began = _clock.monotonic()
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True)  # noqa: S603 - the launcher of our runtime directory
    return (_clock.monotonic() - began) * 1000


def _bare_launcher(host: SandboxHost) -> list[str]:
    """Return the launcher alone, with the same namespaces; empty where it cannot be run."""
    if host.runtime.launcher is None:
        return []
    argv = [
        str(host.runtime.launcher), "--unshare-all", "--die-with-parent", "--new-session",
        "--ro-bind", "/usr", "/usr", "--dev", "/dev", "--proc", "/proc",
    ]  # fmt: skip
    for folder in map(Path, ("/bin", "/lib", "/lib64")):
        # Never the whole of "/": mounts of other boxes come and go beneath it.
        kind = ("--symlink", str(folder.readlink())) if folder.is_symlink() else _shown(folder)
        argv += [*kind, str(folder)]
    argv.append("true")
    with contextlib.suppress(subprocess.CalledProcessError):
        _by_hand(argv)
        return argv
    return []


def _shown(folder: Path) -> tuple[str, str]:
    return "--ro-bind-try", str(folder)


async def _branches(backend: LocalBackend, made: _Round) -> None:
    box = await backend.create("bench", Baseline(), _policy(backend))
    await box.write_files({f"file-{n}": bytes(1000) for n in range(_BRANCHED_FILES)})
    for _ in range(_COLD_RUNS):
        made.branch.append(await _timed(box.branch(1)))
        for other in [one for one in backend.boxes.values() if one is not box]:
            await other.destroy()
    await box.destroy()


async def _overshoots(backend: LocalBackend, made: _Round) -> None:
    box = await backend.create("bench", Baseline(), _policy(backend))
    sleeper = ("sh", "-c", "trap '' TERM; sleep 1000 & sleep 1000")
    for _ in range(_WALL_RUNS):
        spent = await _timed(_expect(box, sleeper, _WALL_SECONDS, None))
        made.wall.append(spent - _WALL_SECONDS * 1000)
    for _ in range(_LIMIT_RUNS):
        flood = _expect(box, ("sh", "-c", "yes"), _PATIENCE_SECONDS, LimitKind.OUTPUT)
        made.flood.append(await _timed(flood))
    await box.destroy()
    box = await backend.create("bench", Baseline(), _policy(backend, cpu_seconds=_CPU_SECONDS))
    for _ in range(_LIMIT_RUNS):
        run = await box.run(
            RunRequest(argv=("python", "-c", _CODE)), timeout_seconds=_PATIENCE_SECONDS
        )
        assert run.result.limit is LimitKind.CPU, run.result.text
        made.cpu.append(((run.usage.cpu_seconds or 0.0) - _CPU_SECONDS) * 1000)
    await box.destroy()


async def _expect(
    box: LocalBox, argv: tuple[str, ...], seconds: float, limit: LimitKind | None
) -> None:
    result = await _ran(box, argv, seconds)
    assert result.limit is limit, result.text
    assert result.timed_out is (limit is None), result.text


async def _at_work(backend: LocalBackend, count: int) -> list["asyncio.Task[RunResult]"]:
    """Make many boxes with a stubborn program in each; return once all run."""
    script = "echo x > started; trap '' TERM; (setsid sleep 1000 &); sleep 1000"
    boxes = await asyncio.gather(
        *(backend.create(f"bench_{n}", Baseline(), _policy(backend)) for n in range(count))
    )
    runs = [asyncio.ensure_future(_ran(b, ("sh", "-c", script), 600.0)) for b in boxes]
    for box in boxes:
        while not (await box.read_file("started", bytes_max=10)).content:
            await asyncio.sleep(0.01)
    return runs


async def _hundred(backend: LocalBackend) -> None:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> None:
        box = await backend.create(f"bench_{number}", Baseline(), _policy(backend))
        async with gate:
            assert (await _ran(box, ("true",), _PATIENCE_SECONDS)).ok

    await asyncio.gather(*(one(number) for number in range(_HUNDRED)))


async def _torn_down(backend: LocalBackend) -> float:
    runs = await _at_work(backend, _TOGETHER)
    seconds = await _timed(backend.close()) / 1000
    await asyncio.gather(*runs, return_exceptions=True)
    return seconds


# --- the sweep: a worker of its own is killed ---------------------------------------------------


def _swept(state: Path, rung: Rung) -> float:
    """Kill a process that holds many boxes at work; return the seconds of the next one's sweep."""
    holder = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-m", "stoker.cli.bench_boxes", str(state), str(rung), str(_TOGETHER)],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    try:
        with holder.stdout:
            ready = holder.stdout.readline()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert ready == b"ready\n", "the holder of boxes did not get them to work"
    return asyncio.run(_sweep(state))


async def _sweep(state: Path) -> float:
    began = _clock.monotonic()
    async with SandboxHost.open(state) as host:
        found = await host.sweep()
        seconds = _clock.monotonic() - began
        assert (found, host.leaked()) == (_TOGETHER, 0), "the sweep left boxes behind"
    return seconds


async def _hold(state: Path, rung: Rung, count: int) -> None:
    async with SandboxHost.open(state) as host:
        backend = ProcessBackend(host) if rung is Rung.PROCESS else NamespaceBackend(host)
        runs = await _at_work(backend, count)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.wait(runs)


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


if __name__ == "__main__":
    asyncio.run(_hold(Path(sys.argv[1]), Rung(sys.argv[2]), int(sys.argv[3])))
