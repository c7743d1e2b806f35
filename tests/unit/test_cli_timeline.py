import json

import pytest

from stoker.cli.output import plain
from stoker.cli.summaries import arguments_text, result_text
from stoker.cli.timeline import Line, document, lines
from stoker.model.events import Verb
from stoker.model.value import Value, content_digest, inline_value
from support.journals import ADMITTED, CALLED, OPEN, OPENING, WHOLE, value


def by(what: str, path: str = "") -> Line:
    (line,) = (one for one in lines(WHOLE) if one.what == what and one.path == path)
    return line


def test_lines_stand_in_the_order_of_the_journal() -> None:
    assert [line.what for line in lines(WHOLE)] == [
        "admitted", "environment", "step 0", "generate", "late", "restored", "run", "reissued",
        "call", "tainted", "recovered", "withdrawn", "score", "completed",
    ]  # fmt: skip


def test_times_count_from_admission() -> None:
    assert by("environment", "0").at == 0.25
    assert by("completed").at == 5.5


def test_each_call_says_what_it_asked_and_got() -> None:
    assert by("environment", "0").detail == "python, 1 file → namespace (rung a), baseline b"
    assert "Fix it." in by("generate", "1").detail
    assert 'run_python({"code": "1"}) Let me see.' in by("generate", "1").detail
    assert "3 tokens, stop, policy 4" in by("generate", "1").detail
    assert "python -c 1 → " in by("run", "2").detail
    assert by("call", "3").detail.endswith("fault worker_lost: wrk_1 is gone")
    assert by("score", "5").detail == "f of solution.py → passed"


def test_attempts_waits_and_states_are_told() -> None:
    run = by("run", "2")
    assert (run.took, run.queue, run.run) == (2.5, 0.5, 1.5)
    assert run.detail.startswith("[attempt 2] python")
    assert by("call", "3").detail.startswith("[ambiguous] fetch(")
    assert by("completed").detail == "reward 1 · 1 step, 4 actions"


def test_what_is_outstanding_comes_last_and_only_while_open() -> None:
    *_, last = lines(OPEN)
    assert (last.path, last.detail) == ("6", "[outstanding] make({}) [pure]")


def test_the_document_holds_every_event_with_values_opened() -> None:
    loaded = json.loads(json.dumps(document(WHOLE)))["events"]
    assert [event["type"] for event in loaded[:3]] == ["admitted", "issued", "delivered"]
    assert loaded[1]["arguments"]["baseline"] == "python"
    assert loaded[8]["value"]["stdout"]["kept"] == {"base64": "G1sySmJvbyBbcmVkXf8="}
    assert len(loaded) == len(WHOLE)


def test_values_elsewhere_or_damaged_are_told_by_size_and_digest() -> None:
    elsewhere = Value(digest=content_digest(b"x"), size_bytes=40_000)
    damaged = inline_value(b"\xc1")
    for verb in Verb:
        assert "40000 bytes" in arguments_text(verb, elsewhere)
        assert "40000 bytes" in result_text(verb, elsewhere)
        assert "1 bytes" in arguments_text(verb, damaged)
        assert "1 bytes" in result_text(verb, damaged)


def test_results_without_a_record_of_their_own() -> None:
    assert result_text(Verb.CALL, value(CALLED)) == "{'answer': 42}"
    assert result_text(Verb.LOCAL, value([1, "x"])) == "[1, 'x']"
    assert result_text(Verb.SLEEP, value(None)) == ""
    assert result_text(None, None) == ""


@pytest.mark.parametrize("events", [[], [ADMITTED], OPENING[1:]])
def test_a_torn_journal_is_still_shown(events: list[object]) -> None:
    assert plain(document(events)) is not None  # type: ignore[arg-type]
    list(lines(events))  # type: ignore[arg-type]
