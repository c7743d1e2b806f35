"""The worker over real namespace boxes: decorated tools, scores, a sweep after SIGKILL."""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

import stoker
from stoker.model.action import Action
from stoker.model.completion import CompletionStatus
from stoker.model.ids import EnvironmentId
from stoker.model.tools import CallRequest, Tests, WriteRequest
from stoker.sandbox.host import SandboxHost
from stoker.worker.calls import reachable
from support.worker_boxes import make_action, module_file
from support.worker_process import Run, until

DECORATED = """
import os
import stoker

@stoker.rollout
async def program(ctx: stoker.Context, task: stoker.Task) -> stoker.Score: ...

@stoker.tool(effect="pure")
def whoami():
    return [os.getuid(), os.path.exists("/root/.bashrc"), os.environ.get("HOME")]

@stoker.tool
def beside():
    from beside import NUMBER
    return NUMBER

@stoker.tool
def packages():
    import msgspec
    return stoker.RunResult(exit_code=0).ok
"""


def play(directory: Path, scenario: Callable[[Run], Awaitable[None]], *, ready: int = 0) -> None:
    async def whole() -> None:
        async with Run(directory, isolation="namespace", slots={"fast": 4}, ready=ready) as run:
            process = run.start()
            await until(lambda: process.poll() is not None or run.figures() is not None)
            if process.poll() is not None:
                pytest.skip(f"no namespace boxes here: {(run.directory / 'w0.out').read_text()}")
            await run.working(process)
            await scenario(run)

    asyncio.run(whole())


def decorated(run: Run, module: Path, function: str) -> Action:
    request = CallRequest(module=str(module), function=function)
    return make_action("call", request, function, policy_digest=run.policy.digest())


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a29_a_decorated_tool_runs_in_a_namespace_wherever_its_file_lies(
    tmp_path: Path, mode: int
) -> None:
    # Not below tmp_path: pytest's own folder is closed to other uids.
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        home.chmod(mode)
        module_file(home, "NUMBER = 7\n", "beside.py")
        module = module_file(home, DECORATED, "decorated.py")

        async def scenario(run: Run) -> None:
            actions = [decorated(run, module, name) for name in ("whoami", "packages", "beside")]
            await run.submit(*actions)
            who, packages, beside = [run.called(await run.completion(a)) for a in actions]
            assert who.value == [1000, False, "/workspace"], who
            if reachable(Path(stoker.__file__)):
                assert packages.value is True, packages
            if reachable(home):
                assert beside.value == 7, beside
            else:
                assert beside.error is not None
                assert "ModuleNotFoundError" in beside.error

        play(tmp_path, scenario)


def test_a_score_is_judged_and_leaves_the_environment_as_it_was(tmp_path: Path) -> None:
    tests = Tests(
        source="def check(candidate):\n    assert candidate(2) == 4\n", entry_point="double"
    )

    async def scenario(run: Run) -> None:
        opening = run.opening()
        await run.submit(opening)
        holder = (await run.completion(opening)).worker_id
        assert holder is not None
        for source, passed in (("return x + 1", False), ("return 2 * x", True)):
            content = f"def double(x):\n    {source}\n".encode()
            write = make_action(
                "box.write_files",
                WriteRequest(files={"solution.py": content}),
                f"write-{passed}",
                environment_id=EnvironmentId("env_a"),
                holder=holder,
            )
            score = run.scoring(holder, tests, f"score-{passed}")
            await run.submit(write, score)
            done = await run.completion(score)
            assert done.status is CompletionStatus.OK, done.fault
            assert run.verdict(done).passed is passed, run.verdict(done)

    play(tmp_path, scenario)


@pytest.mark.root
def test_a20_boxes_made_ahead_are_used_once_and_swept_with_a_killed_worker(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: cgroups, mounts and leased uids are what may be left")

    async def scenario(run: Run) -> None:
        first, second = run.opening(), run.opening("env_b")
        await run.submit(first)
        await run.completion(first)
        await until(lambda: (f := run.figures()) is not None and f.boxes_ready == 3)
        await run.submit(second)
        await run.completion(second)
        await until(lambda: (f := run.figures()) is not None and f.boxes_alive >= 5)
        figures = run.figures()
        assert figures is not None
        assert (figures.boxes_taken, figures.boxes_made) == (1, 1)
        run.processes[-1].kill()
        await run.ended(run.processes[-1])
        process = run.start()
        figures = await run.working(process)
        assert (figures.boxes_swept, figures.boxes_ready) == (5, 0)
        process.terminate()
        await run.ended(process)
        async with SandboxHost.open(run.directory / "workers" / "w0" / "boxes") as host:
            assert host.leaked() == 0

    play(tmp_path, scenario, ready=3)


@pytest.mark.root
def test_a20_nothing_of_a_killed_workers_boxes_is_left(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: cgroups, mounts and leased uids are what may be left")

    async def scenario(run: Run) -> None:
        opening = run.opening()
        jobs = [run.program_call("sleep", "600", path=f"j{n}") for n in range(3)]
        await run.submit(opening, *jobs)
        await run.completion(opening)
        await until(lambda: (f := run.figures()) is not None and f.boxes_alive >= 4)
        run.processes[-1].kill()
        await run.ended(run.processes[-1])
        await run.cancel(*jobs)
        process = run.start()
        figures = await run.working(process)
        assert figures.boxes_swept >= 4
        assert figures.boxes_leaked == 0
        process.terminate()
        await run.ended(process)
        state = run.directory / "workers" / "w0" / "boxes"
        async with SandboxHost.open(state) as host:
            assert host.leaked() == 0

    play(tmp_path, scenario)


def test_the_digest_of_the_policy_is_the_classes_own(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        action = msgspec.structs.replace(run.append(), policy_digest="0" * 32)
        await run.submit(action)
        done = await run.completion(action)
        assert done.status is CompletionStatus.ERROR
        assert run.count() == 0

    play(tmp_path, scenario)
