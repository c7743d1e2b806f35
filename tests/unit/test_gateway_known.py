"""What a gateway keeps between groups is bounded."""

import pytest

from stoker.broker import counts
from stoker.broker.base import LedgerLimits
from stoker.broker.core import accepted
from stoker.broker.counts import Counts
from stoker.broker.postgres import known
from stoker.broker.postgres.known import Known
from stoker.broker.rows import ParkedOn
from stoker.broker.store import Head
from stoker.model.ids import RolloutId, RunId
from support.ledger import RUN, ManualClock, action

CLOCK = ManualClock()


def test_what_a_gateway_keeps_is_bounded_by_bytes_and_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known, "BYTES_MAX", 10_000)
    monkeypatch.setattr(known, "HEADS_MAX", 3)
    monkeypatch.setattr(counts, "_SERVED_MAX", 3)
    kept = Known()
    rows = [
        accepted(
            action(n, b"x" * 1000),
            order=n,
            digest="",
            partition="0",
            parked_on=ParkedOn.NOTHING,
            now=CLOCK.now(),
        )
        for n in range(20)
    ]
    for version, row in enumerate((*rows, rows[-1])):
        kept.keep(version, row)
        kept.keep_head(Head(row.order, RUN, RolloutId(f"rol_{row.order}"), "0", 0, False))
    assert kept.named(rows[-1].action_id) == (20, rows[-1]), "the newest version of the newest row"
    assert [kept.named(row.action_id) is not None for row in rows] == [False] * 16 + [True] * 4
    assert 0 < kept.bytes <= 10_000
    assert [head.key for head in kept.heads.values()] == [17, 18, 19]
    kept.clear()
    assert kept.bytes == 0
    served = Counts(LedgerLimits(), {})
    for n in (1, 2, 3, 1, 4):
        served.serve(RunId(f"run_{n}"), n)
    assert list(served.served) == ["run_3", "run_1", "run_4"]
