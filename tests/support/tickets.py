"""Other people's queues for tests: a NATS server to kill, and examples' processes to hurt."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from stoker.model.action import ActionState
from stoker.model.events import Verb
from stoker.model.ids import action_id
from stoker.rollout.arguments import decode_arguments
from support.runs import BOUND, Rig, send, until
from support.runs_records import Records
from support.source import ROOT

EXAMPLES = ROOT / "examples"
CALLS = 3
"""Of each rollout of the examples' program."""

MODEL = """
def answer(request):
    return "go"
"""

LOSSY = """
import asyncio, random, runpy, sys

sys.path.insert(0, {example!r})
from stoker.tickets import Publisher

dice, real, later = random.Random({seed}), Publisher.run, set()


async def run(self, publish):
    async def lossy(ticket):
        "Drop three in ten, double two, delay two past others; the publisher is told all is well."
        face = dice.random()
        if 0.3 <= face < 0.8:
            await publish(ticket)
        if 0.3 <= face < 0.5:
            await publish(ticket)
        if face >= 0.8:
            later.add(asyncio.create_task(delayed(ticket)))

    async def delayed(ticket):
        await asyncio.sleep(dice.random())
        try:
            await publish(ticket)
        except Exception:
            pass  # lost on the way

    await real(self, lossy)


Publisher.run = run
sys.argv = ["publisher.py", *sys.argv[1:]]
runpy.run_path({example!r} + "/publisher.py", run_name="__main__")
"""
"""The examples' publisher before a queue that loses, doubles and reorders."""


def lossy(folder: Path, example: Path, seed: int) -> list[str]:
    """Return the command of ``example``'s publisher with a bad queue behind it."""
    script = folder / "lossy.py"
    script.write_text(LOSSY.format(example=str(example), seed=seed))
    return [str(script)]


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Nats:
    """A JetStream server on loopback that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "nats"
        self._port = free_port()
        self.address = f"nats://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def program() -> str | None:
        """Where the server is, if it is installed."""
        beside = Path(sys.executable).with_name("nats-server")
        return str(beside) if beside.exists() else shutil.which("nats-server")

    def start(self) -> None:
        """Start it and wait until it listens."""
        program = self.program()
        assert program is not None
        store = self._folder / "store"
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, "-js", "-a", "127.0.0.1", "-p", str(self._port), "-sd", str(store)],
                stdout=log,
                stderr=log,
            )
        until(self._listens, "a NATS server that listens")

    def kill(self, *, wipe: bool) -> None:
        """Kill it as a power cut would, perhaps with everything it had stored."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(BOUND)
        if wipe:
            shutil.rmtree(self._folder / "store", ignore_errors=True)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0


class Parts:
    """Publisher and consumers of one run, each a process to be killed and started again."""

    def __init__(self, one: Rig, environment: dict[str, str] | None = None) -> None:
        self._rig = one
        self._environment = {**os.environ, **(environment or {})}
        self._commands: dict[str, list[str]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[str]) -> None:
        """Start a part; it is started the same way again."""
        self._commands[name] = command
        with (self._rig.folder / f"{name}.err").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, *command],
                cwd=self._rig.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill a part without a word."""
        process = self._processes[name]
        assert process.poll() is None, f"{name} had ended\n{self._rig.said()}"
        process.kill()
        process.wait(BOUND)

    def again(self, name: str) -> None:
        """Kill a part and start another in its place."""
        self.kill(name)
        self.start(name, self._commands[name])

    def pid(self, name: str) -> int:
        """Return the process of a part."""
        return self._processes[name].pid

    def close(self) -> None:
        """End every part: in order where it listens."""
        for process in self._processes.values():
            send(process.pid, signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(BOUND)


def classes() -> dict[str, Any]:
    """Return the settings of the class that goes by ticket."""
    tools = {"by_ticket": True, "isolation": "process", "trust": "trusted", "slots": 2}
    return {"workers": {"classes": {"tools": {**tools, "attempts": 20}}}}


def tasks(count: int, log: Path, pause: str) -> list[dict[str, Any]]:
    """Return tasks of the examples' program."""
    data = {"log": str(log), "pause": pause}
    return [{"task_id": f"t{number:02}", "data": data} for number in range(count)]


def nothing_lost_nothing_twice(one: Rig, records: Records, count: int) -> None:
    """Hold a finished run to what its tools wrote: every line is one execution."""
    assert records.outcomes == Counter(completed=count), records.outcomes
    runs = Counter(line.split()[0] for line in one.lines())
    for rollout in records.rollouts.values():
        seen = rollout.seen(records.store)
        calls = [issued for issued in rollout.standing.issued.values() if issued.verb is Verb.CALL]
        assert len(calls) == len(rollout.actions) == CALLS, rollout.place
        for call in calls:
            arguments, _ = decode_arguments(Verb.CALL, records.store.get(call.arguments))
            effect = arguments.effect.value
            key = action_id(rollout.rollout_id, call.path)
            view = rollout.actions[key]
            assert view.state is ActionState.ACKNOWLEDGED, key
            code = seen[call.path][2]
            assert code in ("", "effect_ambiguous"), (key, code)
            assert code == "" or effect == "external", "only an external effect may be unknown"
            assert runs[key] >= (code == ""), f"{key} was lost"
            most = 1 if effect == "external" else view.deliveries
            assert runs[key] <= most, f"{key} ran {runs[key]} times in {most} deliveries"
