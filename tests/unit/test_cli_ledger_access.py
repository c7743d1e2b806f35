import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace
from rich.console import Console

from stoker.broker.base import (
    ActionsReply,
    ActionsRequest,
    Capabilities,
    JournalReply,
    JournalRequest,
    Ledger,
    RolloutsReply,
    RolloutsRequest,
    RolloutSummary,
    StatsReply,
    WorkerStats,
)
from stoker.broker.memory import MemoryLedger
from stoker.cli import ledger_access
from stoker.cli.ledger import stats_view
from stoker.cli.ledger_check import check
from stoker.cli.main import main
from stoker.coordinator.record import RunDirectory
from stoker.model.events import encode_event
from stoker.model.ids import RolloutId, RunId, WorkerId
from support.journals import OPEN, ROLLOUT, summary
from support.records import RECORD

RUN = RunId("run_1")


class FewRollouts:
    """Pages through ``count`` rollouts that all have one open journal, and knows no action."""

    def __init__(self, count: int) -> None:
        self.summaries = [
            RolloutSummary(
                rollout_id=RolloutId(f"rol_{n}"), seq=summary(OPEN).seq, first=summary(OPEN).first
            )
            for n in range(count)
        ]
        self.asked: list[RolloutId | None] = []

    async def rollouts(self, request: RolloutsRequest) -> RolloutsReply:
        self.asked.append(request.after)
        ids = [one.rollout_id for one in self.summaries]
        start = ids.index(request.after) + 1 if request.after else 0
        return RolloutsReply(rollouts=tuple(self.summaries[start : start + request.limit]))

    async def journal(self, request: JournalRequest) -> JournalReply:
        return JournalReply(events=tuple(encode_event(event) for event in OPEN))

    async def actions(self, request: ActionsRequest) -> ActionsReply:
        return ActionsReply(actions=())


@pytest.mark.parametrize(("count", "pages"), [(0, 1), (1, 1), (2, 2), (5, 3)])
def test_every_page_is_read_once(count: int, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_access, "_PAGE", 2)
    ledger = FewRollouts(count)
    found = asyncio.run(ledger_access.all_rollouts(cast("Ledger", ledger), RUN))
    assert found == ledger.summaries
    assert len(ledger.asked) == pages


def test_an_action_that_waits_and_is_gone_breaks_i1() -> None:
    checked = asyncio.run(check(cast("Ledger", FewRollouts(1)), RUN))
    assert (checked.rollouts, checked.finished, checked.outstanding) == (1, 0, 1)
    assert checked.entries == len(OPEN)
    assert "rol_0: action act_6 waits for a result and is gone" in checked.problems
    # Its journal admits another rollout than the one the ledger lists it under.
    assert ROLLOUT != "rol_0"
    assert "rol_0: its first entry does not admit it" in checked.problems


class Advised(MemoryLedger):
    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), advice=("autovacuum is off; set it on",))


@pytest.mark.parametrize("as_json", [False, True])
def test_what_an_engine_advises_is_told_beside_its_counts(
    as_json: bool,  # noqa: FBT001 - by name
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @asynccontextmanager
    async def advised(_: RunDirectory) -> AsyncIterator[Ledger]:
        ledger = Advised()
        yield ledger
        await ledger.close()

    monkeypatch.setattr(ledger_access, "ledger_of", advised)
    run = RunDirectory(tmp_path / "run_1")
    run.create()
    run.write_record(RECORD)
    wanted = ["--json"] if as_json else []
    assert main(["ledger", "stats", "--run", str(run.path), *wanted]) == 0
    told = capsys.readouterr()
    assert told.err == "autovacuum is off; set it on\n"
    assert not as_json or json.loads(told.out)["commits_total"] > 0


def test_a_worker_that_ended_in_order_is_none_that_lives() -> None:
    """It took its own place without slots, so that whatever it held is over."""
    at_work = WorkerStats(
        worker_id=WorkerId("wrk_1"), name="w0", slots={"fast": 2}, leases=1, silent_seconds=1.0
    )
    ended = replace(at_work, worker_id=WorkerId("wrk_2"), slots={}, leases=0)
    found = StatsReply(
        classes={}, workers=(at_work, ended), unacknowledged=0, deliveries_total=1,
        attempts_total=1, retries_total=0, completions_total={}, late_total=0, dead_total=0,
    )  # fmt: skip
    shown = io.StringIO()
    Console(width=100, file=shown).print(stats_view(found, "postgres"))
    said = shown.getvalue()
    assert "wrk_1" in said
    assert "wrk_2" not in said
    assert "since" not in said, "a database counts from the beginning"
