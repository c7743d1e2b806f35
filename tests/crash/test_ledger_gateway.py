"""Gateways and their database, really killed: nothing lost, nothing twice, whoever goes away."""

import asyncio
import os
import select
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from stoker.broker.base import (
    CompleteDisposition,
    Durability,
    JournalRequest,
    LeaseRequest,
    LedgerLimits,
)
from stoker.broker.client import LedgerClient, connect, owner_pid
from stoker.broker.place import DATABASE_ADDRESS, LOG
from stoker.broker.postgres import session
from stoker.broker.postgres.bell import Bell
from stoker.broker.postgres.connection import connect as connect_server
from stoker.broker.spawn import Database, OwnerSettings, spawn_owner
from stoker.config.secret import Secret
from stoker.errors import ConfigInvalid
from stoker.model.action import Effect
from stoker.model.completion import CompletionStatus
from stoker.model.ids import ActionId, Fence
from stoker.seams.faultpoints import POINTS
from support.ledger import BOUND_SECONDS, ROLLOUT, RUN, WORKER, Harness, act, action
from support.postgres import Server, drop_schema, fresh_schema, server

assert session  # importing it declares a gateway's fault points

GATEWAY_POINTS = sorted(name for name in POINTS if name.startswith("gateway."))
CYCLES = 6
Cycle = Callable[[int], None]


@pytest.fixture
def database() -> Iterator[Database]:
    """A fresh ledger on a server that waits for its disk."""
    found = Database(server("on").url(), fresh_schema())
    yield found
    drop_schema(server("on"), found.schema)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two gateways' directories; what still lives there is ended afterwards."""
    both = tmp_path / "a", tmp_path / "b"
    for place in both:
        place.mkdir()
    yield both
    for place in both:
        if (pid := owner_pid(place)) is not None:
            os.kill(pid, signal.SIGKILL)


def start(place: Path, database: Database, fault: str = "") -> int:
    """Start a gateway, armed, and return its process id once it has the directory's lock."""
    environ = {**os.environ, "STOKER_FAULT": fault}
    settings = OwnerSettings(idle_exit_seconds=30.0, database=database)
    spawn_owner(place, settings, environ)
    for _ in range(int(BOUND_SECONDS / 0.02)):
        if (pid := owner_pid(place)) is not None:
            return pid
        select.select([], [], [], 0.02)
    raise AssertionError((place / LOG).read_text())


async def harness_of(places: Path | tuple[Path, ...], database: Database) -> Harness:
    """Return a client, as a test makes moves with it; it starts gateways by itself."""
    directory = places if isinstance(places, Path) else places[0]
    harness = Harness("gateway", directory, LedgerLimits())
    harness.ledger = await connect(
        places, role="test", limits=harness.limits, idle_exit_seconds=5.0, elsewhere=database
    )
    return harness


class Promises:
    """What the client was told."""

    def __init__(self) -> None:
        self.done: list[ActionId] = []
        self.fences: list[Fence] = []


async def cycles(h: Harness, promises: Promises, between: Cycle = lambda _: None) -> None:
    for number in range(CYCLES):
        [disposition] = await h.submit(action(number, effect=Effect.EXTERNAL))
        assert disposition in ("accepted", "duplicate")
        [lease] = await h.lease(slots=1)
        promises.fences.append(lease.fence)
        await h.start(lease)
        await asyncio.to_thread(between, number)
        [said] = await h.complete(lease)
        assert said in (CompleteDisposition.OK, CompleteDisposition.ALREADY)
        promises.done.append(act(number))


async def check(h: Harness, promises: Promises) -> None:
    """Compare the ledger with what was promised: nothing lost, nothing twice (I1, I2, I3)."""
    results = await h.completed()
    assert sorted(results) == sorted(promises.done)
    assert len(results) == CYCLES
    assert {r.status for r in results.values()} == {CompletionStatus.OK}
    journal = await h.ledger.journal(JournalRequest(run_id=RUN, rollout_id=ROLLOUT))
    assert len(journal.events) == CYCLES
    assert promises.fences == sorted(set(promises.fences)), "fences never come back"
    assert await h.lease() == [], "nothing is run twice"
    assert (await h.ledger.stats()).attempts_total == CYCLES


def talk(
    places: Path | tuple[Path, ...],
    database: Database,
    scenario: Callable[[Harness], Awaitable[None]],
) -> None:
    async def whole() -> None:
        harness = await harness_of(places, database)
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                await harness.attach()
                await harness.enroll()
                await scenario(harness)
        finally:
            await harness.ledger.close()

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("point", "nth"),
    [(point, nth) for point in (*GATEWAY_POINTS, "ledger.reply.before") for nth in (3, 8)],
)
def test_a_gateway_killed_at_every_point_keeps_what_it_promised(
    places: tuple[Path, Path], database: Database, point: str, nth: int
) -> None:
    first = start(places[0], database, f"{point}=kill@{nth}")
    promises = Promises()

    async def scenario(h: Harness) -> None:
        await cycles(h, promises)
        await check(h, promises)

    talk(places[0], database, scenario)
    assert owner_pid(places[0]) != first, f"{point} was never reached"


def test_clients_go_on_with_another_gateway_when_theirs_is_killed(
    places: tuple[Path, Path], database: Database
) -> None:
    first, second = start(places[0], database), start(places[1], database)
    promises = Promises()

    def kill_the_first(number: int) -> None:
        if number == 2:
            os.kill(first, signal.SIGKILL)

    async def scenario(h: Harness) -> None:
        # This client starts nothing: it must go to the gateway that lives.
        client = await connect(places, role="test", spawn=False)
        await h.ledger.close()
        h.ledger = client
        await cycles(h, promises, kill_the_first)
        await check(h, promises)

    talk(places, database, scenario)
    assert owner_pid(places[1]) == second


@pytest.mark.parametrize("mode", ["immediate", "fast"])
def test_a_restart_of_the_database_in_mid_run_loses_nothing(
    places: tuple[Path, Path], database: Database, mode: str
) -> None:
    gateway = start(places[0], database)
    promises = Promises()

    def restart(number: int) -> None:
        if number in (1, 4):
            server("on").stop(mode)
            server("on").start()

    async def scenario(h: Harness) -> None:
        await cycles(h, promises, restart)
        await check(h, promises)

    talk(places[0], database, scenario)
    assert owner_pid(places[0]) == gateway, "a gateway outlives its database"


def test_a_gateway_whose_database_stays_away_ends_by_itself(places: tuple[Path, Path]) -> None:
    gone = Server("fsync=on")
    gone.create()
    gone.start()
    database = Database(gone.url(), "stoker")

    async def whole() -> None:
        client = await connect(places[0], role="test", idle_exit_seconds=3.0, elsewhere=database)
        pid = owner_pid(places[0])
        assert pid is not None, "it lives while somebody is connected"
        descriptor = os.pidfd_open(pid)
        await asyncio.to_thread(gone.remove)
        await client.close()
        ready, _, _ = await asyncio.to_thread(select.select, [descriptor], [], [], BOUND_SECONDS)
        os.close(descriptor)
        assert ready, "it waits for its database for ever"
        assert "waiting for the database" in (places[0] / LOG).read_text()

    asyncio.run(whole())


def test_what_one_gateway_takes_another_hands_out(
    places: tuple[Path, Path], database: Database
) -> None:
    for place in places:
        start(place, database)

    async def scenario(h: Harness) -> None:
        worker = await connect(places[1], role="worker", spawn=False)
        try:
            request = LeaseRequest(worker_id=WORKER, slots={"fast": 1}, wait_seconds=30.0)
            waiting = asyncio.ensure_future(worker.lease(request))
            told = asyncio.ensure_future(h.events(wait=30.0))
            await asyncio.sleep(0)
            await h.submit(action(1))
            [lease] = (await waiting).leases
            h.ledger, coordinator = worker, h.ledger
            await h.start(lease)
            await h.complete(lease)
            h.ledger = coordinator
            [event] = await told
            assert event.action_id == act(1)
        finally:
            await worker.close()

    talk(places[0], database, scenario)


def test_a_bell_is_heard_by_others_and_not_by_itself() -> None:
    heard: list[str] = []
    url, schema = server().url(), "bells"
    first = Bell(connect_server(url, schema), 7, lambda: heard.append("first"))
    second = Bell(connect_server(url, schema), 7, lambda: heard.append("second"))
    try:
        first.ring()
        assert select.select([second.fileno()], [], [], BOUND_SECONDS)[0]
        second.listen()
        first.listen()
        assert heard == ["second"]
    finally:
        first.close()
        second.close()


def test_settings_that_lose_commits_are_refused_and_passwords_are_not_kept(
    places: tuple[Path, Path],
) -> None:
    place = places[0]
    unsafe = Database(server("off").url(), fresh_schema())
    with pytest.raises(ConfigInvalid, match=r"fsync = off.*process-safe"):
        spawn_owner(place, OwnerSettings(database=unsafe))
    alone = Database(server("on").url(), fresh_schema())
    with pytest.raises(ConfigInvalid, match="no synchronous standby"):
        spawn_owner(place, OwnerSettings(database=alone, durability=Durability.REPLICATED))
    shown = Secret(alone.url.reveal().replace("stoker@", "stoker:hunter2@"))
    start(place, Database(shown, alone.schema))
    try:
        kept = b"".join(f.read_bytes() for f in place.iterdir() if f.is_file())
        assert b"hunter2" not in kept
        assert str(server("on").place).encode() in (place / DATABASE_ADDRESS).read_bytes()
        command = Path(f"/proc/{owner_pid(place)}/cmdline").read_bytes()
        assert b"postgresql://" not in command
        asyncio.run(_capabilities(place))
    finally:
        drop_schema(server("on"), alone.schema)


async def _capabilities(place: Path) -> None:
    client: LedgerClient = await connect(place, role="test")  # the address is known here
    try:
        found = await client.capabilities()
        assert (found.engine, found.durability) == ("postgres", Durability.POWER_SAFE)
        assert found.advice == ()
    finally:
        await client.close()


def test_a_wrong_address_is_one_sentence(places: tuple[Path, Path]) -> None:
    nowhere = Database(Secret("postgresql://u:hunter2@/x?host=/nonexistent"), "stoker")
    with pytest.raises(ConfigInvalid) as failed:
        spawn_owner(places[0], OwnerSettings(database=nowhere))
    assert "hunter2" not in str(failed.value)
    assert "\n" not in str(failed.value)
