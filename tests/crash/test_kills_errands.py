"""Fifty seeded kills in runs of two hundred rollouts whose tools leave a line for each execution.

Victims (coordinator, program host, worker, ledger owner), signals (SIGKILL, SIGSTOP past the lease)
and moments (how many lines the tools have left) all come from the seed. What a killed run must
share with one that was left alone: tokens, observations and rewards of every rollout without an
*ambiguous* action. What is counted at the tool: a finished call ran once; ``external`` at most
once, whatever happened.
"""

import random
import signal
import stat
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stoker.errors import EffectAmbiguous
from stoker.model.action import Effect
from stoker.model.events import Delivered, Verb
from stoker.model.outcome import OutcomeKind
from support import runs_errands as errands
from support.runs import LEASE, ROLES, Rig, merged, rig, tell
from support.runs_kills import Kill, survive
from support.runs_records import Records, Rollout, read

ROLLOUTS = 200
KILLS = 10
SEEDS = [11, 12, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (13, 14, 15))]


def plan(seed: int) -> list[Kill]:
    """Return the kills of one run: every role under both signals, and two more."""
    draw = random.Random(seed)
    blows = [(role, number) for role in ROLES for number in (signal.SIGKILL, signal.SIGSTOP)]
    blows += [draw.choice(blows) for _ in range(KILLS - len(blows))]
    draw.shuffle(blows)
    whole = (ROLLOUTS - errands.TAIL) * errands.LINES
    moments = sorted(draw.sample(range(whole // 50, whole * 9 // 10), KILLS))
    return [
        Kill(lines, role, number, draw.randrange(4))
        for lines, (role, number) in zip(moments, blows, strict=True)
    ]


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that boxes may reach: pytest's own lie below one that only we may enter."""
    with tempfile.TemporaryDirectory(prefix="stoker-outside-") as name:
        yield open_folder(Path(name))


def open_folder(folder: Path) -> Path:
    folder.chmod(0o777)
    log = folder / "tools.log"
    log.touch()
    log.chmod(0o666)
    assert stat.S_IMODE(folder.parent.stat().st_mode) & stat.S_IXOTH, f"{folder} is out of reach"
    return folder


def errand_rig(folder: Path, outside: Path, count: int) -> dict[str, Any]:
    boxed = errands.namespaces_work()
    return {
        "program": errands.PROGRAM,
        "model": errands.MODEL,
        "tasks": errands.tasks(
            count, outside / "tools.log", boxed_every=10 if boxed else 0, gate=folder / "gate"
        ),
        "log": outside / "tools.log",
        "settings": merged(
            errands.boxed_class(outside) if boxed else {},
            {"workers": {"count": 2}, "admission": {"active_start": 64}},
        ),
    }


class Told(NamedTuple):
    """What a whole run left."""

    records: Records
    lines: list[str]
    asked: dict[str, list[float]]
    """Model call → wall times at which the model was asked."""


def told(one: Rig) -> Told:
    asked = defaultdict(list)
    for line in (one.folder / "model.log").read_text().splitlines():
        request_id, at = line.split()
        asked[request_id].append(float(at))
    return Told(read(one.run.path), one.lines(), asked)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    folder = tmp_path_factory.mktemp("reference")
    with tempfile.TemporaryDirectory(prefix="stoker-outside-") as name:
        outside = open_folder(Path(name))
        with rig(folder, **errand_rig(folder, outside, ROLLOUTS)) as one:
            one.open_gate()
            one.start()
            one.finish()
            yield told(one)


@pytest.mark.parametrize("seed", SEEDS)
def test_b4_killed_run_equals_one_left_alone(
    seed: int, tmp_path: Path, outside: Path, reference: Told
) -> None:
    tell(f"seed {seed}: {plan(seed)}")
    with rig(tmp_path, **errand_rig(tmp_path, outside, ROLLOUTS)) as one:
        survive(one, plan(seed), held_seconds=LEASE * 1.5)
        after = told(one)
        assert one.report()["snapshot"]["boxes_leaked"] == 0
    same_but_for_ambiguous(after.records, reference.records)
    counted_at_the_tool(after)
    finished_model_calls_not_asked_again(after, one.coordinators)


def same_but_for_ambiguous(killed: Records, alone: Records) -> None:
    assert alone.stats.unacknowledged == killed.stats.unacknowledged == 0
    assert set(killed.rollouts) == set(alone.rollouts)
    for place, expected in alone.rollouts.items():
        rollout = killed.rollouts[place]
        if ambiguous(rollout):
            assert rollout.outcome.kind is OutcomeKind.AMBIGUOUS, (place, rollout.outcome)
            continue
        assert rollout.outcome == expected.outcome, place
        assert rollout.outcome.kind is OutcomeKind.COMPLETED, place
        gate = errands.WAITING if "gate" in rollout.task.data else None
        seen = rollout.seen(killed.store, gate=gate)
        assert seen == expected.seen(alone.store, gate=gate), place


def ambiguous(rollout: Rollout) -> bool:
    codes = {e.fault.code for e in rollout.events if isinstance(e, Delivered) and e.fault}
    return EffectAmbiguous.code in codes


def counted_at_the_tool(after: Told) -> None:
    counted = Counter(line.split()[0] for line in after.lines)
    actions = after.records.actions
    assert set(counted) <= set(actions), "a tool ran for an action the ledger never had"
    again = 0
    for rollout in after.records.rollouts.values():
        for event in rollout.events:
            if not isinstance(event, Delivered) or event.action_id is None:
                continue
            view, ran = actions[event.action_id], counted[event.action_id]
            if event.path == now_path(rollout):
                continue
            assert ran <= view.deliveries, (event, view)
            if event.status == "ok":
                assert ran >= 1, (event, view)
            if view.deliveries == 1 or view.action.effect is Effect.EXTERNAL:
                assert ran <= 1, (event, view)
            again += max(0, ran - 1)
    tell(f"{sum(counted.values())} executions, {again} of them repeated")


def now_path(rollout: Rollout) -> str:
    """Return the call that carries the recorded time: its tool leaves no line."""
    calls = [p for p, issued in rollout.standing.issued.items() if issued.verb is Verb.CALL]
    return calls[4]


def finished_model_calls_not_asked_again(after: Told, coordinators: int) -> None:
    for rollout in after.records.rollouts.values():
        for event in rollout.events:
            if not isinstance(event, Delivered):
                continue
            if rollout.standing.issued[event.path].verb is Verb.GENERATE:
                asked = after.asked[f"{rollout.rollout_id}/{event.path}"]
                assert 1 <= len(asked) <= coordinators, (rollout.rollout_id, event.path)
                assert max(asked) <= event.at, (rollout.rollout_id, event.path)
