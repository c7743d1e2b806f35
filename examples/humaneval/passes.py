"""The three passes of the demo: lock-step, Stoker, and Stoker with its coordinator killed half-way.

All three get the same tasks, the same settings, the same simulated device and the same boxes. The
last one is `stoker run` as a person would type it, in a process of its own, so that there is
something to kill.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from lockstep import run_lockstep
from picture import Timeline
from rich.console import Console

from stoker.broker.base import ActionsRequest
from stoker.cli.ledger_access import all_rollouts, ledger_of
from stoker.cli.live import watching
from stoker.cli.run import execute
from stoker.config.load import load_settings, process_environment
from stoker.config.tree import Settings
from stoker.coordinator.record import RunDirectory
from stoker.coordinator.request import Observer, RunRequest
from stoker.coordinator.view import RunSnapshot
from stoker.model.action import ActionState

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "program.py"
CONFIG = HERE / "stoker.toml"
MODEL = f"sim:{HERE / 'sim.toml'}"
PASS_SECONDS_MAX = 600.0
"""A pass that takes longer is given up."""
_LOOK_SECONDS = 0.05
_UNFINISHED = {ActionState.PARKED, ActionState.ACCEPTED, ActionState.LEASED, ActionState.STARTED}


class PassFailed(Exception):
    """A pass did not come to its end; says why and where to look."""


@dataclass
class Passed:
    """One pass that came to its end."""

    snapshot: RunSnapshot
    seconds: float
    """From its first moment to its last, starting and ending of processes included."""
    timeline: Timeline
    run: RunDirectory | None = None


@dataclass
class Killed:
    """What the killed coordinator left."""

    after_seconds: float
    finished: int
    in_flight: int
    actions_unfinished: int
    pid: int


@dataclass(kw_only=True)
class Stage:
    """What all passes share."""

    directory: Path
    tasks: list[dict[str, Any]]
    console: Console
    """Where the live view goes."""
    batch: int
    sets: list[str]
    """Settings in the form of ``--set``."""

    @property
    def tasks_file(self) -> Path:
        """The task file of all runs."""
        return self.directory / "tasks.jsonl"

    @property
    def counter(self) -> Path:
        """Where the queue tool notes its runs."""
        return self.directory / "queue.log"

    def settings(self) -> Settings:
        """Return the settings of the demo."""
        return load_settings([CONFIG], process_environment(), self.sets).settings

    def lockstep(self) -> Passed:
        """Run the batch loop."""
        recorder = _Recorder("lock-step")
        with watching(self.console) as observer:
            snapshot = asyncio.run(
                run_lockstep(
                    self.tasks,
                    settings=self.settings(),
                    model=MODEL,
                    directory=self.directory / "lockstep",
                    batch=self.batch,
                    observer=recorder.also(observer),
                )
            )
        return recorder.passed(snapshot, None)

    def steady(self) -> Passed:
        """Run Stoker, in this process, to its end."""
        request = RunRequest(
            program=PROGRAM,
            program_name=None,
            tasks=self.tasks_file,
            model=MODEL,
            settings=self.settings(),
            runs_directory=self.directory / "steady",
        )
        recorder = _Recorder("Stoker")
        with watching(self.console) as observer:
            report = asyncio.run(execute(request, recorder.also(observer), self.console))
        if report.resumable:
            raise PassFailed("the run was stopped before its end; nothing more is shown")
        return recorder.passed(report.snapshot, RunDirectory(Path(report.snapshot.run_directory)))

    def killed(self) -> tuple[Passed, Killed]:
        """Run ``stoker run``, kill it with -9 half-way, resume it."""
        recorder = _Recorder("killed, resumed")
        already = _lines(self.counter)
        with watching(self.console) as observer:
            seen = recorder.also(observer)
            process = self._started()
            half = already + (len(self.tasks) + 1) // 2
            with _stopped_on_trouble(process):
                self._watch(process, lambda: _lines(self.counter) >= half, seen)
            ended = process.poll()
            process.kill()
            process.wait()
            if ended is not None:
                raise PassFailed(f"the run ended ({ended}) before its half; {self._log()}")
            run = self._run()
            killed = asyncio.run(_left_behind(run, process.pid, recorder.elapsed()))
            recorder.mark("kill -9")
            process = self._started("--resume", run.path.name)
            with _stopped_on_trouble(process):
                self._watch(process, lambda: False, seen)
        if process.returncode != 0:
            raise PassFailed(f"the resumed run ended with {process.returncode}; {self._log()}")
        return recorder.passed(_status(run), run), killed

    def _started(self, *more: str) -> "subprocess.Popen[bytes]":
        sets = [part for one in self.sets for part in ("--set", one)]
        with (self.directory / "stoker-run.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - our own command
                [
                    *(sys.executable, "-m", "stoker.cli.main", "run", str(PROGRAM)),
                    *("--tasks", str(self.tasks_file), "--model", MODEL, "--config", str(CONFIG)),
                    *("--runs", str(self.directory / "killed"), *sets, *more),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _watch(
        self, process: "subprocess.Popen[bytes]", until: Callable[[], bool], observer: Observer
    ) -> None:
        """Show what the run looks like until ``until`` says so or the process ends."""
        deadline = time.monotonic() + PASS_SECONDS_MAX
        while process.poll() is None and not until():
            if time.monotonic() > deadline:
                raise PassFailed(f"not done after {PASS_SECONDS_MAX:g} s; {self._log()}")
            for status in (self.directory / "killed").glob("run_*/status.json"):
                observer(_status(RunDirectory(status.parent)))
            time.sleep(_LOOK_SECONDS)

    def _run(self) -> RunDirectory:
        found = sorted((self.directory / "killed").glob("run_*/run.json"))
        if len(found) != 1:
            raise PassFailed(f"{len(found)} runs lie in {self.directory / 'killed'}, not one")
        return RunDirectory(found[0].parent)

    def _log(self) -> str:
        return f"its output lies in {self.directory / 'stoker-run.log'}"


class _Recorder:
    """Keeps what the live view is shown, for the picture."""

    def __init__(self, name: str) -> None:
        self._began = time.monotonic()
        self._timeline = Timeline(name)

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def also(self, observer: Observer) -> Observer:
        """Return an observer that records and then passes on."""

        def seen(snapshot: RunSnapshot) -> None:
            self._timeline.window = snapshot.lane.window
            self._sample(snapshot.lane.running)
            observer(snapshot)

        return seen

    def mark(self, what: str) -> None:
        """Remember a moment; the device stands still from here on."""
        self._sample(0)
        self._timeline.marks.append((self.elapsed(), what))

    def _sample(self, running: int) -> None:
        if not self._timeline.samples or self._timeline.samples[-1][1] != running:
            self._timeline.samples.append((self.elapsed(), running))

    def passed(self, snapshot: RunSnapshot, run: RunDirectory | None) -> Passed:
        self._timeline.samples.append((self.elapsed(), 0))
        return Passed(snapshot, self.elapsed(), self._timeline, run)


@contextmanager
def _stopped_on_trouble(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Stop a run in good order when the demo itself is interrupted or fails."""
    try:
        yield
    except BaseException:
        process.terminate()
        process.wait()
        raise


async def _left_behind(run: RunDirectory, pid: int, seconds: float) -> Killed:
    """Look at what a dead coordinator left in its ledger."""
    async with ledger_of(run) as ledger:
        rollouts = await all_rollouts(ledger, run.record.run_id)
        going = [one for one in rollouts if one.last is None]
        views = [
            view
            for one in going
            for view in (await ledger.actions(ActionsRequest(rollout_id=one.rollout_id))).actions
        ]
    return Killed(
        after_seconds=seconds,
        finished=len(rollouts) - len(going),
        in_flight=len(going),
        actions_unfinished=sum(view.state in _UNFINISHED for view in views),
        pid=pid,
    )


def _status(run: RunDirectory) -> RunSnapshot:
    try:
        return msgspec.json.decode(run.status.read_bytes(), type=RunSnapshot)
    except (OSError, msgspec.MsgspecError) as error:
        raise PassFailed(f"{run.status} cannot be read: {error}") from error


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
