"""The command ``stoker``: its groups, and what becomes of errors.

Expected errors are one sentence on stderr, never a traceback. Exit codes: 0 done · 1 it failed ·
2 the input cannot be used, nothing was started · 3 stopped with work left, resumable · 130
interrupted. A bug of ours shows its traceback, since nobody could report it otherwise.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from stoker import __version__
from stoker.cli import (
    baselines,
    bench,
    branch,
    cancel,
    config,
    conformance,
    doctor,
    export,
    gateway,
    ledger,
    plan,
    replay,
    runs,
    show,
    status,
    worker,
)
from stoker.cli import run as run_command
from stoker.cli.text import clean
from stoker.errors import EXIT_BAD_INPUT, BadInput, StokerError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

# typer's usage errors have one base, which some versions keep in click and some in typer.
UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]

_HELP = """The rollout execution plane: keeps an accelerator fed while tools are slow.

Answers go to stdout, as one JSON document with --json; everything said on the
way goes to stderr. RUN is the id of a run below --runs, or the path of its
directory. Ids complete in the shell: stoker --install-completion.

Examples:
  stoker doctor
  stoker run repair.py --tasks tasks.jsonl --model scripted:model.jsonl
  stoker show run_1a2b

Exit codes:
  0    done
  1    it failed, or what was checked does not hold
  2    the input cannot be used; nothing was started
  3    stopped with work left, resumable
  130  interrupted
"""

app = typer.Typer(
    name="stoker",
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run_command.run)
app.command("worker")(worker.worker)
app.command("gateway")(gateway.gateway)
app.add_typer(ledger.app, name="ledger")
app.add_typer(runs.app, name="runs")
app.add_typer(baselines.app, name="baselines")
app.command("status")(status.status)
app.command("cancel")(cancel.cancel)
app.command("branch")(branch.branch)
app.command("show")(show.show)
app.command("export")(export.export)
app.command("replay")(replay.replay)
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.command("conformance")(conformance.conformance)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")


def _version(*, value: bool) -> None:
    if value:
        print(f"stoker {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options that stand before the command."""
    del version, debug  # --debug is read by ``main``, which sees errors of every command


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; says on stderr why it is not 0."""
    try:
        code = app(list(arguments), prog_name="stoker", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except Exception as error:  # noqa: BLE001 - the outermost boundary: a bug is shown whole
        return _explain(error, debug="--debug" in arguments)
    return code if isinstance(code, int) else 0


def run() -> None:
    """Entry point of the installed command."""
    code = main(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _reader_left()
    sys.exit(code)


def _explain(error: Exception, *, debug: bool) -> int:
    code = EXIT_FAILED
    if isinstance(error, BadInput):
        message, code = error.message, EXIT_BAD_INPUT
    elif isinstance(error, StokerError):
        message = f"{error.message} [{error.code}]"
    elif isinstance(error, UsageProblem):
        message, code = _usage(error), EXIT_BAD_INPUT
    elif isinstance(error, OSError):
        message = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
    else:
        message, debug = "This is a bug of Stoker; please report it with the lines above.", True
    if debug:
        traceback.print_exception(error)
    if message:
        sys.stderr.write(f"stoker: {clean(message)}\n")
    return code


def _usage(error: Exception) -> str:
    message = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
    if not message:  # the help was asked for by giving nothing, and has been printed
        return ""
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "stoker"
    stop = "" if message.endswith("?") else "."
    return f"{message}{stop} See: {where} --help"


def _reader_left() -> int:
    """Whoever read our output has gone (``| head``): not an error, but nothing more to say."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return EXIT_FAILED


if __name__ == "__main__":
    run()
