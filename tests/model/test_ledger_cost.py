"""What a cycle may ask of SQLite: counts, not times, so that they hold on any machine."""

from pathlib import Path

import apsw

from stoker.broker.store_sqlite import SqliteStore
from support.ledger import Harness, act, action, with_ledger

CYCLES = 3


def test_no_statement_of_a_cycle_is_planned_again(tmp_path: Path) -> None:
    """SQLite may plan a join anew for each binding, which costs more than the look-up itself."""
    planned: list[tuple[object, ...]] = []

    def plan(*step: object) -> int:
        planned.append(step)
        return apsw.SQLITE_OK

    async def scenario(ledger: Harness) -> None:
        assert isinstance(ledger.store, SqliteStore)
        ledger.store._db.authorizer = plan  # asked for every table and column of a plan
        for number in range(CYCLES):
            await _cycle(ledger, number)
            assert bool(planned) is (number == 0), planned
            planned.clear()

    with_ledger("sqlite", tmp_path, scenario)


async def _cycle(ledger: Harness, number: int) -> None:
    await ledger.submit(action(number))
    (lease,) = await ledger.lease()
    await ledger.start(lease)
    await ledger.heartbeat(lease)
    await ledger.complete(lease)
    assert list(await ledger.completed()) == [act(number)]
    await ledger.acknowledge(act(number))
