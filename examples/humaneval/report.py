"""What the demo says: the plan, the two ways side by side, and what was promised and held."""

import sys
from dataclasses import dataclass
from pathlib import Path

from passes import Killed, Passed
from proof import Recorded
from rich.console import Console
from rich.text import Text
from tasks import WAIT_MEDIAN_SECONDS, WAIT_SCALE, WAIT_SECONDS_MAX

from stoker.cli.output import duration, percent, table
from stoker.inference.profile import SimProfile
from stoker.model.outcome import OutcomeKind

WIDTH = 80


@dataclass(frozen=True)
class Promise:
    """One thing that must be so, and what was found."""

    what: str
    held: bool
    found: str


def console() -> Console:
    """Return the console for what the demo says: stdout, at most 80 columns."""
    made = Console(markup=False, highlight=False, emoji=False)
    made.width = min(WIDTH, made.width) if made.is_terminal else WIDTH
    return made


def say_plan(out: Console, *, count: int, batch: int, profile: SimProfile) -> None:
    """Say what is about to happen."""
    out.print(Text("Stoker demo: HumanEval, three times", "bold"))
    out.print(
        f"{count} problems. A policy first gives a damaged solution; its tests run in a box;\n"
        "shown the traceback, it gives the right one, which a judge grades in two boxes.\n"
    )
    rows = {
        "model": f"a simulated device: a step takes {profile.a * 1000:g} ms + "
        f"{profile.c * 1000:g} ms a sequence, window {profile.window}",
        "tests": "untrusted code, really run in boxes; accept_shared_kernel = true",
        "waits": f"a trusted tool with a heavy tail: p50 {WAIT_MEDIAN_SECONDS:g} s, cut at "
        f"{WAIT_SECONDS_MAX:g} s, all x {WAIT_SCALE:g}",
        "passes": f"1 lock-step, batches of {batch} · 2 Stoker · 3 Stoker, coordinator\n"
        "killed with -9 half-way and resumed",
    }
    grid = table("", "")
    grid.show_header = False
    for name, content in rows.items():
        grid.add_row(Text(name, "dim"), content)
    out.print(grid)


def say_pass(out: Console, number: int, what: str) -> None:
    """Say that a pass begins."""
    out.print(Text(f"\n{number}  {what}", "bold"))
    out.file.flush()


def say_passed(out: Console, passed: Passed) -> None:
    """Say how a pass ended, in a line."""
    total = passed.snapshot.rollouts_total
    out.print(f"   {solved(passed)} of {total} solved in {duration(passed.seconds)}")


def solved(passed: Passed) -> int:
    """Return how many rollouts of a pass earned the full reward."""
    snapshot = passed.snapshot
    return round((snapshot.reward_mean or 0.0) * snapshot.outcomes.get(OutcomeKind.COMPLETED, 0))


def say_killed(out: Console, killed: Killed) -> None:
    """Say what the kill hit."""
    out.print(
        f"   process {killed.pid} was killed with -9 after {duration(killed.after_seconds)}: "
        f"of its rollouts\n   {killed.finished} had finished, {killed.in_flight} were in flight, "
        f"with {killed.actions_unfinished} actions queued or running"
    )


def say_table(out: Console, lockstep: Passed, steady: Passed) -> None:
    """Say the two ways side by side; all of it was measured in this run."""
    one, other = lockstep.snapshot, steady.snapshot
    made = table("measured in this run", ">lock-step", ">Stoker")
    made.add_row("wall time", duration(one.seconds), duration(other.seconds))
    made.add_row("lane active", percent(one.lane.active_share), percent(other.lane.active_share))
    made.add_row(
        "throughput ÷ bound",
        percent(one.lane.throughput_share),
        percent(other.lane.throughput_share),
    )
    made.add_row(
        "occupancy while active", percent(one.lane.occupancy), percent(other.lane.occupancy)
    )
    made.add_row(
        "idle while a rollout was ready",
        f"{one.lane.idle_while_ready_share * 100:.1f} %",
        f"{other.lane.idle_while_ready_share * 100:.1f} %",
    )
    out.print()
    out.print(made)
    out.print(Text("The device is simulated; boxes, tests, ledger and processes are real.", "dim"))


def say_facts(out: Console, steady: Passed, recorded: Recorded) -> None:
    """Say what else was measured."""
    snapshot = steady.snapshot
    tokens = sum(told.tokens for told in recorded.rollouts.values())
    observations = sum(told.observations for told in recorded.rollouts.values())
    rows = {
        "action selected → received": f"p50 {_milliseconds(snapshot.latency_ms_p50)}, "
        f"p99 {_milliseconds(snapshot.latency_ms_p99)}, over {observations} observations",
        "isolation of the tests": f"{snapshot.isolation.get('tests', '?')}, shared kernel accepted",
        "compared": f"{tokens} tokens, {observations} observations, "
        f"{len(recorded.rollouts)} rewards",
    }
    grid = table("", "")
    grid.show_header = False
    for name, content in rows.items():
        grid.add_row(Text(name, "dim"), content)
    out.print()
    out.print(grid)


def say_promises(out: Console, promises: list[Promise]) -> bool:
    """Say what was promised and whether it held; return whether all of it did."""
    out.print()
    for promise in promises:
        mark = Text(" held  ", "green") if promise.held else Text("BROKEN ", "bold red")
        out.print(Text.assemble(mark, f"{promise.what}: {promise.found}"))
    return all(promise.held for promise in promises)


def say_next(out: Console, steady: Passed, killed: Passed, *, picture: Path, task: str) -> None:
    """Say where everything lies and what to try."""
    assert steady.run is not None
    assert killed.run is not None
    command = _shown(Path(sys.executable).with_name("stoker"))
    rows = {
        "picture of the lanes": _shown(picture),
        "the runs": f"{_shown(steady.run.path)}\n{_shown(killed.run.path)}",
    }
    out.print()
    for name, content in rows.items():
        out.print(Text(f"{name}:", "dim"))
        for line in content.splitlines():
            out.print(f"  {line}", soft_wrap=True)
    out.print(Text("try next:", "dim"))
    run = _shown(killed.run.path)
    for line in (f"show {run} {task}", f"status {run}", "doctor"):
        out.print(f"  {command} {line}", soft_wrap=True)


def _milliseconds(value: float | None) -> str:
    return duration(None if value is None else value / 1000)


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
