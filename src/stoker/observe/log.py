"""Log lines: JSON, one object a line, each with an event name from the catalogue.

A log is a file of its own, appended line by line; nothing is written to the terminal. Everything
in a line is escaped ASCII, so reading a log never moves a cursor. One line is canonical per
rollout (``rollout_finished``): it alone answers how the rollout went.
"""

import contextlib
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import WrappedLogger

from stoker.model.ids import RolloutId, RunId
from stoker.model.outcome import Outcome
from stoker.observe.catalogue import LOG_EVENTS, ROLLOUT_FINISHED
from stoker.seams.clock import Clock, SystemClock
from stoker.seams.faultpoints import declare, reach

LOG_WRITE = declare("coordinator.log.write", "a line of a run's log is written", "disk_full")

LEVELS = ("debug", "info", "warning", "error")


class RolloutLine(msgspec.Struct, frozen=True, kw_only=True):
    """How one rollout went; the keys of its canonical line, all always present."""

    run: RunId
    rollout: RolloutId
    group: str
    index: int
    task: str
    outcome: Outcome
    steps: int
    actions: int
    attempts: int
    """Executions, retries included."""
    retries: int
    model_calls: int
    tokens: int
    """Sampled."""
    policy_versions: tuple[int, ...]
    """Of all its tokens, sorted."""
    faults: dict[str, int]
    """By code, recovered ones included."""
    seconds: float
    """Admitted to outcome, on the coordinator's clock, resumptions included."""
    queue_seconds: float
    """Its actions' waits for a worker, summed."""
    run_seconds: float
    """Its actions' work, summed."""
    resumed: int = 0
    """How often it was replayed after a crash."""

    def fields(self) -> dict[str, object]:
        """Return the keys and values of the line."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        fault = self.outcome.fault
        return fields | {
            "outcome": str(self.outcome.kind),
            "reward": self.outcome.reward,
            "reason": self.outcome.reason,
            "fault": fault.code if fault else None,
            "policy_versions": list(self.policy_versions),
        }

    def brief(self) -> str:
        """Return one line for people; the caller cleans it for a terminal."""
        fault = self.outcome.fault
        why = self.outcome.reason or (fault.code if fault else "")
        reward = "" if self.outcome.reward is None else f" {self.outcome.reward:g}"
        ending = f"{self.outcome.kind}{reward}{f' ({why})' if why else ''}"
        counts = f"{_count(self.steps, 'step')}, {_count(self.actions, 'action')}"
        retried = f", {_count(self.retries, 'retry', 'retries')}" if self.retries else ""
        return f"{self.task} · {ending} · {counts}{retried} · {self.seconds:.1f} s"


class Log:
    """One open log file."""

    def __init__(self, file: TextIO, level: str, clock: Clock | None = None) -> None:
        self._file = file
        self._clock = clock or SystemClock()
        self.dropped = 0
        """Lines that could not be written."""
        self._least = LEVELS.index(level)
        self._logger = structlog.wrap_logger(
            structlog.WriteLogger(file),
            processors=[
                structlog.processors.add_log_level,
                self._stamp,
                structlog.processors.JSONRenderer(ensure_ascii=True, default=str),
            ],
            wrapper_class=structlog.BoundLogger,
            cache_logger_on_first_use=True,
        )

    def event(self, name: str, *, level: str = "info", **fields: object) -> None:
        """Write one line. A name outside the catalogue is a bug of ours."""
        assert name in LOG_EVENTS, f"{name} is not in the catalogue of log events"
        if LEVELS.index(level) >= self._least:
            self._write(name, level, fields)

    def rollout(self, line: RolloutLine) -> None:
        """Write the canonical line of one rollout, whatever the level."""
        self._write(ROLLOUT_FINISHED, "info", line.fields())

    def _write(self, name: str, level: str, fields: Mapping[str, object]) -> None:
        if self._file.closed:
            self.dropped += 1
            return
        try:
            reach(LOG_WRITE)
            getattr(self._logger, level)(name, **fields)
        except OSError:  # a full disk must not end the run for the sake of a log line
            self.dropped += 1

    def _stamp(
        self, _logger: WrappedLogger, _method: str, line: MutableMapping[str, Any]
    ) -> Mapping[str, Any]:
        at = datetime.fromtimestamp(self._clock.now().wall, UTC)
        return {**line, "at": at.isoformat(timespec="microseconds").replace("+00:00", "Z")}

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        with contextlib.suppress(OSError):
            self._file.close()


def open_log(path: Path, *, level: str = "info") -> Log:
    """Open the log at ``path`` for appending; its directory is made. Lines are flushed at once.

    Raises:
        OSError: the file cannot be opened.
    """
    assert level in LEVELS, f"{level} is no level"
    path.parent.mkdir(parents=True, exist_ok=True)
    return Log(path.open("a", encoding="ascii", buffering=1), level)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
