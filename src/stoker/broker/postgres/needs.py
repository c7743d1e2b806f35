"""What a group of requests is going to touch: read and locked in one go before it is handled."""

from collections.abc import Iterable, Sequence

from stoker.broker.base import (
    AppendBatch,
    Attach,
    Cancel,
    CompleteRequest,
    Enroll,
    LeaseRequest,
    Poll,
    ReleaseRequest,
    Request,
    StartRequest,
)
from stoker.broker.operating import SettleDead
from stoker.broker.postgres.arrays import Texts
from stoker.broker.postgres.known import Trusted
from stoker.model.ids import ActionId, RolloutId, RunId, WorkerId

_SPARE_IDS = 8
"""Drawn with a group's locks beside its submits' places: new rollouts need one each."""


class Needs:
    """The rows that a group's requests name, and those that polls will ask for because of them."""

    def __init__(self, requests: Sequence[Request], waiting: Iterable[Poll] = ()) -> None:
        self.owners: set[tuple[RunId, str]] = set()
        self.heads: set[tuple[RunId, RolloutId]] = set()
        self.actions: set[ActionId] = set()
        """Locked before anything is decided."""
        self.steps: set[ActionId] = set()
        """What is decided of these changes them, as a rule."""
        self.fresh: set[ActionId] = set()
        """Submitted; new, as a rule."""
        self.moves: set[tuple[RunId, RolloutId]] = set()
        """Journals that entries are added to."""
        self.submitting: set[RolloutId] = set()
        self.submits = 0
        self.heard: set[WorkerId] = set()
        self.replaced: set[WorkerId] = set()
        self.holders: set[WorkerId] = set()
        for request in requests:
            self._add(request)
        self.holders -= self.heard
        self.polling: set[WorkerId] = set()
        """Whose polls wait, and are going to be asked for: there is something new to lease."""
        self.wanted = 0
        """Leases that are likely to be given of what is submitted here."""
        if self.submits:
            polls = [*requests, *waiting]
            leases = [one for one in polls if isinstance(one, LeaseRequest)]
            self.polling = {one.worker_id for one in leases}
            self.polling -= self.heard | self.holders | self.replaced
            self.wanted = min(self.submits, sum(sum(one.slots.values()) for one in leases))

    def _add(self, request: Request) -> None:
        worker_id = getattr(request, "worker_id", None)
        if worker_id is not None:
            self.heard.add(worker_id)
            self._worker(request)
        elif isinstance(request, AppendBatch):
            self._append(request)
        elif isinstance(request, Attach | Cancel):
            self.owners.add((request.run_id, request.partition))
        if isinstance(request, Cancel | LeaseRequest | SettleDead):
            self.actions.update(request.action_ids)

    def _worker(self, request: Request) -> None:
        if isinstance(request, Enroll):
            if request.replaces is not None:
                self.replaced.add(request.replaces)
        elif isinstance(request, StartRequest | ReleaseRequest):
            self.steps.update(held.action_id for held in request.held)
        elif isinstance(request, CompleteRequest):
            self.steps.update(result.action_id for result in request.completions)

    def _append(self, batch: AppendBatch) -> None:
        self.owners.add((batch.run_id, batch.partition))
        for one in batch.appends:
            (self.moves if one.events else self.heads).add((batch.run_id, one.rollout_id))
            self.steps.update(one.acknowledges)
            if not one.submits:
                continue
            self.submits += len(one.submits)
            self.submitting.add(one.rollout_id)
            for action in one.submits:
                self.fresh.add(action.action_id)
                if action.holder is not None:
                    self.holders.add(action.holder)


def demand(polls: Sequence[Poll]) -> dict[str, int]:
    """Return how many actions of each class these polls would take together."""
    wanted: dict[str, int] = {}
    for poll in polls:
        if isinstance(poll, LeaseRequest):
            for worker_class, slots in poll.slots.items():
                wanted[worker_class] = wanted.get(worker_class, 0) + slots
    return wanted


def ahead(needs: Needs, trusted: Trusted, now: float) -> list[tuple[str, tuple[object, ...]]]:
    """Return the statements that lock and read what ``needs`` names, in the order of locks.

    Ids come behind the locks: they are fences, too.
    """
    asked: list[tuple[str, tuple[object, ...]]] = []
    heads = (needs.heads | needs.moves) - trusted.heads.keys()
    actions = (needs.actions | needs.steps | needs.fresh) - trusted.rows.keys() - trusted.absent
    if needs.owners:
        asked.append(("lock_owners", _pairs(needs.owners)))
    for name, first, named in (
        ("lock_replaced", (), needs.replaced),
        ("hear", (now,), needs.heard),
        ("lock_holders", (), needs.holders),
        ("lock_polling", (), needs.polling),
    ):
        if named:
            asked.append((name, (*first, texts(named))))
    workers = needs.replaced | needs.heard | needs.holders | needs.polling
    if workers:
        asked.append(("workers_named", (texts(workers),)))
    if heads:
        asked.append(("read_heads", _pairs(heads)))
    if actions:
        asked.append(("lock_rows", (texts(actions),)))
    if needs.submits:
        asked.append(("draw", (needs.submits + needs.wanted + _SPARE_IDS,)))
    if needs.submitting:
        asked.append(("outstanding", (texts(needs.submitting),)))
    return asked


def texts(values: Iterable[str]) -> Texts:
    """Return names as a column, in the order of locks."""
    return Texts(sorted(values))


def _pairs(pairs: Iterable[tuple[str, str]]) -> tuple[Texts, Texts]:
    firsts, seconds = zip(*sorted(pairs), strict=True)
    return Texts(firsts), Texts(seconds)
