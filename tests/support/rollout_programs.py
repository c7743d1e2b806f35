"""Varied rollout programs, and scripts for them: what the replay tests run and rebuild.

Importable in a subprocess, so that a replay can run under another hash seed.
"""

import contextlib
from typing import Any

import stoker
from stoker.errors import Infrastructure, StokerError, WorkerLost
from stoker.model.events import Verb
from stoker.model.generation import Generation
from stoker.model.tools import CallResult, RunResult, Stream, Tests
from stoker.rollout.program import Rollout
from stoker.testing.driver import FIRE, NEVER, Asked, Script

TESTS = Tests(source="def check(f): assert f() == 1", entry_point="f")
PYTHON_TOOL = stoker.ToolSpec(
    name="python",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
    },
)


@stoker.tool
def double(number: int) -> int:
    """Return twice ``number``."""
    return number * 2


@stoker.rollout(version="3", boxes=2, timeout="1m")
async def agent(ctx: stoker.Context, task: stoker.Task) -> stoker.Score:
    """A tool loop in an environment, then a grading."""
    box = await ctx.environment("python", files={"a.py": "print(1)"})
    chat = ctx.chat("solve it", tools=[PYTHON_TOOL], system="be brief")
    for _ in range(4):
        turn = await ctx.generate(chat, tokens_max=64)
        if not turn.tool_calls:
            break
        for call in turn.tool_calls:
            if call.error:
                chat.tool_result(call, call.error)
                continue
            seen = await box.run(["python", "-c", call.arguments["code"]], timeout="10s")
            chat.tool_result(call, seen.text)
    await box.write_files({"answer.txt": turn.text})
    verdict = await ctx.score(box, TESTS)
    return stoker.Score(float(verdict.passed), {"messages": float(len(chat.messages))})


@stoker.rollout
async def wide(ctx: stoker.Context, task: stoker.Task) -> float:
    """Sub-agents side by side that share a list: their calls depend on each other's order."""
    seen: list[str] = []

    async def sub_agent(name: str) -> int:
        total = 0
        for _ in range(3):
            result = await ctx.call(double, len(seen))
            seen.append(f"{name}{result.value}")
            total += ctx.random.randrange(100)
            await ctx.local(sorted, list(seen))
        return total

    totals = await ctx.gather(sub_agent("a"), sub_agent("b"), sub_agent("c"))
    best = await ctx.first(sub_agent("d"), sub_agent("e"))
    await ctx.call(["echo", *seen, ctx.new_id(), f"{ctx.now():.0f}"])
    return float(sum(totals) + best)


@stoker.rollout
async def nested(ctx: stoker.Context, task: stoker.Task) -> float:
    """Timeouts over gather and first, with verbs in ``finally``."""
    log: list[str] = []

    async def work(name: str, count: int) -> str:
        try:
            for number in range(count):
                await ctx.call(["work", name, str(number), *log])
        finally:
            await ctx.call(["clean", name])
            log.append(name)
        return name

    for attempt in range(3):
        try:
            async with ctx.timeout("5s"):
                with contextlib.suppress(TimeoutError):
                    async with ctx.timeout("1s"):
                        await ctx.gather(work("a", 2), ctx.first(work("b", 3), work("c", 3)))
                await ctx.sleep("2s")
        except TimeoutError:
            log.append(f"cut{attempt}")
    await ctx.call(["done", *log])
    return float(len(log))


@stoker.rollout
async def faulty(ctx: stoker.Context, task: stoker.Task) -> float:
    """Meets faults, recovers from some, and lets errors cancel siblings."""

    async def careful(number: int) -> int:
        try:
            result = await ctx.call(double, number)
        except Infrastructure as fault:
            ctx.recovered(fault)
            await ctx.sleep(ctx.random.random())
            return -1
        return int(result.value)

    async def strict(number: int) -> int:
        return int((await ctx.call(double, number)).value)

    found = [await careful(number) for number in range(3)]
    try:
        found += await ctx.gather(strict(10), strict(11), strict(12))
    except StokerError as fault:
        found.append(len(fault.code))
    with contextlib.suppress(StokerError):
        await ctx.local(int, "no number")
    return float(sum(found))


@stoker.rollout
async def hashed(ctx: stoker.Context, task: stoker.Task) -> float:
    """Iterates sets of strings in sorted order only: the same under every hash seed."""
    names = {"pytest", "ruff", "mypy", "black", "isort"}
    results = await ctx.gather(*(ctx.call(["lint", name]) for name in sorted(names)))
    async with contextlib.aclosing(_numbers(ctx)) as numbers:
        async for number in numbers:
            if number == 2:
                break
    return float(len(results))


async def _numbers(ctx: stoker.Context) -> Any:
    try:
        for number in range(5):
            await ctx.sleep(number)
            yield number
    finally:
        await ctx.call(["close"])


PROGRAMS: dict[str, Rollout] = {
    program.name: program for program in (agent, wide, nested, faulty, hashed)
}


def script_for(name: str) -> Script:
    """Return the script of one of ``PROGRAMS``; it depends on nothing but the call."""
    return {"agent": _agent_script, "nested": _nested_script, "faulty": _faulty_script}.get(
        name, _plain_script
    )


def _plain_script(asked: Asked) -> Any:
    if asked.verb is Verb.CALL:
        number = asked.arguments.request.arguments.get("number")
        return CallResult(value=None if number is None else number * 2)
    return None


def _agent_script(asked: Asked) -> Any:
    if asked.verb is Verb.GENERATE:
        return Generation(
            text={
                "1": '<tool_call>{"name": "python", "arguments": {"code": "1/0"}}</tool_call>',
                "3": '<tool_call>{"name": "python", "arguments": {}}</tool_call>',
            }.get(asked.path, "def f(): return 1"),
            token_ids=bytes(range(16)),
            logprobs=bytes(16),
        )
    if asked.verb is Verb.RUN:
        return RunResult(exit_code=1, stderr=Stream(kept=b"ZeroDivisionError", total_bytes=17))
    return None


def _nested_script(asked: Asked) -> Any:
    if asked.verb is Verb.TIMER:
        return NEVER if asked.path == "5" else FIRE
    return _plain_script(asked)


def _faulty_script(asked: Asked) -> Any:
    if asked.verb is Verb.CALL and asked.arguments.request.arguments["number"] in {1, 11}:
        return WorkerLost("worker wrk_1 is gone; the action was tried 3 times")
    return _plain_script(asked)
