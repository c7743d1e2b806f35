"""A small ledger in every state there is, as a file of an older version was left: for golden files.

``make`` runs against whatever code is checked out, so it made the file of each version in its time;
the files are kept, never made again.
"""

import asyncio
from pathlib import Path

from stoker.model.action import Effect, LatePolicy
from stoker.model.ids import RolloutId, WorkerId
from support.ledger import Harness, action, with_ledger

WORKER_DEAD = WorkerId("wrk_2")
WORKER_POISONED = WorkerId("wrk_3")
OTHER_ROLLOUT = RolloutId("rol_2")

STATES = {
    "act_0001": "acknowledged",
    "act_0002": "completed",
    "act_0003": "started",
    "act_0004": "leased",
    "act_0005": "completed",
    "act_0006": "accepted",
    "act_0007": "completed",
    "act_0008": "accepted",
    "act_0009": "acknowledged",
}
"""Action → where ``make`` leaves it."""
ENTRIES = {"rol_1": 3, "rol_2": 2}
"""Rollout → entries of its journal."""


def make(place: Path) -> None:
    """Leave a ledger in ``place``: closed, its coordinator and workers gone without a word."""
    with_ledger("sqlite", place, _live)


async def _live(h: Harness) -> None:
    await h.submit(
        action(1),
        action(2, late=LatePolicy.RECONCILE),
        action(3),
        action(4, effect=Effect.EXTERNAL),
    )
    first, second, third, _fourth = await h.lease()
    await h.start(first, second, third)
    await h.complete(first, said=b"one")
    await h.complete(second, said=b"two")
    await h.enroll(WORKER_DEAD)
    await h.append(
        action(5, effect=Effect.EXTERNAL),
        action(7, attempts_max=1),
        action(9, attempts_max=1),
        acknowledges=(first.action.action_id,),
    )
    for worker in (WORKER_POISONED, WorkerId("wrk_4")):
        await h.enroll(worker)
    [fifth] = await h.lease(WORKER_DEAD, slots=1)
    await h.start(fifth, worker=WORKER_DEAD)
    for worker in (WORKER_POISONED, WorkerId("wrk_4")):
        [poison] = await h.lease(worker, slots=1)
        await h.start(poison, worker=worker)
    for worker in (WORKER_DEAD, WORKER_POISONED, WorkerId("wrk_4")):
        await h.enroll(WorkerId(f"{worker}x"), replaces=worker)
    await h.append(action(6, rollout_id=OTHER_ROLLOUT, priority=3), rollout=OTHER_ROLLOUT)
    await h.append(
        action(8, rollout_id=OTHER_ROLLOUT, holder=WorkerId("wrk_1")), rollout=OTHER_ROLLOUT
    )
    await h.append(events=(b"applied",), acknowledges=(action(9).action_id,))
    await asyncio.sleep(0)
