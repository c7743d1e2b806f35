"""Checkpoints of environments as a worker takes them and begins with them."""

import asyncio

from stoker.model.checkpoint import Checkpoint
from stoker.model.execution import Baseline
from stoker.model.ids import EnvironmentId
from stoker.model.tools import CheckpointRequest, OpenRequest, RunResult
from support.worker_boxes import Bench, make_action

ENV = EnvironmentId("env_a")


def test_whoever_begins_at_a_checkpoint_is_told_of_an_interruption_before_it() -> None:
    async def scenario() -> None:
        bench = Bench()
        await bench.open()
        for number, interrupted in enumerate((False, True)):
            kept = await bench.do(
                make_action(
                    "box.checkpoint", CheckpointRequest(), f"keep-{number}", environment_id=ENV
                )
            )
            saved = bench.seen(kept, Checkpoint)
            request = OpenRequest(baseline=Baseline(), policy=bench.policy, checkpoint=saved)
            name = f"env_{number}"
            await bench.do(
                make_action("environment.open", request, name, environment_id=EnvironmentId(name))
            )
            after = await bench.run("echo", "on", name=name)
            assert bench.seen(after, RunResult).interrupted_before is interrupted
            await bench.run("hang", limit=0.02)

    asyncio.run(scenario())
