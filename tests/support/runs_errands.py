"""A rollout program with something of everything, whose tools leave a line for each execution.

Lines are ``KEY ATTEMPT EFFECT``; they lie in a file outside every box. What the program sees and
scores depends on the run's seed alone, so that a run that was killed can be compared with one that
was not.
"""

import asyncio
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from stoker.errors import IsolationUnavailable
from stoker.model.execution import ExecutionPolicy, Isolation
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.select import choose_backend

PROGRAM = '''
import hashlib
import os

import stoker

SCRIPT = (
    'printf "%s %s %s\\\\n" "$STOKER_ACTION_KEY" "$STOKER_ATTEMPT" "$2" >> "$1"; '
    '[ "$4" = 0 ] || sleep "$4"; printf %s "$3"'
)


def tool(ctx, log, effect, say, pause="0", **more):
    argv = ["sh", "-c", SCRIPT, "sh", log, effect, say, pause]
    return ctx.call(argv, effect=effect, **more)


async def leg(ctx, log, name):
    """A sub-agent: two calls, the second made of what the first said."""
    drawn = ctx.random.randrange(10**9)
    first = await tool(ctx, log, "idempotent", f"{name} {drawn}")
    second = await tool(ctx, log, "pure", f"{first.run.text} {ctx.random.random()}", "0.02")
    return second.run.text


async def waiting(ctx, gate):
    while not await ctx.local(os.path.exists, gate):
        await ctx.sleep(0.2)


@stoker.rollout(version="1", boxes=0, timeout="20m")
async def errands(ctx, task):
    if "gate" in task.data:
        await ctx.gather(waiting(ctx, task.data["gate"]))
    log = task.data["log"]
    chat = ctx.chat(f"errand {task.task_id}")
    turn = await ctx.generate(chat)
    left, right = await ctx.gather(leg(ctx, log, "left"), leg(ctx, log, "right"))
    chat.user(left + right)
    await ctx.call(["true", f"{ctx.now()!r}"])
    async with ctx.timeout("15m"):
        sent = await tool(ctx, log, "external", ctx.new_id("mail_"), "0.01")
    if task.data.get("boxed"):
        inside = task.data["boxed"]
        seen = await tool(ctx, inside, "idempotent", "boxed", worker_class="boxed")
        chat.user(seen.run.text)
    await ctx.sleep(0.01)
    total = await ctx.local(sum, [len(left), len(right)])
    chat.user(f"{sent.run.text} {total}")
    turn = await ctx.generate(chat)
    digest = hashlib.sha256(turn.text.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32
'''

MODEL = '''
import hashlib
import time
from pathlib import Path

ASKED = Path(__file__).with_name("model.log").open("a", buffering=1)


def answer(request):
    """A digest of the whole history: one byte seen wrongly changes every token."""
    ASKED.write(f"{request.request_id} {time.time()}\\n")
    told = "|".join(f"{m.role}:{m.content}" for m in request.messages)
    return hashlib.sha256(f"{request.seed}|{told}".encode()).hexdigest()
'''

WAITING = "0."
"""Where the calls of ``waiting`` lie in a rollout that has a gate: their number is chance."""
TAIL = 3
"""Last tasks that wait for the gate: so the run cannot end before it was hurt as planned."""
LINES = 5
"""Of one rollout without a boxed call."""


def tasks(
    count: int, log: Path, *, boxed_every: int = 0, gate: Path | None = None
) -> list[dict[str, Any]]:
    """Return ``count`` tasks; every so many has a call in a namespace box, the last have a gate."""
    found = []
    for number in range(count):
        data = {"log": str(log)}
        if boxed_every and number % boxed_every == 0:
            data["boxed"] = f"/outside/{log.name}"
        if gate is not None and number >= count - TAIL:
            data["gate"] = str(gate)
        found.append({"task_id": f"t{number:03}", "data": data})
    return found


@cache
def namespaces_work() -> bool:
    """Whether this host can make namespace boxes; where not, runs do without the boxed calls."""

    async def tried() -> bool:
        policy = ExecutionPolicy(isolation=Isolation.NAMESPACE, accept_shared_kernel=True)
        with tempfile.TemporaryDirectory() as state:
            async with SandboxHost.open(Path(state)) as host:
                try:
                    await (await choose_backend(policy, host)).close()
                except IsolationUnavailable:
                    return False
                return True

    return asyncio.run(tried())


def boxed_class(folder: Path) -> dict[str, Any]:
    """Return settings of a class of namespace boxes that see ``folder`` as ``/outside``."""
    mount = {"source": str(folder), "target": "/outside", "writable": True}
    return {
        "workers": {
            "classes": {
                "boxed": {
                    "isolation": "namespace", "slots": 2, "attempts": 20, "mounts": [mount],
                }
            }
        }
    }  # fmt: skip
