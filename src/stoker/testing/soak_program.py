"""The rollout program of ``stoker bench soak``: everything an action can be, each result checked.

``data``: ``log`` (a file outside every box, where tools leave ``KEY ATTEMPT EFFECT``), ``number``
and ``steps``. What it scores follows from ``number`` alone. A tool's answer that is not its own is
an error of the program, and so a failed rollout.
"""

import stoker

TOOL = 'printf "%s %s %s\\n" "$STOKER_ACTION_KEY" "$STOKER_ATTEMPT" "$2" >> "$1"; printf %s "$3"'


async def tool(ctx: stoker.Context, *, log: str, effect: str, say: str) -> None:
    """Say something through a tool that leaves a line, and hold it to its word."""
    seen = await ctx.call(["sh", "-c", TOOL, "sh", log, effect, say], effect=effect)
    said = seen.run.text if seen.run is not None else seen.error
    if said != say:
        raise ValueError(f"a tool was to say {say!r} and said {said!r}")


@stoker.rollout(version="1", boxes=1, timeout="30m")
async def soak(ctx: stoker.Context, task: stoker.Task) -> float:
    """Take ``steps`` steps and one external action."""
    log, number = task.data["log"], task.data["number"]
    box = await ctx.environment(files={"steps": ""})
    for step in range(task.data["steps"]):
        await ctx.generate(ctx.chat(f"{number} {step}"))
        await ctx.gather(
            tool(ctx, log=log, effect="idempotent", say=f"{number}.{step}"),
            tool(ctx, log=log, effect="pure", say=f"{number}.{step}"),
        )
        seen = await box.run(["sh", "-c", "printf x >> steps; cat steps"])
        if seen.text != "x" * (step + 1):
            raise ValueError(f"step {step} finds {seen.text!r} in its box")
        await ctx.sleep(0.05)
    await tool(ctx, log=log, effect="external", say=str(number))
    return score(number)


def score(number: int) -> float:
    """Return what rollout ``number`` scores."""
    return (number % 7 + 1) / 8
