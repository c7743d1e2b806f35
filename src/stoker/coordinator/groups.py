"""When a group is complete, who of it counts, and what cutting the slow ones off costs.

With ``run.spare`` = k, n + k rollouts of a task are begun and the first n that end *by themselves*
(completed or truncated) complete the group; the others are cancelled as stragglers. A fault takes
nobody's place while another rollout may still end by itself. Who counts is decided from
journals alone when it is handed out (``training.groups``), so that every hand-out is the same.

Where programs branch rollouts (``ctx.branch``), all of a rollout's branches count with it as *one*
of the n: it has ended when they all have, and by itself when one of them has.

The slow ones are the long ones, so what is kept is shorter than what was begun: ``LengthBias`` says
by how much at least. Pure; one partition's; since this coordinator began.
"""

from typing import NamedTuple

import msgspec

from stoker.model.events import Admitted
from stoker.model.ids import GroupId, RolloutId
from stoker.model.outcome import Outcome, OutcomeKind

STRAGGLER = "straggler: its group was complete without it"
"""Reason of rollouts that are cancelled because enough others had ended."""
_BY_ITSELF = frozenset({OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED})


class LengthBias(msgspec.Struct, kw_only=True):
    """What was kept and what was cut off, of groups that were complete before all had ended."""

    groups: int = 0
    """Complete groups with somebody cut off."""
    kept: int = 0
    kept_tokens: int = 0
    """Sampled, of those that were kept."""
    cut: int = 0
    """Stragglers cancelled."""
    cut_tokens: int = 0
    """Sampled, of those, until they were cut: they would have grown longer."""

    @property
    def tokens_bias_at_least(self) -> float | None:
        """By which share what was begun is longer than what is kept, at least, in mean tokens.

        0.25: the rollouts of these groups are at least a quarter longer than the trainer sees.
        ``None``: nobody was cut off. Negative where whoever was cut off had hardly begun.
        """
        if not self.cut or not self.kept_tokens:
            return None
        mean_kept = self.kept_tokens / self.kept
        return (self.kept_tokens + self.cut_tokens) / (self.kept + self.cut) / mean_kept - 1

    def told(self) -> str:
        """Return it as a line for people."""
        share = self.tokens_bias_at_least
        longer = (
            "" if share is None else f"; begun rollouts are ≥ {share:.0%} longer than kept ones"
        )
        groups = f"{self.groups} group" + "s" * (self.groups != 1)
        return f"{self.cut} cut off as stragglers in {groups}{longer}"


class _Ended(NamedTuple):
    """One outcome."""

    by_itself: bool
    at: float
    sample: RolloutId
    """Whom it counts with: itself, but for a branch that a program made."""


class Groups:
    """Counts outcomes by group; ``listening``: remembers who is of them, for a trainer."""

    def __init__(self, size: int, spare: int, *, listening: bool = False) -> None:
        self._size = size
        self._spare = spare
        self._listening = listening
        self._ended: dict[GroupId, dict[RolloutId, _Ended]] = {}
        self._going: dict[GroupId, dict[RolloutId, RolloutId]] = {}
        """Branches that programs made and that have no outcome → whom they count with."""
        self._asked: dict[GroupId, set[RolloutId]] = {}
        """Groups of branches that a person asked for → who is of them."""
        self._tokens: dict[GroupId, list[int]] = {}
        """Of who ended by itself, while its group may yet cut somebody off."""
        self._unmeasured: set[GroupId] = set()
        """Groups of which somebody ended under an earlier coordinator."""
        self.complete: dict[GroupId, float] = {}
        """Group → wall time of the outcome that completed it."""
        self.bias = LengthBias()

    def asked(self, admitted: Admitted) -> None:
        """Know of a branch that a person asked for: its group waits for each that it knows of."""
        self._asked.setdefault(admitted.group_id, set()).add(admitted.rollout_id)

    def grows(self, admitted: Admitted) -> None:
        """Wait for a branch that a program made: its group is not complete without its outcome."""
        if admitted.group_id in self.complete and admitted.group_id not in self._ended:
            return  # a straggler's
        going = self._going.setdefault(admitted.group_id, {})
        going[admitted.rollout_id] = admitted.sample

    def counted(self, admitted: Admitted, outcome: Outcome, *, at: float) -> None:
        """Count an outcome of before this coordinator, in any order; then ``settle``."""
        self._add(admitted, outcome, at, None)

    def settle(self) -> None:
        """See which groups are complete, once everything of before has been counted."""
        for group in list(self._ended):
            self._look(group)

    def ended(
        self, admitted: Admitted, outcome: Outcome, *, at: float, tokens: int | None = None
    ) -> bool:
        """Count an outcome of wall time ``at``; return whether it completes its group.

        ``tokens``: sampled by the rollout; ``None``: it ended under an earlier coordinator.
        """
        group = admitted.group_id
        if group in self.complete:
            self._late(admitted, outcome, at, tokens)
            return False
        self._add(admitted, outcome, at, tokens)
        return self._look(group)

    def _add(self, admitted: Admitted, outcome: Outcome, at: float, tokens: int | None) -> None:
        group = admitted.group_id
        self._note(admitted, outcome, at)
        if self._spare and outcome.kind in _BY_ITSELF:
            if tokens is None:
                self._unmeasured.add(group)
            self._tokens.setdefault(group, []).append(tokens or 0)

    def _note(self, admitted: Admitted, outcome: Outcome, at: float) -> None:
        ended = self._ended.setdefault(admitted.group_id, {})
        by_itself = outcome.kind in _BY_ITSELF
        ended[admitted.rollout_id] = _Ended(by_itself, at, admitted.sample)
        self._going.get(admitted.group_id, {}).pop(admitted.rollout_id, None)

    def _look(self, group: GroupId) -> bool:
        """Return whether ``group`` is complete, and note so."""
        whole = self._whole(group)
        if group in self._asked:
            complete = self._asked[group] <= whole.keys()
        else:
            own = sum(by_itself for by_itself, _ in whole.values())
            complete = own >= self._size or len(whole) >= self._size + self._spare
        if not complete:
            return False
        self.complete[group] = self._completed_at(group)
        if not self._listening:
            self._ended.pop(group)
            self._going.pop(group, None)
        return True

    def _whole(self, group: GroupId) -> dict[RolloutId, tuple[bool, float]]:
        """Return of each sample that has ended whole whether by itself, and when."""
        found: dict[RolloutId, tuple[bool, float]] = {}
        for rollout_id in self.members(group):
            by_itself, at, sample = self._ended[group][rollout_id]
            before, latest = found.get(sample, (False, at))
            found[sample] = before or by_itself, max(latest, at)
        return found

    def _completed_at(self, group: GroupId) -> float:
        """Return when a complete group became so; after a crash outcomes are counted in no order of
        time.
        """  # noqa: D205 - one thought
        whole = self._whole(group).values()
        own = sorted(at for by_itself, at in whole if by_itself)
        first = len(own) >= self._size and group not in self._asked
        return own[self._size - 1] if first else max(at for _, at in whole)

    def _late(self, admitted: Admitted, outcome: Outcome, at: float, tokens: int | None) -> None:
        group = admitted.group_id
        if group in self._ended:
            self._note(admitted, outcome, at)
            self.complete[group] = self._completed_at(group)
        cut = outcome.kind is OutcomeKind.CANCELLED and outcome.reason == STRAGGLER
        if cut and tokens is not None and group not in self._unmeasured:
            kept = self._tokens.pop(group, [])
            self.bias.groups += bool(kept)
            self.bias.kept += len(kept)
            self.bias.kept_tokens += sum(kept)
            self.bias.cut += 1
            self.bias.cut_tokens += tokens

    def members(self, group: GroupId) -> tuple[RolloutId, ...]:
        """Return every rollout of ``group`` of samples that have ended whole, left over or not.

        One that is cut off may end later: it changes nothing of who is of a complete group.
        """
        ended = self._ended[group]
        going = set(self._going.get(group, {}).values())
        whole = (one for one in ended if ended[one].sample in ended)
        return tuple(one for one in whole if ended[one].sample not in going)

    def take_over(self, fresh: "Groups") -> None:
        """Know again who is of groups that were forgotten; ``fresh`` has just counted them."""
        for group, at in fresh.complete.items():
            self.complete.setdefault(group, at)
            if group not in self._ended:  # with who goes on in it: they are not of it yet
                self._ended[group] = dict(fresh._ended[group])  # noqa: SLF001 - its own class
                self._going[group] = dict(fresh._going.get(group, {}))  # noqa: SLF001 - as above

    def forget(self, group: GroupId) -> None:
        """Remember no longer who is of ``group``: its trainer has it."""
        self._ended.pop(group, None)
        self._going.pop(group, None)
        self._asked.pop(group, None)
        self._tokens.pop(group, None)
        self._unmeasured.discard(group)
