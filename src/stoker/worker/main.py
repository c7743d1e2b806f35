"""The worker process: ``python -m stoker.worker.main``, one per name and run.

Order at the start: lock the name → find a backend for every class → sweep what dead incarnations
left (A20) → enrol → lease. What makes serving impossible is written to ``failed.json`` and ends the
process with status 2. The first SIGTERM (or SIGINT) drains, the second kills the boxes.

Whoever starts it puts it into a session of its own; it never daemonises itself.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from pydantic import ValidationError
from structlog.typing import FilteringBoundLogger

from stoker.config.tree import Settings
from stoker.errors import EXIT_BAD_INPUT, BadInput, ConfigInvalid, StokerError
from stoker.model.faults import FaultRecord, FaultSide

from .home import WorkerHome
from .log import open_log
from .process import allow_descriptors, arm_faults
from .service import Service

_SWITCH_SECONDS = 0.0005
"""How long a thread that tears a box down may keep the loop from running; Python's own 5 ms is as
long as a whole step."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to end; return the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        settings = _settings(arguments.settings)
        home = WorkerHome(arguments.run_directory.resolve(), arguments.name)
    except BadInput as error:
        sys.stderr.write(f"stoker worker: {error.message}\n")
        return EXIT_BAD_INPUT
    log = open_log(
        home.run_directory / "logs" / f"worker-{home.name}.log",
        level=settings.observe.log_level,
        worker=home.name,
    )
    sys.setswitchinterval(_SWITCH_SECONDS)
    arm_faults()
    allow_descriptors()
    try:
        asyncio.run(_serve(home, settings, arguments.metrics_port, log))
    except StokerError as error:
        _failed(home, log, error.record())
        return EXIT_BAD_INPUT if isinstance(error, BadInput) else 1
    finally:
        home.close()
    return 0


async def _serve(
    home: WorkerHome, settings: Settings, metrics_port: int | None, log: FilteringBoundLogger
) -> None:
    async with AsyncExitStack() as stack:
        service = Service(home, settings, log)
        _listen(service, log)
        await service.open(stack, metrics_port)
        await service.run()
    log.info("worker_ended")


def _listen(service: Service, log: FilteringBoundLogger) -> None:
    """First signal: drain. Second: kill."""
    loop = asyncio.get_running_loop()
    received = 0

    def on_signal() -> None:
        nonlocal received
        received += 1
        log.info("signal", count=received)
        service.end(at_once=received > 1)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


def _failed(home: WorkerHome, log: FilteringBoundLogger, fault: FaultRecord) -> None:
    """Tell why; ``failed.json`` only where starting again cannot help."""
    log.error("worker_failed", code=fault.code, error=fault.message)
    if fault.side is FaultSide.CALLER:
        with suppress(OSError):  # a full disk: the log and the exit status still tell
            home.write_failed(fault)
    sys.stderr.write(f"stoker worker {home.name}: {fault.message}\n")


def _settings(path: Path) -> Settings:
    try:
        return Settings.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigInvalid(f"the settings {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigInvalid(f"the settings {path} cannot be used: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stoker.worker.main", description="One worker process.")
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--settings", type=Path, required=True, help="JSON of the settings tree")
    parser.add_argument("--name", required=True, help="stable name of this worker in the run")
    parser.add_argument("--metrics-port", type=int, help="Prometheus on loopback; 0: any free port")
    return parser


if __name__ == "__main__":
    sys.exit(main())
