"""``stoker export`` over a ledger in memory: what is left out, refused, said on the way."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.broker.base import (
    JournalReply,
    JournalRequest,
    RolloutsReply,
    RolloutsRequest,
    RolloutSummary,
)
from stoker.cli import export, ledger_access
from stoker.cli.main import main
from stoker.coordinator.record import RunDirectory, RunRecord
from stoker.model.events import Admitted, Finished, JournalEvent, encode_event
from stoker.model.ids import RolloutId, RunId
from stoker.model.value import Value
from support.exports import Asked, journal, sampled

Journals = dict[RolloutId, list[JournalEvent]]
RUN = "run_1"


class Books:
    """Answers what an export asks a ledger."""

    def __init__(self, journals: Journals) -> None:
        self.journals = journals
        self.read: list[RolloutId] = []

    async def rollouts(self, request: RolloutsRequest) -> RolloutsReply:
        ids = list(self.journals)
        start = ids.index(request.after) + 1 if request.after else 0
        chosen = ids[start : start + request.limit]
        return RolloutsReply(rollouts=tuple(map(self.summary, chosen)))

    def summary(self, rollout_id: RolloutId) -> RolloutSummary:
        events = self.journals[rollout_id]
        last = encode_event(events[-1]) if isinstance(events[-1], Finished) else None
        return RolloutSummary(
            rollout_id=rollout_id, seq=len(events), first=encode_event(events[0]), last=last
        )

    async def journal(self, request: JournalRequest) -> JournalReply:
        self.read.append(request.rollout_id)
        stored = map(encode_event, self.journals[request.rollout_id])
        return JournalReply(events=tuple(stored))


def rollout(name: str, *, digest: str = "one", finished: bool = True) -> Journals:
    whole = journal([Asked("0", None, sampled([1], [2, 3]))])
    first, *rest = whole if finished else whole[:-1]
    assert isinstance(first, Admitted)
    rollout_id = RolloutId(name)
    admitted = msgspec.structs.replace(first, rollout_id=rollout_id, program_digest=digest)
    return {rollout_id: [admitted, *rest]}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "runs" / RUN)
    run.create()
    run.write_record(
        RunRecord(
            run_id=RunId(RUN), stoker_version="0", created=0.0, program="/p.py", program_name="p",
            program_version="1", program_digest="one", model="scripted:m", model_digest="m",
            tasks_digest="t", tasks_count=1, settings={}, settings_digest="s",
        )
    )  # fmt: skip
    return tmp_path


def holding(monkeypatch: pytest.MonkeyPatch, *journals: Journals) -> Books:
    books = Books({name: events for one in journals for name, events in one.items()})

    @contextlib.asynccontextmanager
    async def ledger_of(run: RunDirectory) -> AsyncIterator[Books]:
        yield books

    monkeypatch.setattr(ledger_access, "ledger_of", ledger_of)
    return books


def exported(place: Path, *more: str) -> tuple[int, list[Any]]:
    code = main(["export", RUN, "--out", "rows.jsonl", *more])
    file = place / "rows.jsonl"
    return code, [json.loads(line) for line in file.read_text().splitlines()] if code == 0 else []


def left_over(place: Path) -> Sequence[str]:
    return sorted(one.name for one in place.iterdir())


def test_rollouts_without_an_outcome_are_left_out_and_counted(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    books = holding(monkeypatch, rollout("rol_a"), rollout("rol_b", finished=False))
    code, rows = exported(place)
    assert code == 0
    assert [row["rollout_id"] for row in rows] == ["rol_a"]
    assert capsys.readouterr().out.splitlines() == [
        "rows.jsonl: 1 row of 1 rollout, 2 sampled of 3 tokens",
        "no rows: 1 rollout not finished",
    ]
    assert books.read == ["rol_a"], "an open journal is not read"


@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
def test_mixed_digests_are_refused_and_leave_no_file(
    format_: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if format_ == "parquet":
        pytest.importorskip("pyarrow", reason="pip install 'stoker[export]'")
    holding(monkeypatch, rollout("rol_a"), rollout("rol_b", digest="two"))
    code, _ = exported(place, "--format", format_)
    said = capsys.readouterr()
    assert code == 2
    assert said.err == (
        "stoker: run run_1 is mixed: program repair is one in rol_a and two in rol_b; nothing was "
        "written; export them together with --mixed (each row carries its digests)\n"
    )
    assert left_over(place) == ["runs"]


def test_mixed_digests_are_exported_when_asked_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding(monkeypatch, rollout("rol_a"), rollout("rol_b", digest="two"))
    code, rows = exported(place, "--mixed")
    assert code == 0
    assert [row["program_digest"] for row in rows] == ["one", "two"]


def test_a_damaged_artifact_fails_the_export_and_leaves_no_file(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journals = rollout("rol_a")
    events = journals[RolloutId("rol_a")]
    events[2] = msgspec.structs.replace(events[2], value=Value(digest="ab" * 32, size_bytes=40_000))
    holding(monkeypatch, journals)
    code, _ = exported(place)
    assert code == 1
    assert "[artifact_damaged]" in capsys.readouterr().err
    assert left_over(place) == ["runs"]


def test_a_run_is_paged_through_rollout_by_rollout(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_access, "_PAGE", 2)
    books = holding(monkeypatch, *(rollout(f"rol_{number}") for number in range(5)))
    code, rows = exported(place)
    assert code == 0
    assert [row["rollout_id"] for row in rows] == list(books.journals)


def test_a_long_export_says_how_far_it_is_on_stderr(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "_TELL_SECONDS", 0.0)
    holding(monkeypatch, rollout("rol_a"), rollout("rol_b"))
    code, _ = exported(place, "--json")
    said = capsys.readouterr()
    assert code == 0
    assert said.err.splitlines() == ["1 rollout read, 1 row …", "2 rollouts read, 2 rows …"]
    assert json.loads(said.out)["rollouts"] == 2
