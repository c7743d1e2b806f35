"""A complete group as a trainer gets it, read from the journals of its rollouts.

Who is of the group is decided here, from journals alone: those that ended by themselves first, in
the order they ended; failed ones only where there are not enough. Only *completed* has a reward.
Whatever a program branched off a rollout (``ctx.branch``) counts with it as one.
"""

import msgspec

from stoker.coordinator.rebuild import Fetch, returned
from stoker.errors import ArtifactDamaged
from stoker.export.agreement import disagreements
from stoker.export.rows import FinishedRollout, Row, RunFacts, read_rollout, rows_of
from stoker.model.events import JournalEvent
from stoker.model.ids import GroupId, RolloutId
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.task import Task

_BY_ITSELF = frozenset({OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED})


class GroupRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a group."""

    rollout_id: RolloutId
    index: int
    """Its place in the group; a branch of its program has its parent's."""
    sample: RolloutId
    """The rollout that it counts with: itself, unless a program branched it off."""
    outcome: Outcome
    rows: tuple[Row, ...] = ()
    """Its segments as ``stoker export`` writes them (ids, mask, logprobs, spans); none where no
    model call returned, and none for those left over."""
    steps: int = 0
    seconds: float = 0.0
    """Admission to outcome."""
    policy_versions: tuple[int, ...] = ()
    """Versions that sampled its tokens, rising, also where the rows have no ids to hang them on."""

    @property
    def reward(self) -> float | None:
        """Its reward; ``None`` unless it is *completed*."""
        return self.outcome.reward


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of one task that are compared, as one hand-out of them."""

    group_id: GroupId
    number: int
    """Which hand-out this is, from 1."""
    task: Task
    rollouts: tuple[GroupRollout, ...]
    """``run.group_size`` of them, by index, each followed by what its program branched off it;
    all, where a person had them branched (``stoker branch``)."""
    parent: RolloutId | None = None
    """Whom a person had them branched off, at one of its steps; ``None``: the run began them."""
    left_over: tuple[GroupRollout, ...] = ()
    """With ``run.spare``: who was begun and is not of the group, stragglers and failed ones."""
    abandoned: tuple[int, ...] = ()
    """Versions in it of a policy that a restore gave up: its samples are of another line."""
    mixed: tuple[str, ...] = ()
    """What its rollouts were not made alike with; empty unless ``groups(mixed=True)``."""

    @property
    def delivery(self) -> str:
        """Id of this hand-out; what ``commit`` takes."""
        return f"{self.group_id}.{self.number}"

    @property
    def redelivered(self) -> int:
        """How often it was handed out before."""
        return self.number - 1

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Versions that sampled its tokens, rising."""
        return tuple(sorted({v for one in self.rollouts for v in one.policy_versions}))


class GroupReader(msgspec.Struct, frozen=True):
    """Makes groups of journals."""

    size: int
    fetch: Fetch
    facts: RunFacts

    def read(self, group: GroupId, number: int, journals: list[list[JournalEvent]]) -> Group:
        """Return the hand-out ``number`` of a complete group; ``journals`` of all that ended."""
        read = [self._rollout(events) for events in journals]
        samples: dict[RolloutId, list[FinishedRollout]] = {}
        for one in sorted(read, key=_order):
            samples.setdefault(one.standing.admitted.sample, []).append(one)
        # Sorted by what does not change: the same group comes out whenever it is read.
        ordered = sorted(samples.values(), key=_precedence)
        branched = ordered[0][0].standing.admitted.branched
        parent = None if branched is msgspec.UNSET else branched.parent
        size = self.size if parent is None else len(ordered)
        chosen = sorted((one for some in ordered[:size] for one in some), key=_order)
        left = sorted((one for some in ordered[size:] for one in some), key=_order)
        return Group(
            group_id=group,
            number=number,
            task=chosen[0].standing.admitted.task,
            rollouts=tuple(self._with_rows(one) for one in chosen),
            left_over=tuple(_bare(one) for one in left),
            parent=parent,
            mixed=disagreements(chosen),
        )

    def _rollout(self, events: list[JournalEvent]) -> FinishedRollout:
        try:
            return read_rollout(events, self.fetch)
        except ArtifactDamaged as error:
            return _damaged(read_rollout(events[:1] + events[-1:], self.fetch), error)

    def _with_rows(self, rollout: FinishedRollout) -> GroupRollout:
        try:
            rows = tuple(rows_of(rollout, self.fetch, self.facts))
            sampled = [said for _, said in returned(rollout.standing, self.fetch)]
        except ArtifactDamaged as error:
            return _bare(_damaged(rollout, error))
        versions = sorted({span.policy_version for said in sampled for span in said.spans})
        return msgspec.structs.replace(_bare(rollout), rows=rows, policy_versions=tuple(versions))


def _bare(rollout: FinishedRollout) -> GroupRollout:
    admitted, finished = rollout.standing.admitted, rollout.finished
    return GroupRollout(
        rollout_id=admitted.rollout_id,
        index=admitted.index,
        sample=admitted.sample,
        outcome=finished.outcome,
        steps=finished.steps,
        seconds=finished.at - admitted.at,
    )


def _damaged(rollout: FinishedRollout, error: ArtifactDamaged) -> FinishedRollout:
    """Return a rollout whose record cannot be read: a reward without its tokens trains on a lie."""
    failed = Outcome(kind=OutcomeKind.FAILED, fault=error.record())
    finished = msgspec.structs.replace(rollout.finished, outcome=failed)
    return msgspec.structs.replace(rollout, finished=finished)


def _order(rollout: FinishedRollout) -> tuple[int, int, RolloutId]:
    """Where it stands in its group: by index, whoever was branched off after its parent."""
    admitted = rollout.standing.admitted
    branched = admitted.branched
    generation = 0 if branched is msgspec.UNSET else branched.generation
    return admitted.index, generation, admitted.rollout_id


def _precedence(sample: list[FinishedRollout]) -> tuple[bool, float, int]:
    """Who is of the group: samples of which one ended by itself, in the order they ended."""
    counts = any(one.finished.outcome.kind in _BY_ITSELF for one in sample)
    return not counts, max(one.finished.at for one in sample), sample[0].standing.admitted.index
