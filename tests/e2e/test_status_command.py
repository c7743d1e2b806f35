"""``stoker status`` as typed: work over a cap while it waits, branches that nobody runs."""

import json
from pathlib import Path

from stoker.coordinator.branch_requests import waiting
from support import runs_errands as errands
from support.runs import rig, until
from support.runs_gated import gate, gated


def test_status_tells_what_is_parked_over_a_cap(tmp_path: Path) -> None:
    """Four tools and room for one that is queued or running."""
    with gated(tmp_path, 4, {"ledger": {"queued_max": 1}}) as one:
        one.start()
        until(lambda: (one.status().get("caps") or {}).get("parked") == 3, "three that are parked")
        said = one.stoker("status", one.run.path.name)
        assert said.returncode == 0, said.stderr
        lines = said.stdout.splitlines()
        (ledger,) = (line for line in lines if line.startswith("ledger "))
        assert "1/1 queued" in ledger
        assert ledger.endswith(", 3 parked over a cap")
        head, fast = (line.split() for line in lines if line.startswith(("class ", "fast ")))
        assert dict(zip(head, fast, strict=False))["parked"] == "3", said.stdout
        gate(one)
        one.finish()
        said = one.stoker("status", one.run.path.name)
        assert "parked" not in said.stdout, "what has drained is not told of"


TWICE = """
import stoker


@stoker.rollout(version="1", boxes=0, timeout="1m")
async def twice(ctx, task):
    chat = ctx.chat("go")
    await ctx.generate(chat)
    chat.user("on")
    await ctx.generate(chat)
    return 1.0
"""


def test_status_of_a_finished_run_tells_of_branches_that_wait(tmp_path: Path) -> None:
    tasks = [{"task_id": "t"}]
    settings = {"workers": {"count": 0}}
    with rig(tmp_path, program=TWICE, model=errands.MODEL, tasks=tasks, settings=settings) as one:
        one.start()
        one.finish()
        run = one.run.path.name
        assert "branch" not in one.stoker("status", run).stdout
        made = one.stoker("branch", run, "t", "--at-step", "1", "--count", "2")
        assert made.returncode == 0, made.stderr
        said = one.stoker("status", run).stdout
        assert f"{run}: finished" in said
        assert "2 branches asked for by stoker branch: to be run when the run goes on" in said
        assert f"stoker run … --resume {run}" in said
        assert json.loads(one.stoker("status", run, "--json").stdout)["branches_waiting"] == 2
        assert waiting(one.run) == 2, "so it is not pruned"
        one.start()
        assert one.finish()["snapshot"]["outcomes"] == {"completed": 3}
        assert "asked for" not in one.stoker("status", run).stdout
