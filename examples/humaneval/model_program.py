"""A real model writes the code; a traceback gives it a second turn; a judge decides.

The rollout of ``make demo-model``, and of anybody's model: ``stoker run model_program.py`` with
``--model http://…``. Tests run in a box, the verdict comes from another that the answer never sees.
"""

import stoker

TURNS_MAX = 2
TRACEBACK_CHARACTERS_MAX = 600
FENCE = "```"


@stoker.rollout(version="1", boxes=1, timeout="20m")
async def write(ctx: stoker.Context, task: stoker.Task) -> stoker.Verdict:
    """Work on one problem for at most ``TURNS_MAX`` turns."""
    data = task.data
    box = await ctx.environment("python", files={"check.py": data["check"]}, worker_class="tests")
    chat = ctx.chat(data["prompt"])
    for number in range(TURNS_MAX):
        turn = await ctx.generate(chat, temperature=0.0, tokens_max=data["tokens_max"])
        code = code_of(turn.text, data["start"], data["entry_point"])
        seen = await box.run(
            ["sh", "-c", "cat > solution.py && exec python check.py"], stdin=code, timeout="20s"
        )
        if seen.ok or number + 1 == TURNS_MAX:
            break
        what = seen.text[-TRACEBACK_CHARACTERS_MAX:]
        chat.user(f"The tests failed:\n{what}\nAnswer with the whole corrected function.")
    await box.write_files({"solution.py": code})
    tests = stoker.Tests(source=data["tests"], entry_point=data["entry_point"])
    return await ctx.score(box, tests)


def code_of(text: str, start: str, entry_point: str) -> str:
    """Return the code of an answer: its first fenced block or all of it.

    An answer that goes on where the problem stops, as base models do, is put after ``start``; one
    that begins anew gets what the problem has before its function: imports, helpers.
    """
    _, fence, rest = text.partition(FENCE)
    code = rest.partition(FENCE)[0].removeprefix("python").lstrip("\n") if fence else text
    whole = any(line.startswith(("def ", "from ", "import ")) for line in code.splitlines())
    return (start.partition(f"def {entry_point}(")[0] if whole else start) + code
