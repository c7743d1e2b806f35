"""Any order of requests, deliveries, copies, crashes and power cuts, against a one-page model.

A failing run prints the steps; ``@reproduce_failure`` or the printed seed repeats it.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from stoker.broker import lineup, recent, unseen
from stoker.broker.copying import mark
from stoker.broker.postgres import books as gateway_books
from stoker.broker.store import StorageConflict
from stoker.broker.store_sqlite import SqliteStore
from support.ledger import gateway_service
from support.ledger_machine import LIMITS, LedgerMachine
from support.postgres import (
    check_unfinished,
    copy_schema,
    drop_schema,
    fresh_schema,
    put_back,
    server,
)


class SqliteMachine(LedgerMachine):
    """One file; a power cut there is the crash floor's (here it ends the process only)."""

    def __init__(self) -> None:
        self.place = TemporaryDirectory(prefix="stoker-machine-")
        super().__init__()

    def open(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = SqliteStore(Path(self.place.name) / "ledger.db")
        super().open()

    def lose_power(self) -> bool:
        return False

    def copy(self) -> Path:
        path = Path(self.place.name) / f"copy-{self.lineages}-{self.clock.boot}.db"
        path.unlink(missing_ok=True)
        remaining, _ = self.store.copy_to(str(path), 10**6)
        assert not remaining
        return path

    def put_back(self, copy: Path) -> None:
        self.store.close()
        mark(copy)
        shutil.move(copy, Path(self.place.name) / "ledger.db")
        self.store = None

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.store.close()
            self.place.cleanup()


class PostgresMachine(LedgerMachine):
    """Two gateways that take turns, so that nothing may be left in either's memory."""

    power_cuts = False
    remembers = False

    def __init__(self) -> None:
        self.schema = fresh_schema()
        super().__init__()

    def open(self) -> None:
        if self.store is not None:
            self.end_gateways()
        self.gateways = [gateway_service(self.schema, LIMITS) for _ in range(2)]
        for gateway in self.gateways:
            gateway.open(self.clock.now(), boot_id="boot", lineage=f"lin_{self.lineages}")
        self.service = self.gateways[0]
        self.store = self.gateways[0].store

    def end_gateways(self) -> None:
        for gateway in self.gateways:
            gateway.close()

    def lose_power(self) -> bool:
        if self.power_cuts:
            self.end_gateways()
            server().stop("immediate")
            server().start()
        return self.power_cuts

    def copy(self) -> str:
        return copy_schema(server(), self.schema)

    def put_back(self, copy: str) -> None:
        self.end_gateways()
        put_back(server(), copy, self.schema)
        self.store = None

    def let_time_pass(self) -> None:
        for _ in self.gateways:  # one of them keeps time, and only in groups of its own
            self.events()

    def ask_together(self, *requests: Any) -> list[Any]:
        self.gateways.reverse()
        self.service = self.gateways[0]
        try:
            answer = super().ask_together(*requests)
        except StorageConflict:  # the other gateway has changed what this one knew
            self.service.rollback(self.clock.now())
            answer = super().ask_together(*requests)
        check_unfinished(server(), self.schema)
        return answer

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.end_gateways()
            drop_schema(server(), self.schema)


class PowerlessMachine(PostgresMachine):
    """The same, with real crashes of the database server."""

    power_cuts = True


def run(machine: type[LedgerMachine], examples: int, steps: int = 40) -> None:
    shrinks = not issubclass(machine, PostgresMachine)  # a server's answers take too long for it
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        phases=[one for one in settings().phases if shrinks or one is not Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    machine.TestCase("runTest").debug()


def test_promises_hold_under_any_order_of_requests_crashes_and_power_cuts() -> None:
    run(LedgerMachine, 150)


def test_promises_hold_when_hardly_anything_is_kept_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queues, events and rows come from memory while they fit: here next to nothing does."""
    monkeypatch.setattr(lineup, "KEPT_MAX", 2)
    monkeypatch.setattr(recent, "KEPT_MAX", 2)
    monkeypatch.setattr(unseen, "KEPT_MAX", 1)
    run(LedgerMachine, 50)


def test_promises_hold_on_sqlite_under_any_order_of_requests_and_crashes() -> None:
    run(SqliteMachine, 20)


def test_promises_hold_on_two_postgres_gateways_that_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every change is sent as soon as it is decided, as some of a large group's are."""
    monkeypatch.setattr(gateway_books, "STREAMED_ROWS", 1)
    run(PostgresMachine, 8, 25)


@pytest.mark.slow
def test_promises_hold_on_postgres_under_crashes_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_books, "STREAMED_ROWS", 1)
    run(PowerlessMachine, 40)
