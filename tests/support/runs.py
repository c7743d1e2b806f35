"""Whole runs as real processes: start ``stoker run``, find its parts, hurt them, resume, let go.

Every wait has a condition and a bound that only a hang reaches. Processes are found by what they
hold (locks) or whose children they are, and are signalled through pidfds, so that a number that was
used again is never hit.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker.broker.place import owner_pid
from stoker.coordinator.record import RunDirectory

BOUND = 180.0
"""Seconds. Generous: nothing may depend on how fast the machine is."""
LEASE = 2.0
ROLES = ("coordinator", "host", "worker", "owner")
LOG_TAIL = 4000

SETTINGS: dict[str, Any] = {
    "ledger": {"lease": LEASE, "idle_exit": 20.0},
    "sandbox": {"accept_shared_kernel": True},
    "workers": {
        "idle_exit": 30.0,
        "classes": {
            "fast": {"isolation": "process", "trust": "trusted", "slots": 4, "attempts": 20}
        },
    },
    "program": {"check_replays": 0.0},
}
"""Settings of a run that is hurt: a short lease, cheap boxes."""


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the branches of ``more`` put over it."""
    found = dict(base)
    for key, value in more.items():
        old = found.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        found[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return found


def tell(text: str) -> None:
    """Say what is done to whom; pytest shows it with a failure."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process; silent when it is gone."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def wait_gone(pid: int, seconds: float = BOUND) -> bool:
    """Wait until a process that may not be our child has ended; whether it did."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def until(condition: Callable[[], Any], what: str, seconds: float = BOUND) -> Any:
    """Wait for ``condition``; return what it gave. Other processes are watched by looking."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def parents() -> dict[int, int]:
    """Return pid → parent of every process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(") ")[2].split()
            if fields[0] not in "ZX":
                found[int(entry.name)] = int(fields[1])
    return found


def command_line(pid: int) -> str:
    """Return a process's command line, empty when it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def lock_holder(path: Path) -> int | None:
    """Return who holds the lock on ``path``."""
    with suppress(OSError):
        found = path.stat()
        where = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            row = line.split()
            if row[1] == "FLOCK" and row[5] == where and int(row[4]) > 0:
                return int(row[4])
    return None


class Rig:
    """One run, as typed, and everything that belongs to it."""

    def __init__(
        self,
        folder: Path,
        *,
        program: str,
        model: str,
        tasks: list[dict[str, Any]],
        settings: Mapping[str, Any] | None = None,
        log: Path | None = None,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.program = folder / "program.py"
        self.program.write_text(program)
        self.model = folder / "model.py"
        self.model.write_text(model)
        self.model_spec = f"scripted:{self.model}"
        self.tasks = folder / "tasks.jsonl"
        self.tasks.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        self.settings = folder / "stoker.toml"
        self.configure(settings or {})
        self.log = log or folder / "tools.log"
        """Where tools leave their lines."""
        self.gate = folder / "gate"
        self.armed = folder / "armed"
        """There while an armed point has not been reached; in a directory, a file a point."""
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.coordinators = 0
        self.spawned: list[subprocess.Popen[bytes]] = []
        """Every coordinator."""
        self.others: list[subprocess.Popen[bytes]] = []

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Write the settings file: ``SETTINGS`` with ``settings`` put over it."""
        self.settings.write_text("".join(_toml((), merged(SETTINGS, settings))))

    # --- starting and ending -----------------------------------------------------------------

    def start(self, *extra: str, fault: str = "") -> subprocess.Popen[bytes]:
        """Start a coordinator: of a new run, or with ``--resume`` where there is one.

        ``fault`` (``point=kill@1``) is armed in it and in whatever it starts; one process acts.
        """
        assert self.coordinator is None or self.coordinator.poll() is not None, "one at a time"
        self.coordinator = self.spawn(*extra, fault=fault)
        return self.coordinator

    def spawn(self, *extra: str, fault: str = "") -> subprocess.Popen[bytes]:
        """Start one more coordinator without making it *the* coordinator."""
        self.coordinators += 1
        command = [sys.executable, "-m", "stoker.cli.main", "run", str(self.program)]
        command += ["--tasks", str(self.tasks), "--model", self.model_spec]
        command += ["--config", str(self.settings), "--runs", str(self.folder / "runs"), "--json"]
        run = self.found()
        if run is not None and "--run-id" not in extra:
            command += ["--resume", run.name]
        self.spawned.append(
            self._popen([*command, *extra], f"coordinator-{self.coordinators}", fault)
        )
        return self.spawned[-1]

    def start_worker(self, name: str, fault: str = "") -> subprocess.Popen[bytes]:
        """Start a worker by hand, as ``stoker worker`` does."""
        command = [sys.executable, "-m", "stoker.cli.main", "worker", "--run", self.run.path.name]
        command += ["--name", name, "--runs", str(self.folder / "runs")]
        process = self._popen(command, f"worker-{name}", fault)
        self.others.append(process)
        return process

    def _popen(self, command: list[str], name: str, fault: str) -> subprocess.Popen[bytes]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")}
        if fault:
            if not self.armed.is_dir():
                self.armed.touch()
            kept |= {"STOKER_FAULT": fault, "STOKER_FAULT_ONCE": str(self.armed)}
        out = (self.folder / f"{name}.out").open("wb")
        err = (self.folder / f"{name}.err").open("wb")
        with out, err:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def stoker(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run another command on these runs, as typed."""
        command = [sys.executable, "-m", "stoker.cli.main", *arguments]
        command += ["--runs", str(self.folder / "runs")]
        return subprocess.run(command, capture_output=True, text=True, timeout=BOUND, check=False)

    def ended(self, process: subprocess.Popen[bytes] | None = None) -> int:
        """Wait for a coordinator (the current one) to end; return its exit status."""
        process = process or self.coordinator
        assert process is not None
        try:
            return process.wait(BOUND)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the coordinator still runs\n{self.said()}") from None

    def finish(self) -> dict[str, Any]:
        """Wait for the run to finish without further harm; return its report."""
        assert self.ended() == 0, self.said()
        return self.report()

    def report(self, number: int = 0) -> dict[str, Any]:
        """Return the JSON that coordinator ``number`` (the latest) wrote."""
        number = number or self.coordinators
        document: dict[str, Any] = json.loads(
            (self.folder / f"coordinator-{number}.out").read_bytes()
        )
        return document

    def has_said(self, text: str, number: int = 0) -> bool:
        """Whether coordinator ``number`` (the latest) has told ``text`` to a person."""
        return text in (self.folder / f"coordinator-{number or self.coordinators}.err").read_text()

    def said(self) -> str:
        """Return what coordinators, hosts and workers last said, for people."""
        run = self.found()
        files = [*self.folder.glob("*.err"), *((run / "logs").glob("*") if run else [])]
        files += [run / "ledger" / "ledger.log"] if run else []
        parts = []
        for file in sorted(files):
            with suppress(OSError):
                text = file.read_text(errors="replace")[-LOG_TAIL:]
                parts.append(f"--- {file.name}\n{text}")
        return "\n".join(parts)

    # --- where things are --------------------------------------------------------------------

    def found(self) -> Path | None:
        """Return the directory of the run, once its record is there."""
        records = sorted((self.folder / "runs").glob("run_*/run.json"))
        assert len(records) <= 1, "a rig is one run"
        return records[0].parent if records else None

    def ended_early(self) -> bool:
        """Whether the coordinator is not running."""
        return self.coordinator is None or self.coordinator.poll() is not None

    def until_lines(self, count: int) -> None:
        """Wait until tools have left ``count`` lines; the run must not end before."""
        until(lambda: len(self.lines()) >= count or self.ended_early(), f"line {count}")
        assert len(self.lines()) >= count, f"ended before line {count}\n{self.said()}"

    @property
    def run(self) -> RunDirectory:
        """The run, waited for."""
        return RunDirectory(until(self.found, f"a run\n{self.said()}"))

    def status(self) -> dict[str, Any]:
        """Return the snapshot that the coordinator last wrote; an empty one before the first."""
        found: dict[str, Any] = {"outcomes": {}, "classes": {}}
        with suppress(FileNotFoundError):
            found = json.loads(self.run.status.read_bytes())
        return found

    def worker_status(self, name: str) -> dict[str, Any]:
        """Return what a worker last said of itself."""
        found: dict[str, Any] = json.loads((self.run.workers / name / "status.json").read_bytes())
        return found

    def lines(self) -> list[str]:
        """Return what tools wrote, whole lines only."""
        if not self.log.exists():
            return []
        return self.log.read_text().rpartition("\n")[0].splitlines()

    def pid(self, role: str, index: int = 0) -> int | None:
        """Return a living process that plays ``role``; ``index`` picks among several."""
        pids = self.pids(role)
        return pids[index % len(pids)] if pids else None

    def pids(self, role: str) -> list[int]:
        """Return every living process that plays ``role``."""
        run = self.found()
        if run is None:
            return []
        match role:
            case "coordinator":
                locks = sorted(run.glob("coordinator*.lock"))
                return [pid for lock in locks if (pid := lock_holder(lock)) is not None]
            case "host":
                above = parents()
                coordinators = set(self.pids("coordinator"))
                mine = [pid for pid, parent in above.items() if parent in coordinators]
                return sorted(p for p in mine if "stoker.rollout.host" in command_line(p))
            case "worker":
                locks = sorted((run / "workers").glob("*/lock"))
                return [pid for lock in locks if (pid := lock_holder(lock)) is not None]
            case "owner":
                pid = owner_pid(run / "ledger")
                return [] if pid is None else [pid]
        raise AssertionError(f"no such role: {role}")

    def signal(self, role: str, number: signal.Signals, index: int = 0) -> int:
        """Signal a process of ``role`` as soon as there is one; return who was hit."""
        until(lambda: self.pid(role, index) or self.ended_early(), f"a living {role}")
        pid = self.pid(role, index)
        assert pid is not None, f"ended before its {role} was hit\n{self.said()}"
        send(pid, number)
        return pid

    def open_gate(self) -> None:
        """Let those go on who wait for ``gate``."""
        self.gate.touch()

    # --- letting go --------------------------------------------------------------------------

    def close(self) -> None:
        """End everything of this run, in order where it still listens."""
        for coordinator in self.spawned:
            send(coordinator.pid, signal.SIGCONT)
            coordinator.kill()
            coordinator.wait()
        for role in ("worker", "owner"):
            for pid in self.pids(role):
                send(pid, signal.SIGCONT)
                send(pid, signal.SIGTERM)
                if not wait_gone(pid, 30.0):
                    send(pid, signal.SIGKILL)
                    wait_gone(pid)
        for process in self.others:
            process.wait(BOUND)


@contextmanager
def rig(folder: Path, **parts: Any) -> Iterator[Rig]:
    """Give a rig that leaves nothing behind."""
    one = Rig(folder, **parts)
    try:
        yield one
    finally:
        one.close()


def _toml(above: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``table`` as TOML: plain values first, then its tables."""
    if above:
        yield f"[{'.'.join(above)}]\n"
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{key} = {_literal(value)}\n"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml((*above, key), value)


def _literal(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_literal(one) for one in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_literal(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)
