"""Replay: at every prefix, under other hash seeds, and what is said when it differs."""

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import stoker
from stoker.errors import NonDeterministicRollout
from stoker.model.tools import CallResult
from stoker.rollout.messages import RecordedResult, RecordedTurn
from stoker.rollout.program import Rollout
from stoker.testing.driver import Asked, Drive, drive, replay, replay_every_prefix
from support.rollout_programs import PROGRAMS, script_for

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("name", PROGRAMS)
def test_replay_at_every_prefix_stands_where_it_stood(name: str) -> None:
    program = PROGRAMS[name]
    result = drive(program, script_for(name))
    assert result.outcome is not None
    assert result.outcome.fault is None
    assert replay_every_prefix(program, result) == len(result.history) > 3


def test_replay_at_every_prefix_under_other_hash_seeds(tmp_path: Path) -> None:
    drives = {name: drive(program, script_for(name)) for name, program in PROGRAMS.items()}
    stored = tmp_path / "drives"
    stored.write_bytes(msgspec.msgpack.encode(drives))
    for hash_seed in ("1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", _REPLAY, str(stored)],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(TESTS)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == sum(len(one.history) for one in drives.values())


_REPLAY = """
import sys
from pathlib import Path

import msgspec
from support.rollout_programs import PROGRAMS

from stoker.testing.driver import Drive, replay_every_prefix

drives = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=dict[str, Drive])
print(sum(replay_every_prefix(PROGRAMS[name], one) for name, one in drives.items()))
"""


def test_c13_sub_agents_in_other_timings_and_hash_seeds_give_the_same_journal() -> None:
    program = PROGRAMS["wide"]
    generator = random.Random(13)
    for _ in range(20):
        result = drive(
            program, script_for("wide"), choose=lambda paths: generator.randrange(len(paths))
        )
        replay_every_prefix(program, result)


def test_random_draws_ids_and_time_come_out_the_same() -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        await ctx.call(["a", f"{ctx.random.random()}", ctx.new_id("x_"), f"{ctx.now()}"])
        return ctx.random.gauss(0, 1)

    one, again = drive(program), drive(program)
    assert one.history == again.history
    assert one.outcome == again.outcome
    other = drive(program, epoch="another")
    assert other.history[0].calls[0].digest != one.history[0].calls[0].digest


# --- differences -----------------------------------------------------------------------------


def linting(tools: list[str]) -> Rollout:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        async def w() -> None:
            for tool in tools:
                await ctx.call(["run", tool, "src"])

        await ctx.gather(w())
        return 1.0

    return program


def test_a_differing_call_shows_both_sides_and_the_line() -> None:
    recorded = drive(linting(["pytest", "ruff"]))
    with pytest.raises(NonDeterministicRollout) as raised:
        replay(linting(["pytest", "mypy"]), recorded)
    lines = [line.strip() for line in raised.value.message.splitlines()]
    assert lines[0].startswith("call number 1 differs from the journal (program stands at test_")
    assert lines[0].endswith("in w)")
    assert lines[1] == "journal: 0.0.1 call        program: 0.0.1 call"
    assert '-      "ruff",' in lines
    assert '+      "mypy",' in lines


def test_a_program_that_ends_early_is_a_difference() -> None:
    recorded = drive(linting(["pytest", "ruff"]))
    with pytest.raises(NonDeterministicRollout, match="which the program did not make"):
        replay(linting(["pytest"]), recorded)


def test_a_program_that_goes_on_is_a_difference() -> None:
    recorded = drive(linting(["pytest"]))
    with pytest.raises(NonDeterministicRollout, match="is not in the journal"):
        replay(linting(["pytest", "ruff"]), recorded)


def test_a_result_for_a_call_never_issued_is_a_difference() -> None:
    recorded = drive(linting(["pytest"]))
    stray = RecordedResult(path=recorded.calls[0].path, value=b"\xc0", fault=None, at=9.0)
    longer = msgspec.structs.replace(
        recorded, history=(*recorded.history, RecordedTurn(result=stray, calls=()))
    )
    with pytest.raises(NonDeterministicRollout, match="does not wait for"):
        replay(linting(["pytest"]), longer)


def test_a_difference_cannot_be_swallowed_by_the_program() -> None:
    def program_for(argv: list[str]) -> Rollout:
        @stoker.rollout
        async def program(ctx: stoker.Context, task: stoker.Task) -> float:
            try:
                await ctx.call(argv)
            except BaseException:
                return 0.0
            return 1.0

        return program

    recorded = drive(program_for(["a"]))
    with pytest.raises(NonDeterministicRollout):
        replay(program_for(["b"]), recorded)


def test_a_withdrawal_that_differs_is_a_difference() -> None:
    def program_for(*, early: bool) -> Rollout:
        @stoker.rollout
        async def program(ctx: stoker.Context, task: stoker.Task) -> float:
            async with ctx.timeout(9):
                await ctx.sleep(1)
                if not early:
                    await ctx.sleep(2)
            if early:
                await ctx.sleep(2)
            return 1.0

        return program

    recorded = drive(program_for(early=False))
    with pytest.raises(NonDeterministicRollout, match="stopped waiting"):
        replay(program_for(early=True), recorded)


@pytest.mark.parametrize("impure", [lambda: str(time.time_ns()), lambda: str(random.random())])
def test_c6_wall_time_and_random_are_nondeterministic_on_replay_with_the_diff(impure: Any) -> None:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        await ctx.call(["stamp", impure()])
        return 1.0

    recorded = drive(program)
    with pytest.raises(NonDeterministicRollout) as raised:
        replay(program, recorded)
    assert "- " in raised.value.message
    assert "+ " in raised.value.message
    assert "time, random, uuid" in raised.value.message


def test_live_results_pass_through_the_same_encoding_as_replayed_ones() -> None:
    seen: list[Any] = []

    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        value = await ctx.local(lambda: {"pair": (1, 2), "n": float("inf")})
        seen.append(value)
        await ctx.call(["use", repr(value)])
        return 1.0

    result = drive(program)
    replay_every_prefix(program, result)
    assert all(value == {"pair": [1, 2], "n": float("inf")} for value in seen)


def test_a_local_call_is_not_run_again_on_replay_and_its_error_is_raised() -> None:
    runs: list[int] = []

    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        await ctx.local(runs.append, 1)
        try:
            await ctx.local(lambda: list(range(1))[1])
        except stoker.StokerError as error:
            assert "IndexError" in error.message
            await ctx.sleep(1)
            return 1.0
        return 0.0

    result = drive(program)
    assert runs == [1]
    assert result.outcome is not None
    assert result.outcome.reward == 1.0
    replay(program, result)
    assert runs == [1]


def test_a_prefix_replay_reports_an_empty_turn_and_the_whole_one_its_outcome() -> None:
    def answer(_asked: Asked) -> CallResult:
        return CallResult(value=1)

    program = linting(["a", "b"])
    result: Drive = drive(program, answer)
    turn = replay(program, result, 2)
    assert (turn.calls, turn.outcome, turn.tainted, turn.recovered) == ((), None, None, ())
    whole = replay(program, result)
    assert whole.outcome == result.outcome
