"""A repair loop: try, look at the traceback, answer, be graded by a judge that cannot be fooled.

This is all a user writes. Whatever leaves the function goes through ``ctx``, is journalled, and is
not done twice, however often the process behind it dies.
"""

import stoker

TURNS_MAX = 6
RUN_TESTS = stoker.ToolSpec(
    name="run_tests",
    description="Run the problem's tests on a whole solution file; returns what they printed.",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
        "additionalProperties": False,
    },
)
QUEUE = 'echo "$STOKER_ACTION_KEY" >> "$1" && exec sleep "$2"'
"""A trusted service with a heavy tail; it notes each of its runs, so that they can be counted."""


@stoker.rollout(version="1", boxes=1, timeout="10m")
async def repair(ctx: stoker.Context, task: stoker.Task) -> stoker.Verdict:
    """Work on one problem until the policy answers without a tool call."""
    data, waits = task.data, iter(task.data["waits"])
    box = await ctx.environment("python", files={"check.py": data["check"]}, worker_class="tests")
    chat = ctx.chat(data["prompt"], tools=[RUN_TESTS])
    for _ in range(TURNS_MAX):
        turn = await ctx.generate(chat, tokens_max=16_384)
        if not turn.tool_calls:
            break
        for call in turn.tool_calls:
            if call.error:  # malformed arguments are an observation, not a crash
                chat.tool_result(call, call.error)
                continue
            seen = await box.run(
                ["sh", "-c", "cat > solution.py && exec python check.py"],
                stdin=call.arguments["code"],
                timeout="20s",
            )
            await queue(ctx, data, next(waits, 0.0))
            chat.tool_result(call, seen.text)
    await box.write_files({"solution.py": code_of(turn.text)})
    tests = stoker.Tests(source=data["tests"], entry_point=data["entry_point"])
    return await ctx.score(box, tests)


async def queue(ctx: stoker.Context, data: dict[str, str], seconds: float) -> None:
    """Call the slow service; its effect lies outside the box, so it must never run twice."""
    await ctx.call(
        ["sh", "-c", QUEUE, "queue", data["counter"], f"{seconds:g}"],
        effect="external",
        worker_class="waits",
    )


def code_of(text: str) -> str:
    """Return the code in the first fenced block of ``text``, or all of it."""
    _, fence, rest = text.partition("```python\n")
    return rest.partition("\n```")[0] if fence else text
