"""Other queues beside ours in ``stoker bench ledger``: each in turn, in every round.

They live in an environment of their own (``make bench-peers``), whose Python runs one system a
call and prints one JSON line: ``python -m bench_peers NAME FOLDER``. Nothing of a peer runs while
something else is measured. One that is not installed, or breaks, leaves its figures out with a
note.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.cli.bench_machine import figure

QUEUES = ("taskiq", "dramatiq", "procrastinate")
"""Durable task queues: what was accepted survives a power cut by their own claim."""
ACTOR = "ray"
_TURN_SECONDS = 180.0

Say = Callable[[str], object]


class Turn(msgspec.Struct):
    """What a peer prints of one turn."""

    cycles: int = 0
    seconds: float = 0.0
    versions: str = ""
    settings: str = ""
    missing: str = ""
    """What is not installed; then there is nothing else."""


class Peers:
    """The peers of one environment, and what their rounds gave."""

    def __init__(self, environment: Path, say: Say) -> None:
        self._python = environment.absolute() / "bin" / "python"
        self._say = say
        self._turns: dict[str, list[Turn]] = {name: [] for name in (*QUEUES, ACTOR)}
        self._notes: dict[str, str] = {}
        if not self._python.exists():
            why = f"not installed in {environment}: make bench-peers"
            self._notes = dict.fromkeys(self._turns, why)

    def round(self) -> None:
        """Give every peer one turn; one that failed has no other."""
        for name, turns in self._turns.items():
            if name in self._notes:
                continue
            self._say(f"bench ledger: {name} …")
            turn = self._turn(name)
            if turn.missing or not turn.cycles:
                self._notes[name] = turn.missing or f"{name} passed nothing through"
            turns.append(turn)

    def figures(self, ours: Sequence[float]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return figures and notes; ``ours`` are our rates, one a round."""
        rates = {
            name: [turn.cycles / turn.seconds for turn in turns]
            for name, turns in self._turns.items()
            if name not in self._notes
        }
        figures = {
            f"{name}_cycles_per_second": figure(values, "1/s", None, self._against(name))
            for name, values in rates.items()
        }
        notes = {f"{name}_cycles_per_second": why for name, why in self._notes.items()}
        if absent := [name for name in QUEUES if name not in rates]:
            notes["cycles_vs_durable_queue"] = self._notes[absent[0]]
        else:
            best = max(QUEUES, key=lambda name: statistics.median(rates[name]))
            ratios = [a / b for a, b in zip(ours, rates[best], strict=True)]
            figures["cycles_vs_durable_queue"] = figure(ratios, "ratio", 8.0, best)
        if ACTOR in rates:
            ratios = [a / b for a, b in zip(ours, rates[ACTOR], strict=True)]
            figures["cycles_vs_ray_actor"] = figure(ratios, "ratio", 2.0, ACTOR)
        else:
            notes["cycles_vs_ray_actor"] = self._notes[ACTOR]
        return figures, notes

    def _against(self, name: str) -> str:
        turn = self._turns[name][-1]
        return f"{turn.versions}: {turn.settings}"

    def _turn(self, name: str) -> Turn:
        with tempfile.TemporaryDirectory(prefix="stoker-peer-", ignore_cleanup_errors=True) as kept:
            folder = Path(kept)
            folder.chmod(0o711)  # PostgreSQL's own user must get to its cluster
            with (folder / "said").open("wb") as complaints:
                process = subprocess.Popen(  # noqa: S603 - the environment the user named
                    [self._python, "-m", "bench_peers", name, str(folder)],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints,
                    start_new_session=True,
                )  # fmt: skip
            try:
                answer, _ = process.communicate(timeout=_TURN_SECONDS)
                return msgspec.json.decode(answer.splitlines()[-1], type=Turn)
            except (subprocess.TimeoutExpired, msgspec.DecodeError, IndexError):
                said = (folder / "said").read_text("utf-8", "replace").strip().splitlines()
                return Turn(missing=f"{name} broke: {said[-1] if said else 'without a word'}")
            finally:  # its servers and workers are of its session
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
