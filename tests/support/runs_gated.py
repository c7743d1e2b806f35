"""A run whose tools wait until they are let go, and what must be seen of it afterwards."""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from stoker.model.events import Delivered
from support import runs_errands as errands
from support.runs import Rig, rig
from support.runs_records import Records

GATED = """
import stoker

SCRIPT = (
    'printf "%s begun\\\\n" "$STOKER_ACTION_KEY" >> "$1"; '
    'until [ -e "$2" ]; do sleep 0.02; done; printf "%s done\\\\n" "$STOKER_ACTION_KEY" >> "$1"'
)


@stoker.rollout(version="1", boxes=0, timeout="10m")
async def gated(ctx, task):
    await ctx.generate(ctx.chat("go"))
    argv = ["sh", "-c", SCRIPT, "sh", task.data["log"], task.data["gate"]]
    seen = await ctx.call(argv, effect="idempotent", timeout="5m")
    return 1.0 if seen.run.ok else 0.0
"""


def gated(
    folder: Path, count: int, settings: Mapping[str, Any] | None = None
) -> AbstractContextManager[Rig]:
    """Return a run whose tools wait until ``folder/gate`` is there."""
    data = {"log": str(folder / "tools.log"), "gate": str(folder / "gate")}
    tasks = [{"task_id": f"t{number}", "data": data} for number in range(count)]
    return rig(folder, program=GATED, model=errands.MODEL, tasks=tasks, settings=settings)


def gate(one: Rig) -> None:
    (one.folder / "gate").touch()


def count(one: Rig, what: str) -> int:
    return sum(line.endswith(what) for line in one.lines())


def once_each(one: Rig, records: Records) -> None:
    """Every tool ran once and every result was delivered once."""
    assert set(Counter(line for line in one.lines()).values()) == {1}, one.lines()
    for rollout in records.rollouts.values():
        paths = Counter(event.path for event in rollout.events if isinstance(event, Delivered))
        assert set(paths.values()) == {1}, rollout.place
