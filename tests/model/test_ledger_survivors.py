"""Rules that a mutant of the broker core once broke without a quick test noticing."""

import asyncio
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stoker.broker.base import LeaseRequest
from stoker.errors import LedgerRefused
from stoker.model.action import Effect
from stoker.model.ids import WorkerId
from support.ledger import ENGINES, WORKER, Harness, act, action, with_ledger


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_b16_only_what_an_external_start_promises_is_synced(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2, effect=Effect.EXTERNAL))
        plain, external = await h.lease()
        syncs = [(await h.ledger.stats()).syncs_total]
        for lease in (plain, external, external):
            await h.start(lease)
            syncs.append((await h.ledger.stats()).syncs_total)
        assert [after - before for before, after in pairwise(syncs)] == [0, 1, 0]

    with_ledger(engine, tmp_path, scenario)


def test_b2_a_waiting_poll_of_a_lost_worker_is_given_nothing(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        request = LeaseRequest(worker_id=WORKER, slots={"fast": 4}, wait_seconds=600.0)
        waiting = asyncio.create_task(h.ledger.lease(request))
        await asyncio.sleep(0)
        await h.advance(h.limits.lease_seconds + 1.0)
        await h.submit(action(1))
        other = WorkerId("wrk_other")
        await h.enroll(other)
        [lease] = await h.lease(other)
        assert lease.action.action_id == act(1), "the living worker gets it, not the stopped one"
        assert not waiting.done()
        waiting.cancel()

    with_ledger(engine, tmp_path, scenario)


@pytest.mark.parametrize(
    "unusable",
    [{"attempts_max": 0}, {"deliveries_max": 0}, {"deadline_seconds": math.inf}],
    ids=lambda one: next(iter(one)),
)
def test_an_action_that_could_never_run_or_never_end_is_refused(
    engine: str, tmp_path: Path, unusable: dict[str, Any]
) -> None:
    async def scenario(h: Harness) -> None:
        with pytest.raises(LedgerRefused, match=str(act(1))):
            await h.submit(action(1, **unusable))
        assert await h.lease() == []

    with_ledger(engine, tmp_path, scenario)
