import contextlib
import io
import os
from pathlib import Path

import pytest

from stoker.cli.main import main


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("run_old", "run_new", "other", "run_empty")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        if name != "run_empty":
            (folder / "run.json").write_text("{}")
            os.utime(folder / "run.json", (age, age))
    return tmp_path / "runs"


def completed(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what bash would be offered at the end of ``line``."""
    words = line.split(" ")
    monkeypatch.setenv("_STOKER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    offered = io.StringIO()
    with contextlib.redirect_stdout(offered), pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    return offered.getvalue().split()


@pytest.mark.parametrize(
    "typed", ["show ", "status ", "export ", "replay ", "worker --run ", "ledger stats --run "]
)
def test_ids_of_runs_complete_the_latest_first(
    typed: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed(f"stoker {typed}run_", monkeypatch) == ["run_new", "run_old"]
    assert completed(f"stoker {typed}", monkeypatch) == ["other", "run_new", "run_old"]


def test_they_come_from_the_directory_that_was_named(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.rename(runs.parent / "elsewhere")
    assert completed("stoker show run_", monkeypatch) == []
    assert completed("stoker show --runs elsewhere run_n", monkeypatch) == ["run_new"]


def test_commands_and_choices_complete(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed("stoker confi", monkeypatch) == ["config"]
    assert completed("stoker export x --format p", monkeypatch) == ["parquet"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    with contextlib.suppress(SystemExit):
        main(["--show-completion", shell])
    assert "_STOKER_COMPLETE" in capsys.readouterr().out
