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
from stoker.model.ids import ActionId, RolloutId, RunId, WorkerId


class Needs:
    """The rows that a group's requests name."""

    def __init__(self, requests: Iterable[Request]) -> None:
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
