"""A run whose tools Celery hands out, over a broker that drops, doubles, delays and forgets."""

import importlib.util
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.runs import Rig, command_line, parents, rig, send, until
from support.runs_records import read
from support.tickets import (
    EXAMPLES,
    MODEL,
    Parts,
    classes,
    lossy,
    nothing_lost_nothing_twice,
    tasks,
)

EXAMPLE = EXAMPLES / "tickets_celery"
SEED = 20_261_130

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("celery") is None,
    reason="no Celery; remedy: pip install -r requirements-dev.txt",
)


def play(folder: Path, count: int, hurt: Callable[[Rig, Parts], None]) -> None:
    """Carry a whole run through Celery, and look at what its tools wrote."""
    with rig(
        folder,
        program=(EXAMPLES / "tickets_nats" / "program.py").read_text(),
        model=MODEL,
        tasks=tasks(count, folder / "tools.log", "0.1"),
        settings=classes(),
    ) as one:
        one.start()
        where = {"STOKER_RUN_DIRECTORY": str(one.run.path), "PYTHONPATH": str(EXAMPLE)}
        parts = Parts(one, {**where, "TICKETS_FOLDER": str(folder / "broker")})
        try:
            publisher = [*lossy(folder, EXAMPLE, SEED), str(one.run.path)]
            parts.start("publisher", [*publisher, "--republish-seconds", "1"])
            celery = ["-m", "celery", "-A", "queue_celery", "worker", "--concurrency", "2"]
            parts.start("celery", [*celery, "--loglevel", "WARNING"])
            hurt(one, parts)
            one.finish()
        finally:
            parts.close()
        nothing_lost_nothing_twice(one, read(one.run.path), count)


def at_work(pid: int) -> set[int]:
    """Return the pool processes of Celery in whose boxes a tool sleeps.

    One that waits for work holds the lock of the pool's queue (``billiard.queues``): killed then,
    it stops the whole pool for good, whatever Stoker does.
    """
    above = parents()
    tools = [one for one in above if command_line(one).startswith("sleep ")]
    return {one for tool in tools for one in line_of(tool, above) if above.get(one) == pid}


def line_of(pid: int, above: dict[int, int]) -> Iterator[int]:
    """Yield a process and those it descends from."""
    while pid in above:
        yield pid
        pid = above[pid]


def test_a_celery_queue_that_drops_doubles_and_delays_loses_nothing(tmp_path: Path) -> None:
    play(tmp_path, 3, lambda _one, _parts: None)


@pytest.mark.slow
def test_nothing_is_lost_or_run_twice_whoever_of_a_celery_queue_is_killed(tmp_path: Path) -> None:
    count = 12
    whole = 3 * count

    def hurt(one: Rig, parts: Parts) -> None:
        for share in (4, 2):
            one.until_lines(whole // share)
            victim, *_ = until(lambda: at_work(parts.pid("celery")), "a pool process at work")
            send(victim, signal.SIGKILL)
        parts.again("publisher")
        one.signal("owner", signal.SIGKILL)

    play(tmp_path, count, hurt)
