"""Branched rollouts: new ones that share another's past up to one of its steps (design 0021).

A branch's journal begins with an admission of its own, then what its parent's holds before the last
result they share, ``Branched``, and that result; what follows from it is the branch's own. Where a
program branches itself (``ctx.branch``), that result is which of the branches it is. Any
coordinator of the run revives it as one that was left unfinished. Pure.
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
from stoker.model.value import canonical_bytes, content_digest, inline_value

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


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """What is a branch's own."""

    admitted: Admitted
    after: tuple[JournalEvent, JournalEvent]
    """What follows the shared past: ``Branched``, and the result with which it begins."""

    @property
    def rollout_id(self) -> RolloutId:
        """Its id."""
        return self.admitted.rollout_id


class Past:
    """What all branches of one point share, digested and encoded once."""

    def __init__(self, shared: Sequence[JournalEvent], copied: Sequence[JournalEvent]) -> None:
        """Take the parent's entries that are ``shared``, and those of them that are ``copied``."""
        parent = shared[0]
        assert isinstance(parent, Admitted), "a journal begins with its admission"
        self.parent = parent
        self._entries = len(shared)
        self._digest = content_digest(b"".join(map(encode_event, shared)))
        self._events = [
            _without_action(event) for event in copied if not isinstance(event, _ITS_OWN)
        ]
        self._encoded = tuple(map(encode_event, self._events))

    def events(self, branch: Branch) -> list[JournalEvent]:
        """Return the journal of ``branch``."""
        return [branch.admitted, *self._events, *branch.after]

    def encoded(self, branch: Branch) -> tuple[bytes, ...]:
        """Return the journal of ``branch`` as it is stored."""
        after = map(encode_event, branch.after)
        return (encode_event(branch.admitted), *self._encoded, *after)

    def branch(
        self, mine: Identity, step: int, begins: Delivered, sample: RolloutId | msgspec.UnsetType
    ) -> Branch:
        """Return the branch that is ``mine``; ``begins`` is the result with which it begins."""
        parent = self.parent
        before = None if parent.branched is msgspec.UNSET else parent.branched
        admitted = msgspec.structs.replace(
            parent,
            rollout_id=mine.rollout_id,
            group_id=mine.group_id,
            index=mine.index,
            epoch=mine.epoch,
            at=mine.at,
            branched=BranchedFrom(
                parent=parent.rollout_id,
                step=step,
                entries=self._entries,
                digest=self._digest,
                generation=1 if before is None else before.generation + 1,
                root=identity_of(parent) if before is None else before.root,
                sample=sample,
            ),
        )
        own = msgspec.structs.replace(begins, at=mine.at)
        return Branch(admitted=admitted, after=(Branched(identity=mine), own))


class PointBranches:
    """Branches that a person asks for at once, at a point: a group of their own."""

    def __init__(self, events: Sequence[JournalEvent], point: Point, first: int = 0) -> None:
        """``first``: number of the first branch that is asked for; it names their group."""
        self.past = Past(events[: point.last + 1], events[1 : point.last])
        last = events[point.last]
        assert isinstance(last, Delivered), "a point is where a result was delivered"
        self._last = last
        self._point = point
        self._group = GroupId(
            derive_id("grp_", self.past.parent.rollout_id, str(point.last), str(first))
        )

    def branch(self, number: int, at: float) -> Branch:
        """Return branch ``number`` of the point (from 0), made at wall time ``at``."""
        parent, point = self.past.parent, self._point
        mine = Identity(
            rollout_id=point_branch_id(parent.rollout_id, point, number),
            group_id=self._group,
            index=number,
            epoch=derive_id("epo_", parent.epoch, str(point.last), str(number)),
            at=at,
        )
        return self.past.branch(mine, point.step, self._last, msgspec.UNSET)


class ProgramBranches:
    """Branches that a program asks for: of its rollout's group, and counted with it.

    ``events`` may go on after the call: results that nobody waited for.
    """

    def __init__(self, events: Sequence[JournalEvent], call: CallPath) -> None:
        place = next(
            place
            for place, event in enumerate(events)
            if isinstance(event, Issued) and event.path == call
        )
        shared = events[: place + 1]
        self.past = Past(shared, shared[1:])
        self._call = call
        self._step = sum(isinstance(e, Issued) and e.verb is Verb.GENERATE for e in shared)

    def branch(self, number: int, at: float) -> Branch:
        """Return what the call returns ``number`` in, made at wall time ``at``."""
        parent = self.past.parent
        mine = Identity(
            rollout_id=branch_id(parent.rollout_id, self._call, number),
            group_id=parent.group_id,
            index=parent.index,
            epoch=derive_id("epo_", parent.epoch, f"branch {self._call}", str(number)),
            at=at,
        )
        begins = Delivered(path=self._call, value=inline_value(canonical_bytes(number)))
        return self.past.branch(mine, self._step, begins, parent.sample)


def branch_id(parent: RolloutId, call: CallPath, number: int) -> RolloutId:
    """Return the id of the rollout in which ``call`` of ``parent`` returns ``number``."""
    return RolloutId(derive_id("rol_", parent, f"branch {call}", str(number)))


def point_branch_id(parent: RolloutId, point: Point, number: int) -> RolloutId:
    """Return the id of branch ``number`` of a point of ``parent``."""
    return RolloutId(derive_id("rol_", parent, str(point.last), str(number)))


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
