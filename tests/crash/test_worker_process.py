import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from support.worker_process import Run

from stoker.model.action import Effect
from stoker.model.completion import CompletionStatus


def play(directory: Path, scenario: Callable[[Run], Awaitable[None]], **options: Any) -> None:  # noqa: ANN401
    async def whole() -> None:
        async with Run(directory, **options) as run:
            await scenario(run)

    asyncio.run(whole())


def test_a_call_and_an_environment_through_real_processes(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        process = run.start()
        figures = await run.working(process)
        isolation = figures.classes["fast"].isolation
        assert isolation is not None
        assert isolation.rung == "process"
        call = run.append()
        opening = run.opening()
        await run.submit(call, opening)
        done = await run.completion(call)
        assert done.status is CompletionStatus.OK, done
        assert run.called(done).value == "x"
        assert run.count(call) == 1
        opened = await run.completion(opening)
        assert opened.worker_id is not None
        cat = run.running(opened.worker_id, "cat", "given", path="cat")
        await run.submit(cat)
        assert run.ran(await run.completion(cat)).stdout.kept == b"there\n"
        process.terminate()
        assert await run.ended(process) == 0
        last = run.figures()
        assert last is not None
        assert (last.state, last.boxes_alive, last.boxes_leaked) == ("ended", 0, 0)
        assert Effect.PURE

    play(tmp_path, scenario)
