"""The systems under the fault script: how each is started, given a job, asked and cancelled."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec
from servers import Postgres, Redis, Server

from stoker.broker.base import (
    ActionsRequest,
    Append,
    AppendBatch,
    Attach,
    Cancel,
    LedgerLimits,
)
from stoker.broker.client import LedgerClient, connect, owner_pid
from stoker.model.action import Action, Effect
from stoker.model.ids import ActionId, CallPath, Fence, RolloutId, RunId
from stoker.model.tools import CallRequest
from stoker.model.value import canonical_bytes, inline_value
from stoker.sandbox.host import SandboxHost

APPS = Path(__file__).parent / "apps"
LEASE_SECONDS = 5.0
SLOTS = 2
RUN = RunId("run_faults")
T = TypeVar("T")


class System:
    """One system: its servers, its workers, and a client of it."""

    name = ""
    settings = ""
    packages: ClassVar[tuple[str, ...]] = ()
    settle_seconds = 6 * LEASE_SECONDS
    """How long it is given to put things right."""

    def __init__(self, folder: Path, peers: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.python = peers / "bin" / "python"
        self.log = folder / "jobs.log"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "BENCH_LOG": str(self.log),
            "BENCH_LEASE": str(LEASE_SECONDS),
            "PYTHONPATH": str(APPS),
        }

    def begin(self) -> None:
        """Start what workers and clients need."""

    def worker_command(self, number: int) -> list[str]:
        """Return how worker ``number`` is started."""
        raise NotImplementedError

    def submit(self, kind: str, keys: list[str]) -> list[str]:
        """Hand in jobs at once; return the system's own ids of them."""
        raise NotImplementedError

    def cancel(self, jobs: list[str]) -> bool:
        """Cancel jobs; ``False`` where there is no such thing."""
        raise NotImplementedError

    def state(self, job: str) -> str:
        """Return waiting, done, failed, cancelled or unknown."""
        raise NotImplementedError

    def restart_broker(self) -> None:
        """Kill the broker and start it again."""
        raise NotImplementedError

    def start_worker(self) -> None:
        """Start one more worker."""
        command = self.worker_command(len(self.workers))
        with (self.folder / f"worker{len(self.workers)}.log").open("ab") as log:
            self.workers.append(
                subprocess.Popen(
                    command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, start_new_session=True,
                )
            )  # fmt: skip

    def signal_worker(self, number: signal.Signals) -> None:
        """Signal the first worker and everything it started."""
        for pid in family(self.workers[0].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """End everything."""
        for worker in self.workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()

    def versions(self) -> str:
        """Return the versions of what was tried."""
        show = "print(*(f'{p} {m.version(p)}' for p in sys.argv[1:]), sep=', ')"
        return self._run(["-c", f"import sys, importlib.metadata as m; {show}", *self.packages])

    def _run(self, words: list[str]) -> str:
        done = subprocess.run(
            [str(self.python), *words], cwd=self.folder, env=self.environment,
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(words)}\n{done.stderr[-1500:]}")
        return done.stdout.strip()


def family(root: int) -> list[int]:
    """Return a process and everything below it, also what made a session of its own."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(") ")[2].split()
            parents[int(entry.name)] = int(fields[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


class Peer(System):
    """A system driven by its file in ``apps``."""

    app = ""
    server_class: type[Server] = Redis
    cancels = True

    def begin(self) -> None:
        """Start its server."""
        site = next((self.python.parent.parent / "lib").glob("python3*/site-packages"))
        self.server = self.server_class(self.folder, site)
        self.server.start()
        self.environment |= {
            "BENCH_REDIS": self.server.address,  # type: ignore[attr-defined]
            "BENCH_POSTGRES": self.server.address,  # type: ignore[attr-defined]
        }

    def _app(self, *words: str) -> str:
        return self._run([str(APPS / f"{self.app}_app.py"), *words])

    def submit(self, kind: str, keys: list[str]) -> list[str]:
        """Hand in jobs."""
        return self._app("submit", kind, *keys).split()

    def cancel(self, jobs: list[str]) -> bool:
        """Cancel jobs."""
        if self.cancels:
            self._app("cancel", *jobs)
        return self.cancels

    def state(self, job: str) -> str:
        """Ask for a job's state."""
        return self._app("state", job)

    def restart_broker(self) -> None:
        """Kill the server and start it again over what it stored."""
        self.server.kill()
        self.server.start()

    def end(self) -> None:
        """End workers and server."""
        super().end()
        self.server.kill()


class Celery(Peer):
    """Celery, prefork."""

    name = "Celery"
    app = "celery"
    packages = ("celery", "kombu", "redis")
    settle_seconds = 130.0  # it looks for lost messages once in 100 s
    settings = "acks_late, reject_on_worker_lost, prefetch 1, visibility_timeout 15 s; prefork 2"

    def worker_command(self, number: int) -> list[str]:
        """Return how a worker is started."""
        return [
            str(self.python), "-m", "celery", "-A", "celery_app", "worker", "-c", str(SLOTS),
            "-n", f"w{number}@localhost", "-l", "WARNING",
        ]  # fmt: skip


class Dramatiq(Peer):
    """Dramatiq."""

    name = "Dramatiq"
    app = "dramatiq"
    packages = ("dramatiq", "redis")
    settings = (
        "heartbeat_timeout 5 s, maintenance at every look, max_retries 3; 1 process, 2 threads"
    )
    cancels = False

    def worker_command(self, number: int) -> list[str]:
        """Return how a worker is started."""
        del number
        return [
            str(self.python), "-m", "dramatiq", "dramatiq_app", "--processes", "1",
            "--threads", str(SLOTS),
        ]  # fmt: skip


class Rq(Peer):
    """RQ, one work horse a worker."""

    name = "RQ"
    app = "rq"
    packages = ("rq", "redis")
    settings = "Retry(max=3), job monitoring and maintenance every 2 s; worker pool of 2"

    def worker_command(self, number: int) -> list[str]:
        """Return how a worker is started."""
        del number
        code = (
            "import rq_app; from rq.worker_pool import WorkerPool; from rq import Queue, Worker;"
            "Worker.maintenance_interval = 2;"
            "WorkerPool([Queue('faults', connection=rq_app.connection)],"
            f" connection=rq_app.connection, num_workers={SLOTS}).start()"
        )
        return [str(self.python), "-c", code]


class Taskiq(Peer):
    """taskiq over Redis Streams."""

    name = "taskiq"
    app = "taskiq"
    packages = ("taskiq", "taskiq-redis", "redis")
    settle_seconds = 130.0
    settings = "RedisStreamBroker idle_timeout 5 s, ack when executed; 1 process, 2 threads"
    cancels = False

    def worker_command(self, number: int) -> list[str]:
        """Return how a worker is started."""
        del number
        return [
            str(self.python), "-m", "taskiq", "worker", "taskiq_app:broker", "--workers", "1",
            "--max-threadpool-threads", str(SLOTS), "--ack-type", "when_executed",
        ]  # fmt: skip


class Procrastinate(Peer):
    """Procrastinate."""

    name = "Procrastinate"
    app = "procrastinate"
    packages = ("procrastinate",)
    server_class = Postgres
    settings = "retry 3, its guide's periodic retry of stalled jobs after 5 s; concurrency 2"

    def begin(self) -> None:
        """Start the server and make the tables."""
        super().begin()
        self._app("schema")

    def worker_command(self, number: int) -> list[str]:
        """Return how a worker is started."""
        del number
        code = (
            "from procrastinate_app import app; app.run_worker("
            f"concurrency={SLOTS + 1}, update_heartbeat_interval=1.0,"
            f" stalled_worker_timeout={LEASE_SECONDS}, abort_job_polling_interval=1.0)"
        )
        return [str(self.python), "-c", code]


class Dbos(Peer):
    """DBOS, a queue of workflows of one step."""

    name = "DBOS"
    app = "dbos"
    packages = ("dbos",)
    server_class = Postgres
    settings = "queue with worker_concurrency 2, polled every 0.2 s, max_recovery_attempts 3"

    def begin(self) -> None:
        """Start the server and make the tables."""
        super().begin()
        self._app("migrate")

    def worker_command(self, number: int) -> list[str]:
        """Return how a worker is started."""
        del number
        return [str(self.python), str(APPS / "dbos_app.py"), "serve"]


class Stoker(System):
    """Ours: a ledger and workers, jobs as stateless tools in process boxes."""

    effect = Effect.EXTERNAL
    settings = "power-safe, lease 5 s, 2 slots, 3 attempts"

    def begin(self) -> None:
        """Write the settings; the owner starts with the first question."""
        self.python = Path(sys.executable)
        self._run_folder = self.folder / "run"
        self._run_folder.mkdir()
        self._settings = self._run_folder / "settings.json"
        fast = {"isolation": "process", "trust": "trusted", "slots": SLOTS}
        self._settings.write_bytes(
            msgspec.json.encode(
                {
                    "ledger": {"lease": LEASE_SECONDS},
                    "workers": {"classes": {"fast": fast}, "idle_exit": 3600.0},
                }
            )
        )
        self._ask(lambda ledger, _: ledger.capabilities())

    def worker_command(self, number: int) -> list[str]:
        """Return how a worker is started."""
        return [
            sys.executable, "-m", "stoker.worker.main", "--run-directory", str(self._run_folder),
            "--settings", str(self._settings), "--name", f"w{number}",
        ]  # fmt: skip

    def submit(self, kind: str, keys: list[str]) -> list[str]:
        """Submit actions, each the only one of its rollout."""
        given = [f"{name}={self.environment[name]}" for name in ("BENCH_LOG", "BENCH_LEASE")]
        command = ("env", *given, sys.executable, str(APPS / "jobs.py"), kind)
        appends = tuple(self._append(key, (*command, key)) for key in keys)
        self._ask(
            lambda ledger, fence: ledger.append(
                AppendBatch(run_id=RUN, fence=fence, appends=appends)
            )
        )
        return [str(one.submits[0].action_id) for one in appends]

    def _append(self, key: str, argv: tuple[str, ...]) -> Append:
        rollout = RolloutId(f"rol_{key}")
        action = Action(
            action_id=ActionId(f"act_{key}"), run_id=RUN, rollout_id=rollout, path=CallPath("0"),
            step=0, worker_class="fast", tool="call", effect=self.effect,
            input=inline_value(canonical_bytes(CallRequest(argv=argv))),
            timeout_seconds=120.0, deadline_seconds=600.0,
        )  # fmt: skip
        return Append(rollout_id=rollout, expected_seq=0, events=(b"job",), submits=(action,))

    def cancel(self, jobs: list[str]) -> bool:
        """Cancel actions."""
        ids = tuple(map(ActionId, jobs))
        self._ask(
            lambda ledger, fence: ledger.cancel(
                Cancel(run_id=RUN, fence=fence, action_ids=ids, reason="bench")
            )
        )
        return True

    def state(self, job: str) -> str:
        """Look at an action."""
        asked = ActionsRequest(action_ids=(ActionId(job),))
        [view] = self._ask(lambda ledger, _: ledger.actions(asked)).actions
        if view.completion is None:
            return "waiting"
        states = {"ok": "done", "cancelled": "cancelled"}
        return states.get(view.completion.status.value, "failed")

    def restart_broker(self) -> None:
        """Kill the ledger's owner; whoever needs it starts another."""
        pid = owner_pid(self._run_folder / "ledger")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End workers and owner; remove what the killed workers left, as their next would."""
        super().end()
        pid = owner_pid(self._run_folder / "ledger")
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
        asyncio.run(self._sweep())

    async def _sweep(self) -> None:
        for boxes in [*self._run_folder.glob("workers/*/boxes")]:
            async with SandboxHost.open(boxes) as host:
                await host.sweep()

    def versions(self) -> str:
        """Return our own version."""
        return f"stoker {metadata.version('stoker')}"

    def _ask(self, question: Callable[[LedgerClient, Fence], Awaitable[T]]) -> T:
        async def asked() -> T:
            ledger = await connect(
                self._run_folder / "ledger",
                role="coordinator",
                limits=LedgerLimits(lease_seconds=LEASE_SECONDS, grace_seconds=LEASE_SECONDS),
            )
            try:
                attach = Attach(run_id=RUN, incarnation="bench")
                return await question(ledger, (await ledger.attach(attach)).fence)
            finally:
                await ledger.close()

        return asyncio.run(asked())


class StokerExternal(Stoker):
    """Effects nobody may repeat."""

    name = "Stoker, external"


class StokerIdempotent(Stoker):
    """Effects that a key makes one."""

    name = "Stoker, idempotent"
    effect = Effect.IDEMPOTENT


SYSTEMS: dict[str, type[System]] = {
    "stoker-external": StokerExternal,
    "stoker-idempotent": StokerIdempotent,
    "celery": Celery,
    "dramatiq": Dramatiq,
    "rq": Rq,
    "taskiq": Taskiq,
    "procrastinate": Procrastinate,
    "dbos": Dbos,
}
