"""What a PostgreSQL ledger cannot keep: refused in one sentence, alone in its group."""

from typing import Any

import pytest

from stoker.broker.base import Append, AppendBatch, AppendDisposition, Attach, LedgerLimits
from stoker.broker.exchange import Exchange, Pending
from stoker.errors import LedgerRefused
from stoker.model.action import Action
from stoker.model.ids import ActionId, Fence, RolloutId, RunId
from support.ledger import ROLLOUT, RUN, ManualClock, action, gateway_service
from support.postgres import drop_schema, fresh_schema, server

UNFIT = {
    "run": action(2, run_id=RunId("run\0")),
    "rollout": action(2, rollout_id=RolloutId("rol\0")),
    "action": action(2, action_id=ActionId("act\0")),
}


def append(one: Action, fence: Fence) -> AppendBatch:
    appended = Append(rollout_id=one.rollout_id, expected_seq=0, submits=(one,))
    return AppendBatch(run_id=one.run_id, fence=fence, appends=(appended,))


@pytest.mark.parametrize("part", UNFIT)
def test_an_id_with_a_nul_is_refused_and_its_neighbours_are_not(part: str) -> None:
    schema, clock = fresh_schema(), ManualClock()
    gateway = gateway_service(schema, LedgerLimits())
    try:
        gateway.open(clock.now(), boot_id="", lineage="lin_test")
        exchange = Exchange(gateway)
        given: list[Any] = []
        exchange.run([Pending(Attach(run_id=RUN, incarnation="c"), given.append)], clock.now())
        fence = given.pop().fence
        fit = action(1, rollout_id=RolloutId(f"{ROLLOUT}_fit"))
        group = [Pending(append(one, fence), given.append) for one in (UNFIT[part], fit)]
        exchange.run(group, clock.now())
        refused, kept = given
        assert isinstance(refused, LedgerRefused)
        assert "NUL" in str(refused)
        assert [one.disposition for one in kept.replies] == [AppendDisposition.APPLIED]
        assert gateway.store.all("SELECT action_id FROM action") == [(fit.action_id,)]
    finally:
        gateway.close()
        drop_schema(server(), schema)
