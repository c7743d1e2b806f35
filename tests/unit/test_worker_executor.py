import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from stoker.errors import ArtifactDamaged
from stoker.model.action import Action, Effect
from stoker.model.completion import CompletionStatus, EnvironmentState
from stoker.model.faults import FaultSide
from stoker.model.ids import EnvironmentId
from stoker.model.tools import (
    CallRequest,
    CallResult,
    ExportRequest,
    ExportResult,
    LimitKind,
    OpenResult,
    ReadRequest,
    ReadResult,
    RunRequest,
    RunResult,
    ScoreRequest,
    Stream,
    Verdict,
    WriteRequest,
)
from stoker.model.tools import (
    Tests as SolutionTests,
)
from stoker.model.value import Value
from stoker.testing.boxes import MemoryBackend, MemoryBox, output
from stoker.worker import observation
from stoker.worker.attempt import MESSAGE_CHARACTERS_MAX
from support.worker_boxes import Bench, DictArtifacts, make_action, settle

ENV = EnvironmentId("env_a")


def in_env(tool: str, request: object, path: str = "x", generation: int = 0) -> Action:
    return make_action(tool, request, path, environment_id=ENV, generation=generation)


def test_every_environment_tool_gives_its_result_record() -> None:
    async def scenario() -> None:
        bench = Bench()
        opened = await bench.open(files={"a.txt": b"one"})
        assert opened.status is CompletionStatus.OK
        assert opened.environment is EnvironmentState.CLEAN
        assert bench.seen(opened, OpenResult).rung == "process"

        ran = await bench.run("cat", "a.txt")
        assert bench.seen(ran, RunResult).stdout.kept == b"one"
        assert ran.usage.output_bytes == 3

        wrote = await bench.do(in_env("box.write_files", WriteRequest(files={"b": b"two"})))
        assert wrote.status is CompletionStatus.OK
        assert wrote.observation is not None
        assert wrote.observation.inline == msgspec.msgpack.encode(None)

        read = await bench.do(in_env("box.read_file", ReadRequest(path="b")))
        assert bench.seen(read, ReadResult).content == b"two"

        exported = await bench.do(in_env("box.export", ExportRequest()))
        assert bench.seen(exported, ExportResult).files == {"a.txt": b"one", "b": b"two"}

        closed = await bench.do(in_env("environment.close", b""))
        assert closed.status is CompletionStatus.OK
        await bench.boxes.settled()
        assert bench.boxes.alive == 0
        assert not bench.backend.boxes

    asyncio.run(scenario())


def test_score_grades_a_copy_and_leaves_the_environment_clean() -> None:
    given: list[dict[str, bytes]] = []

    def judge(files: Mapping[str, bytes], tests: SolutionTests) -> Verdict:
        given.append(dict(files))
        return Verdict(passed=False, detail="AssertionError")

    async def scenario() -> None:
        bench = Bench(MemoryBackend(judge=judge))
        await bench.open(files={"solution.py": b"x"})
        tests = SolutionTests(source="", entry_point="f")
        scored = await bench.do(in_env("score", ScoreRequest(tests=tests)))
        assert scored.status is CompletionStatus.OK
        assert scored.environment is EnvironmentState.CLEAN
        assert not bench.seen(scored, Verdict).passed
        assert given == [{"solution.py": b"x"}]

    asyncio.run(scenario())


def test_a31_after_a_timeout_files_are_kept_and_the_interruption_is_told() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open()
        await bench.run("write", "kept", "yes")
        hung = await bench.run("hang", limit=0.02)
        assert hung.status is CompletionStatus.TIMED_OUT
        assert hung.environment is EnvironmentState.INTERRUPTED
        assert bench.seen(hung, RunResult).timed_out

        after = await bench.run("cat", "kept")
        assert bench.seen(after, RunResult).stdout.kept == b"yes"
        assert bench.seen(after, RunResult).interrupted_before
        assert after.environment is EnvironmentState.CLEAN

    asyncio.run(scenario())


def test_a_cancelled_program_is_killed_and_interrupts_its_environment() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open()
        task = asyncio.create_task(bench.run("hang"))
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bench.backend.made[0].killed == 1
        after = await bench.run("echo", "on")
        assert bench.seen(after, RunResult).interrupted_before

    asyncio.run(scenario())


def test_a_limit_is_its_own_status_and_names_the_limit() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open()
        over = await bench.run("hog")
        assert over.status is CompletionStatus.LIMIT
        assert over.environment is EnvironmentState.INTERRUPTED
        assert bench.seen(over, RunResult).limit is LimitKind.MEMORY

    asyncio.run(scenario())


@pytest.mark.parametrize(("name", "generation"), [("env_b", 0), ("env_a", 1)])
def test_an_action_for_another_life_is_environment_lost_and_runs_nothing(
    name: str, generation: int
) -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open("env_a", 0)
        lost = await bench.run("echo", "x", name=name, generation=generation)
        assert lost.status is CompletionStatus.ERROR
        assert lost.environment is EnvironmentState.LOST
        assert lost.fault is not None
        assert lost.fault.code == "environment_lost"
        assert lost.fault.side is FaultSide.INFRASTRUCTURE
        assert bench.backend.made[0].runs == 0

    asyncio.run(scenario())


def test_the_next_generation_replaces_the_box_of_the_one_before() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open("env_a", 0, {"old": b"1"})
        await bench.open("env_a", 1)
        await bench.boxes.settled()
        assert len(bench.backend.boxes) == 1
        read = await bench.run("cat", "old", generation=1)
        assert bench.seen(read, RunResult).exit_code == 1
        stale_close = await bench.do(in_env("environment.close", b"", generation=0))
        assert stale_close.status is CompletionStatus.OK
        assert len(bench.environments) == 1, "closing an earlier life must not close this one"

    asyncio.run(scenario())


def test_a_box_that_vanishes_or_breaks_loses_the_environment_never_the_worker() -> None:
    async def scenario() -> None:
        for word, status in (
            ("vanish", CompletionStatus.OK),
            ("break", CompletionStatus.ERROR),
        ):
            bench = Bench()
            await bench.open()
            ended = await bench.run(word)
            assert ended.status is status
            assert ended.environment is EnvironmentState.LOST
            after = await bench.run("echo", "x")
            assert after.fault is not None
            assert after.fault.code == "environment_lost"
            await bench.boxes.settled()
            assert bench.boxes.alive == 0

    asyncio.run(scenario())


def test_a21_a_box_that_cannot_be_made_is_a_typed_infrastructure_fault() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.backend.create_fails = 1
        failed = await bench.open()
        assert failed.status is CompletionStatus.ERROR
        assert failed.fault is not None
        assert failed.fault.code == "box_failed"
        assert failed.fault.retryable
        assert failed.observation is None
        assert bench.boxes.alive == 0
        again = await bench.open()
        assert again.status is CompletionStatus.OK

    asyncio.run(scenario())


def test_files_that_are_refused_at_opening_leave_no_box() -> None:
    async def scenario() -> None:
        bench = Bench()
        refused = await bench.open(files={"../x": b""})
        assert refused.fault is not None
        assert refused.fault.code == "tool_refused"
        assert refused.environment is EnvironmentState.LOST
        await bench.boxes.settled()
        assert not bench.backend.boxes

    asyncio.run(scenario())


def test_a_bad_path_is_the_environments_fault() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open()
        refused = await bench.do(in_env("box.write_files", WriteRequest(files={"/etc/x": b""})))
        assert refused.status is CompletionStatus.ERROR
        assert refused.environment is EnvironmentState.CLEAN
        assert refused.fault is not None
        assert refused.fault.side is FaultSide.ENVIRONMENT
        read = await bench.do(in_env("box.read_file", ReadRequest(path="none")))
        assert bench.seen(read, ReadResult).refused == "not found"

    asyncio.run(scenario())


@pytest.mark.parametrize("content", [b"", b"\xc1", msgspec.msgpack.encode({"argv": 3})])
def test_an_input_that_is_no_request_is_refused(content: bytes) -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open()
        refused = await bench.do(in_env("box.run", content))
        assert refused.fault is not None
        assert refused.fault.code == "tool_refused"

    asyncio.run(scenario())


def test_an_input_that_does_not_match_its_digest_is_not_run() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open()
        action = in_env("box.run", RunRequest(argv=("echo", "x")))
        wrong = Value(
            digest="0" * 64, size_bytes=action.input.size_bytes, inline=action.input.inline
        )
        damaged = await bench.do(msgspec.structs.replace(action, input=wrong))
        assert damaged.fault is not None
        assert damaged.fault.code == "artifact_damaged"
        assert bench.backend.made[0].runs == 0

    asyncio.run(scenario())


def test_an_unknown_tool_is_refused_by_name() -> None:
    async def scenario() -> None:
        refused = await Bench().do(make_action("box.explode", b""))
        assert refused.fault is not None
        assert refused.fault.code == "tool_refused"
        assert "box.explode" in refused.fault.message

    asyncio.run(scenario())


def test_large_inputs_and_results_go_through_the_artifact_store() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open(files={"big": b"x" * 100_000})
        action = in_env("box.read_file", ReadRequest(path="big"))
        read = await bench.do(action)
        assert read.observation is not None
        assert read.observation.inline is None
        assert bench.seen(read, ReadResult).total_bytes == 100_000
        request = bench.artifacts.put(
            msgspec.msgpack.encode(WriteRequest(files={"c": b"y" * 50_000}))
        )
        wrote = await bench.do(
            msgspec.structs.replace(in_env("box.write_files", b""), input=request)
        )
        assert wrote.status is CompletionStatus.OK
        assert bench.backend.made[0].files["c"] == b"y" * 50_000

    asyncio.run(scenario())


def test_a25_a_result_over_the_bound_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "OBSERVATION_BYTES_MAX", 1000)

    async def scenario() -> None:
        bench = Bench()
        await bench.open(files={"big": b"x" * 5000})
        read = await bench.do(in_env("box.read_file", ReadRequest(path="big")))
        assert read.status is CompletionStatus.ERROR
        assert read.fault is not None
        assert "over the bound of 1000" in read.fault.message
        assert (await bench.run("echo", "on")).status is CompletionStatus.OK

    asyncio.run(scenario())


def test_an_unexpected_exception_is_an_internal_fault_with_a_bounded_message() -> None:
    async def explode(box: MemoryBox, request: RunRequest) -> RunResult:
        raise ValueError("\udcff" + "x" * 1_000_000)

    async def scenario() -> None:
        bench = Bench(MemoryBackend(explode))
        await bench.open()
        failed = await bench.run("anything")
        assert failed.fault is not None
        assert failed.fault.code == "internal"
        assert failed.fault.side is FaultSide.INTERNAL
        assert len(failed.fault.message) <= MESSAGE_CHARACTERS_MAX
        msgspec.msgpack.encode(failed)

    asyncio.run(scenario())


def test_a_full_artifact_disk_is_typed_and_the_worker_lives() -> None:
    class Full(DictArtifacts):
        def put(self, content: bytes) -> Value:
            raise ArtifactDamaged("no space left")

    async def scenario() -> None:
        bench = Bench(artifacts=Full())
        await bench.open(files={"big": b"x" * 100_000})
        read = await bench.do(in_env("box.read_file", ReadRequest(path="big")))
        assert read.status is CompletionStatus.ERROR
        assert (await bench.run("echo", "on")).status is CompletionStatus.OK

    asyncio.run(scenario())


def answering(answer: bytes | None) -> MemoryBackend:
    """A backend whose programs leave ``answer`` as a call's runner does."""

    async def script(box: MemoryBox, request: RunRequest) -> RunResult:
        if answer is not None:
            box.files[".stoker-answer.json"] = answer
        return RunResult(exit_code=0)

    return MemoryBackend(script)


FUNCTION = CallRequest(module=__file__, function="f", arguments={})


@pytest.mark.parametrize(
    ("answer", "value", "error"),
    [
        (b'{"value": [1, "x"]}', [1, "x"], None),
        (b'{"error": "ValueError: no"}', None, "ValueError: no"),
        (None, None, "ended without a result (exit code 0)"),
        (b"{", None, "not usable JSON"),
        (b'{"value": NaN}', None, "not usable JSON"),
        (b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "not usable JSON"),
        (b'{"value": "\\ud800"}', None, "not usable JSON"),
        (b'{"value": 1e999}', None, ""),
        (b'{"value": 123456789012345678901234567890}', None, ""),
        (b'{"value": "' + b"x" * (17 * 1024 * 1024) + b'"}', None, "over"),
    ],
)
def test_a25_whatever_a_tool_answers_is_bounded_and_typed(
    answer: bytes | None, value: object, error: str | None
) -> None:
    async def scenario() -> None:
        bench = Bench(answering(answer))
        done = await bench.do(make_action("call", FUNCTION, effect=Effect.PURE))
        assert done.status is CompletionStatus.OK
        result = bench.seen(done, CallResult)
        if error is None:
            assert result.value == value
            assert result.error is None
        elif error:
            assert error in (result.error or "")
        await bench.boxes.settled()
        assert bench.boxes.alive == 0, "a call's box goes with the call"

    asyncio.run(scenario())


def test_a_call_that_times_out_may_have_touched_the_world() -> None:
    async def hang(box: MemoryBox, request: RunRequest) -> RunResult:
        await asyncio.Event().wait()
        return output("")

    async def scenario() -> None:
        bench = Bench(MemoryBackend(hang))
        late = await bench.do(
            make_action("call", CallRequest(argv=("x",)), effect=Effect.EXTERNAL), limit=0.02
        )
        assert late.status is CompletionStatus.TIMED_OUT
        assert late.external_effect_possible
        bench.backend.create_fails = 1
        failed = await bench.do(
            make_action("call", CallRequest(argv=("x",)), effect=Effect.EXTERNAL)
        )
        assert failed.status is CompletionStatus.ERROR
        assert not failed.external_effect_possible, "its box was never made"

    asyncio.run(scenario())


def test_a_program_call_is_offered_its_key_and_attempt() -> None:
    seen: list[RunRequest] = []

    async def script(box: MemoryBox, request: RunRequest) -> RunResult:
        seen.append(request)
        return RunResult(exit_code=3, stdout=Stream(kept=b"x", total_bytes=1))

    async def scenario() -> None:
        bench = Bench(MemoryBackend(script))
        action = make_action("call", CallRequest(argv=("prog", "-x"), key="mine"))
        done = await bench.do(action)
        assert done.status is CompletionStatus.OK
        result = bench.seen(done, CallResult)
        assert result.run is not None
        assert result.run.exit_code == 3
        await bench.do(make_action("call", CallRequest(argv=("prog",))))
        assert seen[0].argv == ("prog", "-x")
        assert seen[0].environment == {"STOKER_ACTION_KEY": "mine", "STOKER_ATTEMPT": "1"}
        assert seen[1].environment["STOKER_ACTION_KEY"] == action.action_id

    asyncio.run(scenario())


def test_a_call_under_another_policy_than_the_classes_is_not_run() -> None:
    async def scenario() -> None:
        bench = Bench()
        call = CallRequest(argv=("echo", "x"))
        refused = await bench.do(make_action("call", call, policy_digest="f" * 32))
        assert refused.fault is not None
        assert "execution policy" in refused.fault.message
        assert not bench.backend.made
        right = await bench.do(make_action("call", call, policy_digest=bench.policy.digest()))
        assert right.status is CompletionStatus.OK

    asyncio.run(scenario())


def test_no_time_left_runs_nothing() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open()
        late = await bench.run("echo", "x", limit=0.0)
        assert late.status is CompletionStatus.TIMED_OUT
        assert bench.backend.made[0].runs == 0

    asyncio.run(scenario())


def test_b2_a_program_does_not_begin_under_a_lease_that_may_be_over() -> None:
    async def scenario() -> None:
        bench = Bench()
        action = make_action("call", CallRequest(argv=("echo", "x")), effect=Effect.EXTERNAL)
        late = await bench.do(action, trusted=False)
        assert late.status is CompletionStatus.ERROR
        assert late.fault is not None
        assert late.fault.code == "worker_lost"
        assert not late.external_effect_possible
        assert bench.backend.made[0].runs == 0
        await bench.boxes.settled()
        assert bench.boxes.alive == 0

    asyncio.run(scenario())


def test_a_box_that_cannot_be_removed_is_counted_as_leaked() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open()
        bench.backend.destroy_fails = 1
        bench.environments.drop_all()
        await bench.boxes.settled()
        assert (bench.boxes.alive, bench.boxes.leaked) == (1, 1)
        await bench.boxes.close()
        assert (bench.boxes.alive, bench.boxes.leaked) == (0, 0), "tried once more at the end"

    asyncio.run(scenario())
