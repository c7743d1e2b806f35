from pathlib import Path

import pytest
from typer import BadParameter

from stoker import __version__
from stoker.cli import main as cli
from stoker.cli.run import program_of
from stoker.errors import BadInput, LedgerUnavailable, ProgramInvalid


def outcome(
    capsys: pytest.CaptureFixture[str], *arguments: str, raises: Exception | None = None
) -> tuple[int, str, str]:
    if raises is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cli, "app", lambda *_args, **_keys: (_ for _ in ()).throw(raises))
            code = cli.main(arguments)
    else:
        code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "--version") == (0, f"stoker {__version__}\n", "")


@pytest.mark.parametrize(
    ("raised", "code", "sentence"),
    [
        (BadInput("There is no such thing."), 2, "There is no such thing."),
        (LedgerUnavailable("It is gone."), 1, "It is gone. [ledger_unavailable]"),
        (PermissionError(13, "Permission denied", "/x"), 1, "Permission denied: /x"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_expected_errors_are_one_sentence(
    capsys: pytest.CaptureFixture[str], raised: Exception, code: int, sentence: str
) -> None:
    expected = f"stoker: {sentence}\n" if sentence else ""
    assert outcome(capsys, "status", raises=raised) == (code, "", expected)


def test_debug_shows_the_traceback_and_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "--debug", "x", raises=BadInput("No."))
    assert (code, out) == (2, "")
    assert err.startswith("Traceback")
    assert err.endswith("stoker: No.\n")


def test_a_bug_shows_its_traceback_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(capsys, "x", raises=RuntimeError("oops"))
    assert code == 1
    assert "RuntimeError: oops" in err
    assert "bug of Stoker" in err


def test_what_an_error_quotes_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = outcome(capsys, "x", raises=BadInput("bad \x1b[2J\nname"))
    assert err == "stoker: bad \\x1b[2J\\nname\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("frobnicate",), "No such command 'frobnicate'. See: stoker --help"),
        (("run", "x.py", "--taks", "t"), "See: stoker run --help"),
        (("run", "x.py"), "Missing option '--tasks'"),
        (("bench", "step", "--repeat", "0"), "See: stoker bench step --help"),
    ],
)
def test_usage_errors_point_to_the_help(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    code, out, err = outcome(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_program_names(tmp_path: Path) -> None:
    plain = tmp_path / "p.py"
    odd = tmp_path / "odd:name.py"
    for file in (plain, odd):
        file.write_text("")
    assert program_of(str(plain)) == (plain, None)
    assert program_of(f"{plain}:repair") == (plain, "repair")
    assert program_of(str(odd)) == (odd, None)
    with pytest.raises(ProgramInvalid, match=r"no program file .*absent\.py\."):
        program_of(f"{tmp_path}/absent.py:repair")


def test_a_question_keeps_its_own_mark(capsys: pytest.CaptureFixture[str]) -> None:
    asked = BadParameter("Did you mean 'run'?")
    code, _, err = outcome(capsys, "x", raises=asked)
    assert code == 2
    assert "Did you mean 'run'? See: stoker --help" in err
