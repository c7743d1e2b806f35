"""Branched rollouts: new ones that share another's past up to one of its steps (design 0021).

A branch's journal begins with an admission of its own, then what its parent's holds before the last
result they share, ``Branched``, and that result; what follows from it is the branch's own. Any
coordinator of the run revives it as one that was left unfinished.
"""

from collections.abc import Sequence

import msgspec

from stoker.errors import BadInput
from stoker.model.events import (
    Admitted,
    Branched,
    BranchedFrom,
    Delivered,
    Dropped,
    Identity,
    Issued,
    JournalEvent,
    Late,
    Reissued,
    Restored,
    Verb,
    Withdrawn,
    encode_event,
)
from stoker.model.ids import CallPath, GroupId, RolloutId, derive_id
from stoker.model.value import content_digest

_ITS_OWN = (Restored, Late, Reissued)
"""What a journal tells of its own boxes and deliveries; nothing that a branch shares."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rollout can be branched."""

    step: int
    """Model calls that were asked for before."""
    last: int
    """Place in the journal of the last result that is shared."""


def point_at(events: Sequence[JournalEvent], step: int) -> Point:
    """Return the latest point at or before ``step``; nothing else was outstanding there.

    Raises:
        BadInput: the caller's: there is no such step, or no point before it.
    """
    found, steps = _points(events)
    if not 0 <= step < steps:
        has = f"steps 0 to {steps - 1}" if steps else "no step"
        raise BadInput(f"step {step} is not one of the rollout, which has {has}; nothing was done")
    usable = [point for point in found if point.step <= step]
    if not usable:
        raise BadInput(
            f"the rollout cannot be branched at step {step} or before: it shares no result there, "
            "or other calls and timeouts were outstanding; nothing was done; name a later step"
        )
    return usable[-1]


def _points(events: Sequence[JournalEvent]) -> tuple[list[Point], int]:
    """Return every point, and how many model calls were asked for."""
    found: list[Point] = []
    outstanding: set[CallPath] = set()
    alone: int | None = None
    steps = 0
    for place, event in enumerate(events):
        match event:
            case Delivered():
                alone = place if outstanding == {event.path} else None
                outstanding.discard(event.path)
            case Withdrawn() | Dropped():
                outstanding.discard(event.path)
            case Issued():
                outstanding.add(event.path)
                if event.verb is Verb.GENERATE:
                    if alone is not None:
                        found.append(Point(step=steps, last=alone))
                    steps += 1
            case _:
                pass
    return found, steps


def branch_of(
    events: Sequence[JournalEvent], point: Point, number: int, at: float
) -> list[JournalEvent]:
    """Return the journal of branch ``number`` (from 0) of a rollout, made at wall time ``at``."""
    parent, last = events[0], events[point.last]
    assert isinstance(parent, Admitted), "a journal begins with its admission"
    assert isinstance(last, Delivered), "a point is where a result was delivered"
    before = None if parent.branched is msgspec.UNSET else parent.branched
    where = (parent.rollout_id, str(point.last))
    mine = Identity(
        rollout_id=RolloutId(derive_id("rol_", *where, str(number))),
        group_id=GroupId(derive_id("grp_", *where)),
        index=number,
        epoch=derive_id("epo_", parent.epoch, str(point.last), str(number)),
        at=at,
    )
    shared = events[: point.last + 1]
    admitted = msgspec.structs.replace(
        parent,
        rollout_id=mine.rollout_id,
        group_id=mine.group_id,
        index=number,
        epoch=mine.epoch,
        at=at,
        branched=BranchedFrom(
            parent=parent.rollout_id,
            step=point.step,
            entries=len(shared),
            digest=content_digest(b"".join(map(encode_event, shared))),
            generation=1 if before is None else before.generation + 1,
            root=identity_of(parent) if before is None else before.root,
        ),
    )
    past = [event for event in shared[1:-1] if not isinstance(event, _ITS_OWN)]
    return [
        admitted,
        *map(_without_action, past),
        Branched(identity=mine),
        msgspec.structs.replace(last, at=at),
    ]


def identity_of(admitted: Admitted) -> Identity:
    """Return who a rollout is from its admission on."""
    return Identity(
        rollout_id=admitted.rollout_id,
        group_id=admitted.group_id,
        index=admitted.index,
        epoch=admitted.epoch,
        at=admitted.at,
    )


def _without_action(event: JournalEvent) -> JournalEvent:
    """Return ``event`` so that no action is looked for under the branch's name."""
    return msgspec.structs.replace(event, action_id=None) if isinstance(event, Issued) else event
