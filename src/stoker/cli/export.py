"""``stoker export``: a run's finished rollouts as training rows in one file."""

import asyncio
import enum
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Protocol

import msgspec
import typer

from stoker.cli.options import RUNS_DIRECTORY, JsonOption, RunArgument, RunsOption
from stoker.cli.output import answers, counted, remarks, write_json
from stoker.cli.status import remark_unfinished
from stoker.cli.text import cell
from stoker.coordinator.record import RunDirectory, find_run
from stoker.coordinator.storage import ExportMark, mark_exported
from stoker.errors import BadInput
from stoker.seams.clock import SystemClock

if TYPE_CHECKING:
    from stoker.export.rows import FinishedRollout, Row

_TELL_SECONDS = 5.0


class Format(enum.StrEnum):
    """What the file is."""

    JSONL = "jsonl"
    PARQUET = "parquet"


_SUFFIXES = {"": Format.JSONL, ".jsonl": Format.JSONL, ".parquet": Format.PARQUET}


class Exported(msgspec.Struct, kw_only=True):
    """What was written, and what was not."""

    run_id: str
    file: str
    format: Format
    rows: int = 0
    rollouts: int = 0
    """With at least one row."""
    without_rows: int = 0
    """Finished, but no model call of it returned: it has no segment."""
    unfinished: int = 0
    """Have no outcome yet; left out."""
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    """Finished rollouts by kind, those without rows too."""
    tokens: int = 0
    sampled_tokens: int = 0

    def count(self, rollout: "FinishedRollout", rows: list[tuple[int, int]]) -> None:
        """Count one finished rollout; ``rows``: tokens and sampled tokens of each of its rows."""
        self.outcomes[rollout.finished.outcome.kind.value] += 1
        self.rollouts += bool(rows)
        self.without_rows += not rows
        self.rows += len(rows)
        self.tokens += sum(tokens for tokens, _ in rows)
        self.sampled_tokens += sum(sampled for _, sampled in rows)


class RowWriter(Protocol):
    """Where rows go."""

    def write(self, row: "Row") -> None:
        """Take one row."""
        ...

    def close(self) -> None:
        """Write what was held back."""
        ...


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the rows go.")],
    format_: Annotated[
        Format | None,
        typer.Option("--format", help="Default: by the suffix of --out; without one, jsonl."),
    ] = None,
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Allow programs, limits or baselines that differ.")
    ] = False,
    runs: RunsOption = RUNS_DIRECTORY,
    as_json: JsonOption = False,
) -> None:
    """Write the finished rollouts of a run as training rows, one per segment.

    A segment is a stretch of a history that only grew. Its row holds token ids,
    mask (1 = sampled), logprobs, policy-version spans, messages, reward, outcome,
    timings, attempts and digests. Only completed rollouts carry a reward; for
    every other it is null. Rollouts without an outcome are left out and counted.
    The file appears whole or not at all; an older one of that name is replaced.

    Examples:
      stoker export run_1a2b --out rows.jsonl
      stoker export runs/run_1a2b --format parquet --out rows.parquet
      stoker export run_1a2b --out rows.jsonl --mixed --json

    Exit codes:
      0    the file is written
      1    the ledger or an artifact cannot be read, or the disk is full; no file
      2    no such run, suffix or writable target, or digests are mixed; no file
      130  interrupted; no file
    """
    directory = find_run(run, runs)
    kind = format_ or _by_suffix(out)
    done = asyncio.run(write_rows(directory, out, kind, mixed=mixed))
    if not done.unfinished:
        rollouts = done.rollouts + done.without_rows
        mark = ExportMark(at=SystemClock().now().wall, file=str(out.absolute()), rollouts=rollouts)
        mark_exported(directory, mark)
    remark_unfinished(directory)
    if as_json:
        write_json(done)
        return
    console = answers()
    console.print(
        cell(
            f"{out}: {counted(done.rows, 'row')} of {counted(done.rollouts, 'rollout')}, "
            f"{done.sampled_tokens} sampled of {counted(done.tokens, 'token')}"
        )
    )
    left_out = [
        f"{counted(number, 'rollout')} {why}"
        for number, why in (
            (done.without_rows, "ended before a model call returned"),
            (done.unfinished, "not finished"),
        )
        if number
    ]
    if left_out:
        console.print(cell(f"no rows: {', '.join(left_out)}", "yellow"))


def _by_suffix(out: Path) -> Format:
    """Return the format that the name of ``out`` asks for.

    Raises:
        BadInput: the caller's: its suffix stands for another format.
    """
    if out.suffix in _SUFFIXES:
        return _SUFFIXES[out.suffix]
    raise BadInput(
        f"--out {out}: {out.suffix!r} names no format of rows; use .jsonl or .parquet, or say "
        "--format; nothing was written"
    )


async def write_rows(run: RunDirectory, out: Path, kind: Format, *, mixed: bool) -> Exported:
    """Write the rows of ``run`` to ``out``, rollout by rollout.

    Raises:
        BadInput: the caller's: target not writable, pyarrow missing, digests mixed; nothing
            was written.

    **Cancellation:** no file.
    """
    from stoker.cli.ledger_access import each_rollout, journal_of, ledger_of
    from stoker.export.files import replacing
    from stoker.export.rows import RunFacts, read_rollout, rows_of
    from stoker.journal.artifacts import ArtifactStore

    record = run.record
    open_writer = _opener(kind)
    facts = RunFacts(
        run_id=record.run_id,
        model=record.model,
        model_digest=record.model_digest,
        settings_digest=record.settings_digest,
        stoker_version=record.stoker_version,
    )
    done = Exported(run_id=record.run_id, file=str(out), format=kind)
    fetch = ArtifactStore(run.artifacts).get
    agreement = Agreement()
    progress = Progress()
    with replacing(out) as file, closing(open_writer(file)) as writer:
        async with ledger_of(run) as ledger:
            async for summary in each_rollout(ledger, record.run_id):
                if summary.last is None:
                    done.unfinished += 1
                    continue
                events = await journal_of(ledger, record.run_id, summary.rollout_id)
                rollout = read_rollout(events, fetch)
                if not mixed:
                    agreement.require(rollout)
                done.count(
                    rollout, [_written(writer, row) for row in rows_of(rollout, fetch, facts)]
                )
                progress.look(done)
    return done


def _written(writer: RowWriter, row: "Row") -> tuple[int, int]:
    """Write ``row``; return its tokens and how many of them were sampled."""
    writer.write(row)
    return len(row.token_ids), row.sampled_tokens


class Agreement:
    """Holds digests against the first rollout that had one of that name."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[str, str]] = {}

    def require(self, rollout: "FinishedRollout") -> None:
        """Take one rollout in.

        Raises:
            BadInput: one of its digests differs from an earlier rollout's.
        """
        from stoker.export.agreement import digests_of

        admitted = rollout.standing.admitted
        for (what, name), digest in digests_of(rollout).items():
            first, before = self._seen.setdefault((what, name), (admitted.rollout_id, digest))
            if before != digest:
                raise BadInput(
                    f"run {admitted.run_id} is mixed: {what} {name} is {before[:12]} in {first} "
                    f"and {digest[:12]} in {admitted.rollout_id}; nothing was written; export "
                    "them together with --mixed (each row carries its digests)"
                )


class Progress:
    """Says on stderr how far a long export is."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._told = self._clock.monotonic()

    def look(self, done: Exported) -> None:
        """Say something when nothing was said for a while."""
        now = self._clock.monotonic()
        if now - self._told >= _TELL_SECONDS:
            self._told = now
            finished = done.rollouts + done.without_rows
            remarks().print(f"{counted(finished, 'rollout')} read, {counted(done.rows, 'row')} …")


def _opener(kind: Format) -> Callable[[BinaryIO], RowWriter]:
    if kind is Format.JSONL:
        from stoker.export.jsonl import JsonLines

        return JsonLines
    try:
        from stoker.export.parquet import Parquet
    except ImportError as error:
        raise BadInput(
            "Parquet needs pyarrow, which cannot be imported here; nothing was written; get it "
            f"with: pip install pyarrow, or use --format jsonl ({error})"
        ) from error
    return Parquet
