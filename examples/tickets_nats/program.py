"""A rollout whose tools are handed out by a queue of the team's own."""

import stoker

SCRIPT = 'printf "%s %s\\n" "$STOKER_ACTION_KEY" "$STOKER_ATTEMPT" >> "$1"; sleep "$2"; printf ran'


@stoker.rollout(version="1", boxes=0, timeout="10m")
async def errands(ctx: stoker.Context, task: stoker.Task) -> float:
    """Run a few tools side by side; worth the share of them that is known to have run."""
    await ctx.generate(ctx.chat(f"errand {task.task_id}"))
    log, pause = task.data["log"], task.data.get("pause", "0.05")

    async def tool(effect: str) -> bool:
        try:
            argv = ["sh", "-c", SCRIPT, "sh", log, pause]
            seen = await ctx.call(argv, effect=effect, worker_class="tools")
        except stoker.Infrastructure as fault:
            ctx.recovered(
                fault
            )  # for instance: nobody can say whether a killed tool had its effect
            return False
        return seen.run.text == "ran"

    known = await ctx.gather(tool("external"), tool("idempotent"), tool("pure"))
    return sum(known) / len(known)
