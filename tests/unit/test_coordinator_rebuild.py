"""A journal read back: turns, what is outstanding, what the coordinator keeps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from stoker.config.tree import WorkerSettings
from stoker.coordinator.calls import Call
from stoker.coordinator.environments import opened
from stoker.coordinator.rebuild import Standing, check_of, rebuild
from stoker.coordinator.resuming import Resumer
from stoker.errors import EnvironmentLost, InternalError
from stoker.journal.artifacts import ArtifactStore
from stoker.model.events import (
    Admitted,
    Delivered,
    Dropped,
    Finished,
    Issued,
    JournalEvent,
    Recovered,
    Restored,
    Tainted,
    Verb,
    Withdrawn,
    decode_event,
    encode_event,
)
from stoker.model.ids import CallPath, GroupId, RolloutId, RunId, WorkerId, action_id
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.task import Task
from stoker.model.value import Value, canonical_bytes, inline_value
from stoker.rollout.arguments import EnvironmentArguments

ROLLOUT = RolloutId("rol_1")
ADMITTED = Admitted(
    run_id=RunId("run_1"),
    rollout_id=ROLLOUT,
    group_id=GroupId("grp_1"),
    index=0,
    task=Task(task_id="t"),
    program="p",
    program_version="1",
    program_digest="d",
    python="3.11",
    hash_seed=0,
    epoch="epo_1",
    at=100.0,
    timeout_seconds=60.0,
)


def issued(path: str, verb: Verb) -> Issued:
    action = action_id(ROLLOUT, CallPath(path)) if verb is Verb.RUN else None
    return Issued(
        path=CallPath(path), verb=verb, digest=path, arguments=inline_value(b"a"), action_id=action
    )


def delivered(path: str, at: float) -> Delivered:
    return Delivered(path=CallPath(path), value=inline_value(path.encode()), at=at)


def fetch(value: Value) -> bytes:
    assert value.inline is not None
    return value.inline


EVENTS: list[JournalEvent] = [
    ADMITTED,
    issued("0", Verb.GENERATE),
    delivered("0", 101.0),
    issued("1", Verb.RUN),
    issued("2", Verb.TIMER),
    delivered("1", 102.0),
    Tainted(path=CallPath("1"), fault=EnvironmentLost("gone").record()),
    issued("3", Verb.RUN),
    Withdrawn(path=CallPath("2")),
    delivered("3", 103.0),
    Recovered(code="environment_lost"),
    Restored(
        path=CallPath("9"), generation=1, worker_id=WorkerId("wrk_1"), reason="environment_lost"
    ),
    issued("4", Verb.GENERATE),
]


def stand(count: int) -> Standing:
    return rebuild((decode_event(encode_event(event)) for event in EVENTS[:count]), fetch)


def test_every_prefix_counts_its_entries() -> None:
    for count in range(1, len(EVENTS) + 1):
        assert stand(count).seq == count


def test_turns_are_a_result_and_the_calls_that_followed() -> None:
    turns = stand(len(EVENTS)).turns
    assert [turn.result.path if turn.result else None for turn in turns] == [None, "0", "1", "3"]
    assert [[call.path for call in turn.calls] for turn in turns] == [
        ["0"],
        ["1", "2"],
        ["3"],
        ["4"],
    ]
    assert turns[2].withdrawn == ("2",)


def test_outstanding_is_issued_and_neither_delivered_nor_withdrawn() -> None:
    expected = [
        [],
        ["0"],
        [],
        ["1"],
        ["1", "2"],
        ["2"],
        ["2"],
        ["2", "3"],
        ["3"],
        [],
        [],
        [],
        ["4"],
    ]
    for count, paths in enumerate(expected, start=1):
        assert list(stand(count).outstanding) == paths


def test_taint_lasts_until_recovered() -> None:
    assert list(stand(7).tainted) == ["environment_lost"]
    assert list(stand(len(EVENTS)).tainted) == []


def test_a_restoration_keeps_generation_and_holder() -> None:
    restored = stand(len(EVENTS)).restored[CallPath("9")]
    assert (restored.generation, restored.worker_id) == (1, "wrk_1")


def test_time_without_a_coordinator_counts_for_pauses_and_not_for_timeouts(tmp_path: Path) -> None:
    clock = SimpleNamespace(now=lambda: SimpleNamespace(wall=1000.0))
    resumer = Resumer(
        cast("Any", None), ArtifactStore(tmp_path), cast("Any", clock), WorkerSettings()
    )
    standing = stand(7)
    assert standing.at == 102.0

    def waited(verb: Verb) -> float:
        call = Call(path=CallPath("2"), verb=verb, arguments=b"", issued_at=0.0)
        return resumer.waited(standing, call)

    assert (waited(Verb.TIMER), waited(Verb.SLEEP)) == (1.0, 899.0)


def test_no_pause_counts_for_a_rollouts_own_clock_however_many_there_were() -> None:
    week = 604_800.0
    back = [
        msgspec.structs.replace(delivered(path, at), paused_seconds=pause)
        for path, at, pause in (("0", 101.0 + week, week), ("1", 103.0 + 2 * week, week - 0.5))
    ]
    events: list[JournalEvent] = [
        ADMITTED,
        issued("0", Verb.GENERATE),
        issued("9", Verb.TIMER),
        back[0],
        issued("1", Verb.RUN),
        back[1],
    ]
    standing = rebuild(events, fetch)
    assert standing.ran == 3.5
    assert [standing.ran_at[CallPath(path)] for path in ("0", "9", "1")] == [0.0, 0.0, 1.0]


def test_calls_remember_the_time_of_their_turn() -> None:
    at = stand(len(EVENTS)).issued_at
    assert [at[CallPath(path)] for path in ("0", "1", "3", "4")] == [100.0, 101.0, 102.0, 103.0]


def test_a_dropped_result_is_no_longer_awaited() -> None:
    events = [*EVENTS[:4], Dropped(path=CallPath("1"))]
    assert list(rebuild(events, fetch).outstanding) == []


def test_an_outcome_ends_it() -> None:
    outcome = Outcome(kind=OutcomeKind.COMPLETED, reward=1.0)
    standing = rebuild([*EVENTS, Finished(outcome=outcome, at=104.0)], fetch)
    assert standing.finished is not None
    assert standing.finished.outcome == outcome


def test_an_environment_that_reaches_outside_is_never_rebuilt_by_repeating() -> None:
    call = Call(
        path=CallPath("0"),
        verb=Verb.ENVIRONMENT,
        arguments=canonical_bytes(EnvironmentArguments(baseline="python", worker_class=None)),
        issued_at=0.0,
    )

    def restorable(**fast: Any) -> bool:
        workers = WorkerSettings.model_validate({"classes": {"fast": fast}})
        return opened(ROLLOUT, call, workers).restorable()

    assert restorable()
    assert not restorable(network=[{"host": "pypi.org"}])
    assert not restorable(mounts=[{"source": "/data", "target": "/data", "writable": True}])
    assert restorable(mounts=[{"source": "/data", "target": "/data"}])


def test_what_does_not_begin_with_an_admission_is_no_journal() -> None:
    with pytest.raises(InternalError, match="admission"):
        rebuild(EVENTS[1:], fetch)


def test_a_check_replay_carries_nothing_out() -> None:
    standing = stand(len(EVENTS))
    told = check_of(standing, standing.turns)
    assert (told.checking, told.history) == (True, tuple(standing.turns))
