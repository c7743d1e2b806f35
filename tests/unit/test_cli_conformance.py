import json
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import main

BROKEN = """
from stoker.broker.base import CancelDisposition, CancelReply
from stoker.broker.memory import MemoryLedger
from stoker.testing.engines import MemoryEngine


class Deaf(MemoryLedger):
    async def cancel(self, request):
        return CancelReply(
            dispositions={one: CancelDisposition.CANCELLED for one in request.action_ids}
        )


class DeafEngine(MemoryEngine):
    "Says that it cancelled and does nothing of the kind."

    async def open(self):
        self._store = self._opened()
        self._ledger = Deaf(self._limits, self._clock, self._store)
        return self._ledger


class Forgetful(MemoryEngine):
    "Loses everything with its process."

    async def crash(self):
        self._store = None
        return await super().crash()

    advance = None


class Silent:
    def __init__(self, limits, place):
        pass

    async def open(self):
        raise RuntimeError("no server to be found")

    async def close(self):
        pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "broken_engines.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def examined(name: str, capsys: pytest.CaptureFixture[str], code: int) -> dict[str, Any]:
    assert main(["conformance", "--engine", name, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def verdicts(found: dict[str, Any], verdict: str) -> set[str]:
    return {one["invariant"] for one in found["findings"] if one["verdict"] == verdict}


@pytest.mark.parametrize("engine", ["MemoryEngine", "SqliteEngine"])
def test_our_engines_keep_everything(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = examined(f"stoker.testing.engines:{engine}", capsys, 0)
    assert verdicts(found, "kept") == {*(f"I{n}" for n in range(1, 14)), "tickets"}
    assert verdicts(found, "broken") == verdicts(found, "not shown") == set()
    assert found["capabilities"]["engine"] in ("memory", "sqlite")


def test_a_broken_promise_is_named_with_the_line_that_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = examined("broken_engines:DeafEngine", capsys, 1)
    assert verdicts(found, "broken") == {"I10"}
    [cancel, *_] = [one for one in found["findings"] if one["verdict"] == "broken"]
    assert cancel["promise"] == "Cancel queued leased running and completed"
    assert "ledger_contract.py" in cancel["why"]
    assert "assert reply.dispositions == {" in cancel["why"]


def test_an_engine_that_forgets_breaks_what_a_crash_must_not_and_says_what_it_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = examined("broken_engines:Forgetful", capsys, 1)
    assert {"I1", "I3", "I8", "I11", "I13"} <= verdicts(found, "broken")
    lacking = [one for one in found["findings"] if one["verdict"] == "not shown"]
    assert {one["invariant"] for one in lacking} == {"I4", "I9"}
    assert {one["why"] for one in lacking} == {"the engine has no advance()"}
    assert "I7" in verdicts(found, "kept")
    main(["conformance", "--engine", "broken_engines:Forgetful"])
    assert "not shown" in capsys.readouterr().out


def test_an_engine_that_cannot_even_be_opened_keeps_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = examined("broken_engines:Silent", capsys, 1)
    assert found["capabilities"] is None
    assert verdicts(found, "kept") == set()
    assert "no server to be found" in found["findings"][0]["why"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken_engines", "is not MODULE:CLASS"),
        ("no_such_module:Engine", "cannot be imported"),
        ("broken_engines:Nothing", "cannot be imported"),
        ("json:dumps", "is no engine"),
        ("pathlib:PurePath", "has no open and no close"),
    ],
)
def test_what_is_no_engine_is_refused(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", "--engine", name]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""
