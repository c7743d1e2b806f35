"""Divided runs: several coordinators of one run, in one process or as commands."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.broker.place import owner_pid
from stoker.cli.main import main
from stoker.config.load import load_settings
from stoker.config.tasks import read_tasks
from stoker.coordinator.execute import execute
from stoker.coordinator.partition import Partition, divided
from stoker.coordinator.record import RunDirectory
from stoker.coordinator.request import RunReport, RunRequest
from stoker.coordinator.sharing import Membership
from stoker.errors import RunChanged, RunOwned
from stoker.inference.callable import CallableModel
from stoker.model.generation import GenerateRequest, Generation, VersionSpan, pack_tokens
from stoker.model.ids import RunId
from stoker.seams.locks import lock_is_held
from support.command import (
    MODEL,
    PROGRAM,
    Answer,
    files_below,
    run_arguments,
    skip_reason,
    wait_until_quiet,
)

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "installed")

RUN = RunId("step-7")
NAMES = [f"t{number}" for number in range(7)]
CALLING = PROGRAM.replace(
    "    return",
    '    seen = await ctx.call(["true"], effect="pure")\n    assert seen.run.ok\n    return',
)
TRUSTED = """\
[workers.classes.fast]
isolation = "process"
trust = "trusted"
[sandbox]
accept_shared_kernel = true
"""


Typed = Callable[..., Answer]


@pytest.fixture
def typed(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Typed:
    """Give the command line, in this process: these are many short commands."""
    monkeypatch.chdir(place)

    def type_(*arguments: str) -> Answer:
        capsys.readouterr()
        code = main(arguments)
        return Answer(code, *capsys.readouterr())

    return type_


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "model.jsonl").write_text(MODEL)
    write_tasks(tmp_path, NAMES)
    yield tmp_path
    wait_until_quiet(tmp_path)


def write_tasks(place: Path, names: list[str]) -> None:
    lines = ({"task_id": name, "data": {"prompt": "hi"}} for name in names)
    (place / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Engine:
    """The engine of one partition."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked.append(request)
        await asyncio.sleep(0)
        return Generation(
            text="hello",
            prompt_ids=pack_tokens([1, 2]),
            token_ids=pack_tokens([3]),
            spans=(VersionSpan(1, 0, 1),),
        )


async def embedded(
    place: Path, partition: Partition, engine: Engine, config: tuple[Path, ...] = (), **fields: Any
) -> RunReport:
    sets = [] if config else ["workers.count=0"]
    request = RunRequest(
        program=place / "program.py",
        program_name=None,
        tasks=place / "tasks.jsonl",
        model="callable:engine",
        settings=load_settings(config, sets=[*sets, "run.group_size=2"]).settings,
        runs_directory=place / "runs",
        run_id=RUN,
        partition=partition,
        **fields,
    )
    return await execute(request, model=CallableModel(engine.generate, window=8, name="engine"))


def hand(place: Path, partition: Partition) -> set[str]:
    return {task.task_id for task in partition.hand(RUN, read_tasks(place / "tasks.jsonl", None))}


@pytest.mark.parametrize("workers", [False, True])
def test_two_coordinators_in_one_process_share_one_run(
    place: Path, typed: Typed, *, workers: bool
) -> None:
    config: tuple[Path, ...] = ()
    if workers:
        (place / "program.py").write_text(CALLING)
        (place / "stoker.toml").write_text(TRUSTED)
        config = (place / "stoker.toml",)
    engines = [Engine(), Engine()]

    async def both() -> list[RunReport]:
        parts = zip(divided(2), engines, strict=True)
        return await asyncio.gather(*(embedded(place, p, e, config) for p, e in parts))

    reports = asyncio.run(both())
    for partition, engine, report in zip(divided(2), engines, reports, strict=True):
        mine = hand(place, partition)
        assert Counter(one.task_id for one in engine.asked) == dict.fromkeys(mine, 2)
        assert report.snapshot.outcomes == {"completed": 2 * len(mine)}
        assert (report.snapshot.state, report.resumable) == ("finished", False)
        assert report.snapshot.partition == str(partition)
    shown = json.loads(typed("show", RUN, "--json").out)["rollouts"]
    assert Counter(row["task"] for row in shown) == dict.fromkeys(NAMES, 2)
    exported = typed("export", RUN, "--out", "rows.jsonl")
    assert (exported.code, exported.err) == (0, "")
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    assert len({row["rollout_id"] for row in rows}) == len(rows) == 2 * len(NAMES)
    assert typed("replay", RUN).code == 0
    assert typed("ledger", "check", "--run", RUN).code == 0
    status = json.loads(typed("status", RUN, "--json").out)
    assert (status["snapshot"]["state"], status["coordinator_lives"]) == ("finished", False)
    assert status["snapshot"]["outcomes"] == {"completed": 2 * len(NAMES)}


def test_one_process_may_not_run_a_part_twice(place: Path) -> None:
    async def twice() -> list[RunReport | BaseException]:
        parts = [embedded(place, Partition(0, 2), Engine()) for _ in range(2)]
        return await asyncio.gather(*parts, return_exceptions=True)

    refused, done = sorted(asyncio.run(twice()), key=lambda end: isinstance(end, RunReport))
    assert isinstance(refused, RunOwned)
    assert isinstance(done, RunReport)
    assert done.snapshot.state == "finished"


def part(typed: Typed, partition: str, *more: str) -> Answer:
    return typed(*run_arguments("--run-id", RUN, "--partition", partition, *more))


def test_parts_that_nobody_runs_are_named_and_resumed_together(place: Path, typed: Typed) -> None:
    first = part(typed, "1/3")
    assert first.code == 0, first.err
    assert first.out.startswith(f"{RUN} 1/3 finished")
    for command in (["status"], ["show"], ["export", "--out", "rows.jsonl"], ["replay"]):
        answer = typed(command[0], RUN, *command[1:])
        assert answer.code == 0
        told = answer.out if command == ["status"] else answer.err
        for index in (0, 2):
            line = f"{RUN} {index}/3: no coordinator lives (it never started); go on with: stoker"
            assert line in told.replace("\n", " "), command
        assert "1/3: no coordinator" not in told
    resumed = typed(*run_arguments("--resume", RUN, "--json"))
    assert resumed.code == 0, resumed.err
    snapshot = json.loads(resumed.out)["snapshot"]
    assert (snapshot["state"], snapshot["outcomes"]) == ("finished", {"completed": len(NAMES)})
    assert "never started" not in typed("show", RUN).err


def test_what_does_not_agree_with_the_run_is_refused_and_changes_nothing(
    place: Path, typed: Typed
) -> None:
    assert part(typed, "0/2").code == 0
    before = files_below(place / "runs" / RUN)
    (place / "other.py").write_text(PROGRAM.replace("1.0", "0.5"))
    for said, answer in disagreements(place, typed):
        assert answer.code == 2, answer
        assert said in answer.err.replace("\n", " ")
        assert len(answer.err.splitlines()) == 1, answer.err
    after = files_below(place / "runs" / RUN)
    changed = {name for name in after if after[name] != before.get(name)}
    assert {name for name in changed if not name.startswith("logs/")} <= {"coordinator-1.lock"}


def disagreements(place: Path, typed: Typed) -> Iterator[tuple[str, Answer]]:
    yield "made with 2 partitions, not with 3", part(typed, "1/3")
    yield "made with 2 partitions, not with 1", typed(*run_arguments("--run-id", RUN))
    other = ["run", "other.py", *run_arguments()[2:], "--run-id", RUN, "--partition", "1/2"]
    yield "made with another program (recorded", typed(*other)
    yield "setting run.seed (recorded 0, given 1)", part(typed, "1/2", "--set", "run.seed=1")
    yield "both name the run", part(typed, "1/2", "--resume", RUN)
    yield "of which run?", typed(*run_arguments("--partition", "0/2"))
    yield "there is no partition 2/2", part(typed, "2/2")
    yield "is no partition", part(typed, "two")
    write_tasks(place, NAMES[1:])
    yield "other tasks than", part(typed, "1/2")


def test_bad_input_of_the_first_coordinator_leaves_nothing(place: Path, typed: Typed) -> None:
    (place / "program.py").write_text("import nothing_of_that_name\n")
    before = files_below(place)
    assert part(typed, "0/2").code == 2
    assert files_below(place) == before


def test_parts_without_tasks_finish_at_once(place: Path) -> None:
    write_tasks(place, ["only"])
    (place / "stoker.toml").write_text(TRUSTED)
    empty = next(one for one in divided(2) if not hand(place, one))
    engine = Engine()
    report = asyncio.run(embedded(place, empty, engine, (place / "stoker.toml",)))
    assert (report.snapshot.state, report.snapshot.rollouts_total) == ("finished", 0)
    assert engine.asked == []
    assert list((place / "runs" / RUN / "workers").glob("w*")) == [], "it needs no worker"
    other = next(one for one in divided(2) if one != empty)
    done = asyncio.run(embedded(place, other, engine, (place / "stoker.toml",)))
    assert done.snapshot.outcomes == {"completed": 2}


def test_who_is_refused_tidies_up_where_it_is_the_last(place: Path) -> None:
    """Its presence kept the one before from doing so."""
    (place / "program.py").write_text(CALLING)
    (place / "stoker.toml").write_text(TRUSTED)
    config = (place / "stoker.toml",)
    run = RunDirectory(place / "runs" / RUN)

    async def scenario() -> None:
        present = Membership(run, Partition(1, 2))
        await present.join()
        await embedded(place, Partition(0, 2), Engine(), config)
        assert lock_is_held(run.workers / "w0" / "lock"), "left to who is still there"
        present.close()
        (place / "program.py").write_text(PROGRAM)
        with pytest.raises(RunChanged, match="another program"):
            await embedded(place, Partition(1, 2), Engine(), config)

    asyncio.run(scenario())
    assert not lock_is_held(run.workers / "w0" / "lock")
    assert owner_pid(run.ledger) is None


def test_a_restart_is_begun_by_one_part_alone(place: Path, typed: Typed) -> None:
    assert part(typed, "0/2", "--set", "run.seed=1").code == 0
    everyone = typed(*run_arguments("--resume", RUN, "--changed", "restart"))
    assert everyone.code == 2
    assert "a restart is begun by one partition" in everyone.err
    restarted = part(typed, "1/2", "--changed", "restart")
    assert restarted.code == 0, restarted.err
    record = json.loads((place / "runs" / RUN / "run.json").read_bytes())
    assert (record["restarts"], record["settings"]["run"]["seed"]) == (1, 0)
    assert part(typed, "0/2").code == 0, "the other part agrees with what the run is now"


def test_a_named_run_that_is_not_divided_looks_as_any_other(place: Path, typed: Typed) -> None:
    whole = run_arguments("--set", "program.check_replays=0")  # which would log, or not, by chance
    named, other = (typed(*whole, *more) for more in (["--run-id", RUN], []))
    assert named.code == other.code == 0
    assert named.out.startswith(f"{RUN} finished")
    fresh = next(path for path in (place / "runs").iterdir() if path.name != RUN)
    assert set(files_below(place / "runs" / RUN)) == set(files_below(fresh))
    assert typed(*run_arguments("--run-id", RUN)).code == 0, "the same command resumes"
    assert not list((place / "runs").glob("*/run.lock"))
