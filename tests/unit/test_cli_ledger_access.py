import asyncio
from typing import cast

import pytest

from stoker.broker.base import (
    ActionsReply,
    ActionsRequest,
    JournalReply,
    JournalRequest,
    Ledger,
    RolloutsReply,
    RolloutsRequest,
    RolloutSummary,
)
from stoker.cli import ledger_access
from stoker.cli.ledger_check import check
from stoker.model.events import encode_event
from stoker.model.ids import RolloutId, RunId
from support.journals import OPEN, ROLLOUT, summary

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
