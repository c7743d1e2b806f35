import io
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from stoker.cli.show import reader
from stoker.cli.timeline import document, timeline
from stoker.coordinator.record import RunDirectory
from stoker.journal.artifacts import ArtifactStore
from stoker.model.events import Delivered, JournalEvent, Verb
from stoker.model.ids import CallPath
from stoker.model.tools import RunRequest, RunResult, Stream
from stoker.model.value import canonical_bytes
from support.journals import OPENING, box, issued

LONG = b"begin\x1b[2J" + b"x" * 100_000 + b"the end"


def large(folder: Path) -> tuple[RunDirectory, list[JournalEvent]]:
    run = RunDirectory(folder)
    result = RunResult(exit_code=0, stdout=Stream(kept=LONG, total_bytes=len(LONG)))
    stored = ArtifactStore(run.artifacts).put(canonical_bytes(result))
    assert stored.inline is None
    asked = issued("1", Verb.RUN, box(RunRequest(argv=("cat", "big"))), "act_1")
    return run, [*OPENING, asked, Delivered(path=CallPath("1"), value=stored, status="ok")]


def shown(run: RunDirectory, events: list[JournalEvent]) -> str:
    console = Console(file=io.StringIO(), width=100, markup=False, highlight=False)
    console.print(timeline(events, reader(run)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_large_result_is_read_and_shown_shortened(tmp_path: Path) -> None:
    text = shown(*large(tmp_path))
    assert "cat big →" in text
    assert "begin\\x1b[2Jxxx" in text
    assert "xxxthe end" in text
    assert len(text) < 6000


def test_as_json_it_is_cut_and_says_of_how_much(tmp_path: Path) -> None:
    run, events = large(tmp_path)
    whole: Any = document(events, reader(run))
    value = whole["events"][-1]["value"]
    assert value["size_bytes"] > len(LONG)
    assert value["digest"]
    kept = value["shortened"]["stdout"]["kept"]
    assert kept.startswith("begin\x1b[2J")
    assert kept.endswith(f"… {len(LONG) - 2000} more bytes")
    assert len(msgspec.json.encode(whole)) < 10_000


def test_a_value_that_is_gone_leaves_the_rest_of_the_story(tmp_path: Path) -> None:
    run, events = large(tmp_path)
    for file in run.artifacts.rglob("*"):
        if file.is_file():
            file.unlink()
    text = shown(run, events)
    assert "cat big → [" in text
    assert "bytes, " in text
    whole: Any = document(events, reader(run))
    assert whole["events"][-1]["value"].keys() == {"digest", "size_bytes"}
