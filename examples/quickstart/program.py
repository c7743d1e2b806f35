"""The smallest useful rollout: a policy that may run Python, graded by what it answers."""

import stoker

PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
RUN = stoker.ToolSpec(name="run", description="Run Python code.", parameters=PARAMETERS)


@stoker.rollout(version="1")
async def answer(ctx: stoker.Context, task: stoker.Task) -> stoker.Score:
    """Let the policy work in a box until it answers without a tool call."""
    box = await ctx.environment()
    chat = ctx.chat(task.data["question"], tools=[RUN])
    for _ in range(4):
        turn = await ctx.generate(chat)
        for call in turn.tool_calls:
            if call.error:
                chat.tool_result(call, call.error)
                continue
            seen = await box.run(["python", "-c", call.arguments["code"]], timeout="10s")
            chat.tool_result(call, seen.text)
        if not turn.tool_calls:
            return stoker.Score(float(task.data["answer"] in turn.text))
    return stoker.truncate("four turns without an answer")
