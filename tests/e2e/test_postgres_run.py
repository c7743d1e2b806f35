"""A run whose ledger lies in PostgreSQL, by the command line as typed."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.tickets import open_ledger
from support.command import lay_out, run_arguments, skip_reason, stoker, wait_until_quiet
from support.postgres import drop_schema, fresh_schema, server

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield lay_out(tmp_path)
    wait_until_quiet(tmp_path)


def test_a_run_on_postgres_is_told_like_any_other(folder: Path) -> None:
    schema = fresh_schema()
    url = server("on").url().reveal().replace("stoker@", "stoker:hunter2@")
    ledger = ["--set", f"ledger.url={url}", "--set", f"ledger.db_schema={schema}"]
    try:
        ran = stoker(folder, *run_arguments("--json", *ledger))
        assert ran.code == 0, ran.err
        [run_id] = [one.name for one in (folder / "runs").iterdir() if one.name.startswith("run_")]
        stats = stoker(folder, "ledger", "stats", "--run", run_id, "--json")
        assert stats.code == 0, stats.err
        assert json.loads(stats.out)["commits_total"] > 0
        shown = stoker(folder, "ledger", "dead", "list", "--run", run_id)
        assert shown.code == 0, shown.err
        checked = stoker(folder, "ledger", "check", "--run", run_id)
        assert checked.code == 0, checked.err
        assert "2 rollouts (2 finished)" in checked.out
        assert "pg_amcheck" in checked.out
        copied = stoker(folder, "ledger", "backup", "kept.tar", "--run", run_id)
        assert copied.code == 2
        assert "pg_dump" in copied.err
        assert asyncio.run(engine_for_tickets(folder / "runs" / run_id)) == "postgres"
        kept = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        assert not [p for p in kept if b"hunter2" in p.read_bytes()], "a password was written down"
        assert not list(folder.rglob("ledger.db")), "the ledger lies in the database alone"
        config = stoker(folder, "config", "show", *ledger)
        assert "hunter2" not in config.out + config.err
    finally:
        wait_until_quiet(folder)
        drop_schema(server("on"), schema)


async def engine_for_tickets(run: Path) -> str:
    """Return what a consumer of tickets is connected to, who knows the run's directory alone."""
    async with open_ledger(run) as ledger:
        return (await ledger.capabilities()).engine


def test_replicas_without_a_server_are_refused_in_one_sentence(folder: Path) -> None:
    ran = stoker(folder, *run_arguments("--set", "ledger.durability=replicated"))
    assert ran.code == 2
    assert "needs a PostgreSQL server" in ran.err
