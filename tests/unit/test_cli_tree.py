"""What `stoker show --tree` tells of environments, whatever order their boxes were ready in."""

import itertools

import pytest

from stoker.cli.summaries import inline_only
from stoker.cli.timeline import lines
from stoker.cli.tree import lineage
from stoker.model.checkpoint import Checkpoint
from stoker.model.events import BRANCHED, Delivered, JournalEvent, Restored, Verb
from stoker.model.ids import CallPath, WorkerId
from stoker.model.tools import OpenResult
from stoker.rollout.arguments import BranchedOff, EnvironmentArguments
from support.journals import ADMITTED, issued, value

BRANCHES = ("3.0.0", "3.1.0", "3.10.0")


def opened(path: str) -> Delivered:
    result = OpenResult(isolation="process", rung="", baseline_digest="b")
    return Delivered(path=CallPath(path), value=value(result), at=1.0)


def asked(path: str, parent: str | None = None, generation: int = 0) -> JournalEvent:
    if parent is None:
        begun = EnvironmentArguments(baseline="python", worker_class=None)
    else:
        kept = Checkpoint(digest="c", parent="b", generation=generation)
        begun = EnvironmentArguments(
            baseline="python",
            worker_class=None,
            begins=BranchedOff(environment=CallPath(parent), checkpoint=kept),
        )
    return issued(path, Verb.ENVIRONMENT, begun)


@pytest.mark.parametrize("order", list(itertools.permutations(BRANCHES)))
def test_branches_stand_in_the_programs_order(order: tuple[str, ...]) -> None:
    events = [ADMITTED, asked("0"), opened("0"), *(asked(path, "0") for path in BRANCHES)]
    # The deepest has the lowest path: a coroutine begun earlier was given a branch to go on from.
    events += [*map(opened, order), asked("2.5", "3.10.0", 1), opened("2.5")]
    told = lineage(events, inline_only).environments
    assert [one.path for one in told] == ["0", *BRANCHES, "2.5"]


def test_a_branch_s_own_box_is_none_that_was_lost() -> None:
    def restored(reason: str, generation: int) -> Restored:
        return Restored(
            path=CallPath("0"), generation=generation, worker_id=WorkerId("wrk_1"), reason=reason
        )

    events = [ADMITTED, asked("0"), opened("0"), restored(BRANCHED, 1)]
    assert [one.rebuilt for one in lineage(events, inline_only).environments] == [0]
    events.append(restored("environment_lost", 2))
    assert [one.rebuilt for one in lineage(events, inline_only).environments] == [1]
    own, lost = (line.detail for line in lines(events) if line.what == "restored")
    assert own.startswith("environment 0, generation 1: a box of this branch's own")
    assert lost == "environment 0, generation 2: environment_lost"
