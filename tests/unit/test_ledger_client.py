"""What a client of the ledger keeps of the leases that came, so that none is told of twice."""

from pathlib import Path

from stoker.broker.base import Lease, LeaseReply
from stoker.broker.client import _FENCES_KEPT, LedgerClient
from stoker.model.ids import Fence
from support.ledger import action


def reply(*fences: int) -> LeaseReply:
    one = action(1)
    return LeaseReply(
        leases=tuple(
            Lease(action=one, fence=Fence(n), delivery=1, attempt=1, deadline_seconds=1.0)
            for n in fences
        )
    )


def test_leases_delivered_again_are_left_out_and_the_oldest_fences_forgotten() -> None:
    client = LedgerClient([Path("/nowhere")], "worker", None)
    first = reply(1, 2)
    assert client._unseen(first) is first
    assert [one.fence for one in client._unseen(reply(2, 3)).leases] == [3]
    client._unseen(reply(*range(4, _FENCES_KEPT + 2)))
    assert len(client._fences) == _FENCES_KEPT
    assert not client._unseen(reply(2, _FENCES_KEPT + 1)).leases, "the newest are still known"
    assert client._unseen(reply(1)).leases, "the first was forgotten"
