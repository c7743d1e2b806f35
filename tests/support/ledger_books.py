"""Whether an open ledger's working memory is what its store would be read as."""

from collections import Counter
from typing import Any

import msgspec

from stoker.broker.books import Books
from stoker.broker.counts import line_of
from stoker.broker.rows import Row
from stoker.broker.service import LedgerService
from stoker.model.action import ActionState
from stoker.model.ids import ActionId

COUNTED = (
    "states",
    "parked_caps",
    "parked_runs",
    "parked_rollouts",
    "waiting",
    "out",
    "run_out",
    "run_queued",
    "suspects",
    "held",
    "queued",
    "busy",
    "results",
)
UNWRITTEN = ("_fresh", "_changed", "_settled", "_told", "_buried", "_heads_dirty", "_entries")


def check_books(service: LedgerService) -> None:
    """Compare the books, between two groups, with books that are read from the store."""
    books, store = service._books, service._store
    assert not any(getattr(books, name) for name in UNWRITTEN)
    assert not books._recent._passing, "a row of a group that is over is kept"
    fresh = Books(store, books.limits, books.meta, 0.0)
    for name in COUNTED:
        assert _plain(getattr(books, name)) == _plain(getattr(fresh, name)), name
    assert _decided_by(books._hands) == _decided_by(fresh._hands)
    for worker_id, record in books.workers.items():
        read = fresh.workers.get(worker_id)
        assert set(record.named) == (set(read.named) if read else set()), worker_id
        assert record.enlisted.ended == (read.enlisted.ended if read else False)
        for action_id, fence in record.untold.items():
            assert books._hands[action_id].reclaim_fence == fence != 0
    _check_alarms(service)
    if fresh.next_due is not None:
        assert books.next_due is not None, "the ledger would sleep for ever"
        assert books.next_due <= fresh.next_due, "a deadline would be slept through"
    for action_id, row in books._recent.rows.items():
        [written] = store.rows((action_id,))
        assert written == row, _differing(written, row)
    for queue, places in books._lineup._queues.items():
        known = [row for _, _, row in places]
        waiting = books.waiting[line_of(queue.worker_class, queue.run_id)]
        whole = books._lineup.head(queue, len(known) + 1, waiting) is not None
        stored = store.queued(queue, len(known) + 1)
        assert known == stored if whole else all(row in store.queued(queue, 99) for row in known)
    for partition, floor in books._unseen._floors.items():
        told = list(books._unseen._events[partition].values())
        assert told == store.told(*partition, floor, len(told) + 1)
    for (run_id, rollout_id), head in books._recent.heads.items():
        assert store.head(run_id, rollout_id) == head
    for rollout_id, count in books._recent.outstanding.items():
        assert store.outstanding([rollout_id]) == {rollout_id: count}


def _check_alarms(service: LedgerService) -> None:
    """Look whether the silence of every living worker would be noticed, and is watched once."""
    books, expiry = service._books, service._expiry
    watched = Counter([worker_id for _, worker_id in expiry._watch] + books.unwatched)
    wake = service.next_wake()
    for worker_id, record in books.workers.items():
        assert watched[worker_id] <= 1, f"the silence of {worker_id} is counted twice"
        if not record.dead:
            assert watched[worker_id], f"nobody counts the silence of {worker_id}"
            assert wake is not None, f"nobody would wake for {worker_id}"
            assert wake <= expiry._silent_at(record), f"{worker_id} would be silent for too long"


def _decided_by(hands: dict[ActionId, Row]) -> dict[ActionId, Any]:
    """Return rows in hands without what the store gives up when their result is acknowledged."""
    return {
        action_id: msgspec.structs.replace(row, action=None, completion=None)
        if row.state is ActionState.ACKNOWLEDGED
        else row
        for action_id, row in hands.items()
    }


def _plain(value: Any) -> Any:
    """Return counts without those that came to nothing."""
    if not isinstance(value, dict):
        return value
    plain = {key: _plain(inner) for key, inner in value.items()}
    counts = all(isinstance(inner, int | dict) for inner in plain.values())
    return {key: inner for key, inner in plain.items() if inner} if counts else plain


def _differing(stored: Row, kept: Row) -> dict[str, Any]:
    fields = {name: (getattr(stored, name), getattr(kept, name)) for name in Row.__struct_fields__}
    return {name: both for name, both in fields.items() if both[0] != both[1]}
