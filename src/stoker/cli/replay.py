"""``stoker replay``: does the program still do what the journal says it did?"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stoker.broker.base import Ledger
from stoker.cli.options import RUNS_DIRECTORY, JsonOption, RunArgument, RunsOption
from stoker.cli.output import answers, counted, remarks, write_json
from stoker.cli.status import remark_unfinished
from stoker.cli.text import cell, excerpt
from stoker.coordinator.record import RunDirectory, find_run
from stoker.errors import BadInput, ProgramInvalid, RunChanged
from stoker.model.events import Admitted, decode_event
from stoker.model.ids import RolloutId

if TYPE_CHECKING:
    from stoker.cli.replay_rollouts import Replayed, Replayer

EXIT_DIFFERS = 1
_STUCK_SECONDS = 10.0
_MESSAGE_MAX = 6000
_MESSAGE_LINES_MAX = 60
_HASH_SEED_MAX = 2**32 - 1


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay, and how."""

    rollouts: tuple[str, ...]
    """Ids, beginnings of ids or tasks; none: every rollout."""
    program: Path
    name: str | None
    given: bool
    """The program was named with ``--program``: it may differ from the recorded one."""
    hash_seed: int | None
    """``None``: each rollout's recorded one."""
    every_prefix: bool


def replay(
    run: RunArgument,
    rollouts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROLLOUT]...", help="Id, beginning of an id, or task. None: all."),
    ] = None,
    every_prefix: Annotated[
        bool, typer.Option("--every-prefix", help="Also rebuild from each prefix of the journal.")
    ] = False,
    hash_seed: Annotated[
        int | None,
        typer.Option(
            "--hash-seed",
            metavar="N",
            min=0,
            max=_HASH_SEED_MAX,
            help="Order of sets of strings. Default: as recorded.",
        ),
    ] = None,
    program: Annotated[
        str | None,
        typer.Option("--program", metavar="FILE[:NAME]", help="Replay against this program."),
    ] = None,
    runs: RunsOption = RUNS_DIRECTORY,
    as_json: JsonOption = False,
) -> int:
    """Replay journals against the program and say whether it does the same again.

    The program runs in a host process of its own and is fed the recorded results;
    nothing it asks for is carried out. A call, a withdrawal or an outcome that is
    not the journal's is shown beside it, with the line where the program stands.
    The recorded program file must be unchanged, unless --program names another.

    Examples:
      stoker replay run_1a2b
      stoker replay run_1a2b HumanEval/7 --every-prefix --hash-seed 1
      stoker replay run_1a2b --program fixed.py --json

    Exit codes:
      0    every rollout is the same
      1    a rollout differs or could not be replayed
      2    no such run or rollout, or a changed program; nothing was replayed
      130  interrupted
    """
    from stoker.cli.run import program_of

    directory = find_run(run, runs)
    path, name = (Path(directory.record.program), None) if program is None else program_of(program)
    if not path.is_file():
        raise ProgramInvalid(
            f"the recorded program {path} is gone; nothing was replayed; "
            "give a copy of it with --program FILE"
        )
    asked = Asked(
        rollouts=tuple(rollouts or ()),
        program=path,
        name=name or directory.record.program_name,
        given=program is not None,
        hash_seed=hash_seed,
        every_prefix=every_prefix,
    )
    found = asyncio.run(replay_all(directory, asked, _untold if as_json else _show))
    if not asked.rollouts:
        remark_unfinished(directory)
    same = sum(one.verdict == "same" for one in found)
    if as_json:
        write_json({"run_id": directory.record.run_id, "program": str(path), "rollouts": found})
    else:
        answers().print(f"{counted(len(found), 'rollout')}: {same} same, {len(found) - same} not")
    return 0 if same == len(found) else EXIT_DIFFERS


async def replay_all(
    run: RunDirectory, asked: Asked, tell: "Callable[[Replayed], None]"
) -> "list[Replayed]":
    """Replay what was asked for, in order of admission; ``tell`` hears of each at once.

    Raises:
        BadInput: the caller's: no such rollout, or the program has changed; nothing was replayed.

    **Cancellation:** no process is left behind.
    """
    from tempfile import TemporaryDirectory

    from stoker.cli.ledger_access import journal_of, ledger_of
    from stoker.cli.replay_rollouts import Replayer
    from stoker.journal.artifacts import ArtifactStore

    fetch = ArtifactStore(run.artifacts).get
    stuck = max(_STUCK_SECONDS, run.record.settings.get("program", {}).get("stuck", 0.0))
    recorded = Path(run.record.program)
    found: list[Replayed] = []
    with TemporaryDirectory(prefix="stoker-replay-") as scratch:
        log = Path(scratch) / "host.out"
        async with (
            ledger_of(run) as ledger,
            Replayer(asked.program, asked.name, recorded, log=log, stuck_seconds=stuck) as replayer,
        ):
            chosen = await _chosen(ledger, run, asked.rollouts)
            await _require_usable(chosen, replayer, asked)
            for one in chosen:
                events = await journal_of(ledger, run.record.run_id, one.rollout_id)
                seed = one.hash_seed if asked.hash_seed is None else asked.hash_seed
                found.append(
                    await replayer.replay(
                        events, fetch, hash_seed=seed, every_prefix=asked.every_prefix
                    )
                )
                tell(found[-1])
    return found


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout to replay."""

    rollout_id: RolloutId
    hash_seed: int
    program_digest: str
    python: str


async def _chosen(ledger: Ledger, run: RunDirectory, names: tuple[str, ...]) -> list[Chosen]:
    from stoker.cli.ledger_access import each_rollout

    chosen: list[Chosen] = []
    wanted = dict.fromkeys(names, False)
    async for summary in each_rollout(ledger, run.record.run_id):
        admitted = decode_event(summary.first)
        if not isinstance(admitted, Admitted):
            continue  # `stoker ledger check` says so
        called = [
            name
            for name in wanted
            if name == admitted.task.task_id or summary.rollout_id.startswith(name)
        ]
        wanted.update(dict.fromkeys(called, True))
        if called or not names:
            chosen.append(
                Chosen(
                    rollout_id=admitted.rollout_id,
                    hash_seed=admitted.hash_seed,
                    program_digest=admitted.program_digest,
                    python=admitted.python,
                )
            )
    missing = [name for name, found in wanted.items() if not found]
    if missing:
        raise BadInput(
            f"run {run.record.run_id} has no rollout {missing[0]!r}; nothing was replayed; "
            f"list them with: stoker show {run.path}"
        )
    return chosen


async def _require_usable(chosen: list[Chosen], replayer: "Replayer", asked: Asked) -> None:
    """Load the program; refuse one that has changed and was not asked for by name."""
    if not chosen:
        return
    first = chosen[0]
    loaded = await replayer.load(first.hash_seed if asked.hash_seed is None else asked.hash_seed)
    changed = next((one for one in chosen if one.program_digest != loaded.source_digest), None)
    if changed is not None and not asked.given:
        raise RunChanged(
            f"the program {asked.program} has changed: {changed.rollout_id} was made with "
            f"{changed.program_digest[:12]}, the file is {loaded.source_digest[:12]}; nothing was "
            f"replayed; to replay against it as it is now: --program {asked.program}"
        )
    if changed is not None:
        remarks().print(cell(f"{asked.program} is not the program that was recorded", "yellow"))
    if loaded.python != first.python:
        remarks().print(f"recorded under Python {first.python}, replayed under {loaded.python}")


def _untold(one: "Replayed") -> None:
    del one


def _show(one: "Replayed") -> None:
    console = answers()
    what = f"{one.rollout_id}  {one.task_id} #{one.index}  {one.verdict}"
    prefixes = f", {counted(one.prefixes, 'turn')} one by one" if one.prefixes else ""
    counts = f"  ({counted(one.calls, 'call')}{prefixes})"
    console.print(cell(what + counts, "" if one.verdict == "same" else "bold red"), soft_wrap=True)
    if one.message:
        text = excerpt(one.message, length=_MESSAGE_MAX, lines_max=_MESSAGE_LINES_MAX)
        console.print(indented(text), soft_wrap=True)


def indented(text: str) -> str:
    """Return ``text`` moved in below the line it belongs to."""
    return "\n".join(f"    {line}" for line in text.split("\n"))
