"""The rollout program of ``stoker bench lane --real``: a rollout of the simulator, for real.

``data``: ``waits``, the seconds that the tool after each model call takes.
"""

import stoker


@stoker.rollout(version="1", boxes=0, timeout="1h")
async def trace(ctx: stoker.Context, task: stoker.Task) -> float:
    """Ask the model, then a tool that sleeps; once for each wait."""
    for seconds in task.data["waits"]:
        await ctx.generate(ctx.chat("step"))
        await ctx.call(["sleep", f"{seconds:.6f}"], effect="pure")
    return 1.0
