"""The rollout program of ``stoker bench scale``: a history of some length, then steps with waits.

``data``: ``turns`` (of the history), ``turn`` (characters said and answered in each) and ``pause``
(mean seconds between two steps, each a model call and the smallest tool).
"""

import stoker


@stoker.rollout(version="1", boxes=0, timeout="24h")
async def scale(ctx: stoker.Context, task: stoker.Task) -> float:
    """Go on until the bench ends it."""
    data = task.data
    chat = ctx.chat("begin")
    for _ in range(data["turns"]):
        chat.user("o" * data["turn"])
        await ctx.generate(chat, tokens_max=data["turn"])
    await ctx.sleep(data["pause"] * ctx.random.random())
    while True:
        await ctx.generate(ctx.chat("step"))
        await ctx.call(["true"], effect="pure")
        await ctx.sleep(data["pause"] * (0.5 + ctx.random.random()))
