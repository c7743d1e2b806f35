"""The rollout program of ``stoker bench step``: model call, smallest tool, again.

``data``: ``steps`` (how many), ``hold_step`` (at which step to hold the host, or -1) and
``hold_seconds`` (for how long).
"""

import time

import stoker


@stoker.rollout(version="1", boxes=0, timeout="10m")
async def step(ctx: stoker.Context, task: stoker.Task) -> float:
    """Take ``steps`` steps."""
    for number in range(task.data["steps"]):
        await ctx.generate(ctx.chat("step"))
        if number == task.data["hold_step"]:
            _hold(task.data["hold_seconds"])
        await ctx.call(["true"], effect="pure")
    return 1.0


def _hold(seconds: float) -> None:
    """Do what a program must not: spin, and let nothing else run in this process."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
