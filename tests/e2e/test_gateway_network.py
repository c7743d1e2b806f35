"""A ledger over TCP: a whole run, keys that do not fit, and a gateway that is killed under load."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.broker import client as client_module
from stoker.broker import relay as relay_module
from stoker.broker.client import connect, owner_pid
from stoker.broker.network import Address, Remote, listening_context
from stoker.broker.relay import Relay
from stoker.broker.spawn import Database, OwnerSettings, make_key
from stoker.cli.bench_ledger_load import Load
from stoker.errors import ConfigInvalid
from support.command import STOKER, lay_out, run_arguments, skip_reason, stoker, wait_until_quiet
from support.postgres import drop_schema, fresh_schema, server

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")

LOOPBACK = Address("127.0.0.1", 0)
CYCLES = 300
ALERT_BYTES = 7


@pytest.fixture
def key(tmp_path: Path) -> Path:
    made = tmp_path / "key.pem"
    make_key(made)
    return made


@pytest.fixture
def schema() -> Iterator[str]:
    name = fresh_schema()
    yield name
    drop_schema(server("on"), name)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield lay_out(tmp_path)
    wait_until_quiet(tmp_path)


def test_a_run_and_its_questions_pass_through_a_gateway(
    folder: Path, key: Path, schema: str
) -> None:
    url = server("on").url().reveal()
    gateway = subprocess.Popen(
        [
            *(STOKER, "gateway", "--directory", folder / "far", "--key", key),
            *("--listen", str(LOOPBACK), "--set", f"ledger.url={url}"),
            *("--set", f"ledger.db_schema={schema}"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert gateway.stderr is not None
        address = gateway.stderr.readline().removeprefix("listening on ").strip()
        near = ["--set", f'ledger.gateways=["{address}"]', "--set", f"ledger.gateway_key={key}"]
        ran = stoker(folder, *run_arguments("--run-id", "first", *near))
        assert ran.code == 0, ran.err
        asked = stoker(folder, "ledger", "stats", "--run", "first")
        assert asked.code == 0, asked.err
        assert not list(folder.rglob("ledger.db")), "the ledger lies in the database alone"
        assert owner_pid(folder / "runs" / "first" / "ledger") is None, "nothing serves it here"

        other = folder / "other.pem"
        make_key(other)
        near[-1] = f"ledger.gateway_key={other}"
        refused = stoker(folder, *run_arguments(*near))
        assert refused.code == 2
        assert "does not hold the key of ledger.gateway_key" in refused.err
        assert refused.err.strip().count("\n") <= 1, "one sentence"
    finally:
        gateway.send_signal(signal.SIGTERM)
        _, said = gateway.communicate(timeout=60)
        assert gateway.returncode == 0, said


def test_a_killed_gateway_under_load_costs_nothing(tmp_path: Path, key: Path, schema: str) -> None:
    settings = OwnerSettings(database=Database(server("on").url(), schema))
    places = [tmp_path / "a", tmp_path / "b"]

    async def through() -> None:
        relays = [Relay(place, settings) for place in places]
        for place in places:
            place.mkdir()
        remote = Remote(tuple([await relay.open(LOOPBACK, key) for relay in relays]), key)
        clients = [
            await connect(tmp_path, role=role, elsewhere=remote)
            for role in ("coordinator", "worker")
        ]
        load = Load(clients[0], clients[1])
        await load.begin(16)
        going = asyncio.create_task(load.cycles(CYCLES, 16))
        while not load.told:
            await asyncio.sleep(0)
        await relays[0].close()
        killed = owner_pid(places[0])
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(60):
            measured = await going
        assert measured.cycles == CYCLES
        stats = await clients[0].stats()
        assert stats.completions_total["ok"] == CYCLES, "nothing lost, nothing twice"
        for client in clients:
            await client.close()
        await relays[1].close()

    try:
        asyncio.run(through())
    finally:
        for place in places:
            if (pid := owner_pid(place)) is not None:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_gateway_that_does_not_greet_is_passed_over(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, *, hangs_up: bool
) -> None:
    monkeypatch.setattr(client_module, "_GREETING_SECONDS", 1.0)
    watched: list[socket.socket] = []
    monkeypatch.setattr(relay_module, "notice_silence", watched.append)

    async def away(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve as a gateway does whose database is away."""
        if hangs_up:
            writer.close()

    async def through() -> None:
        broken = await asyncio.start_server(away, LOOPBACK.host, 0, ssl=listening_context(key))
        first = Address(LOOPBACK.host, broken.sockets[0].getsockname()[1])
        relay = Relay(tmp_path / "b", OwnerSettings(idle_exit_seconds=0.5))
        (tmp_path / "b").mkdir()
        remote = Remote((first, await relay.open(LOOPBACK, key)), key)
        async with asyncio.timeout(client_module.RECONNECT_SECONDS / 2):
            client = await connect(tmp_path, role="worker", elsewhere=remote)
        assert (await client.stats()).commits_total > 0
        link = client._link
        assert link is not None
        assert link._transport is not None
        mine = link._transport.get_extra_info("socket")
        for option in (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT):
            assert 0 < mine.getsockopt(socket.IPPROTO_TCP, option) <= 60_000, "silence is noticed"
        assert mine.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert watched, "at both ends"  # more than once where a greeting came late
        await client.close()
        await relay.close()
        broken.close()

    try:
        asyncio.run(through())
    finally:
        if (pid := owner_pid(tmp_path / "b")) is not None:
            os.kill(pid, signal.SIGKILL)


def test_whoever_has_no_key_is_not_let_in(tmp_path: Path, key: Path) -> None:
    async def knock() -> None:
        relay = Relay(tmp_path / "a", OwnerSettings(idle_exit_seconds=0.5))
        (tmp_path / "a").mkdir()
        address = await relay.open(LOOPBACK, key)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"\0" * 64)
        with contextlib.suppress(ConnectionError):  # hung up on before it could be told
            told = await reader.read(1024)
            assert len(told) <= ALERT_BYTES, "an alert at most"
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await relay.close()

    try:
        asyncio.run(knock())
    finally:
        if (pid := owner_pid(tmp_path / "a")) is not None:
            os.kill(pid, signal.SIGKILL)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path, key: Path) -> None:
    key.chmod(0o640)
    with pytest.raises(ConfigInvalid, match="can be read by others"):
        Remote((LOOPBACK,), key).context()
    with pytest.raises(ConfigInvalid, match="File exists"):
        make_key(key)
    with pytest.raises(ConfigInvalid, match="cannot be used"):
        Remote((LOOPBACK,), tmp_path / "none.pem").context()


def test_a_gateway_without_a_key_listens_nowhere(tmp_path: Path) -> None:
    said = stoker(tmp_path, "gateway", "--directory", "here", "--listen", "0.0.0.0:7431")
    assert said.code == 2
    assert "needs --directory and --key" in said.err
