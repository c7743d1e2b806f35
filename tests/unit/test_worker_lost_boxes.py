"""What a worker says of a box that was lost under its work."""

import asyncio

from stoker.model.action import Effect
from stoker.model.completion import CompletionStatus
from stoker.model.tools import CallRequest, RunRequest, RunResult
from stoker.testing.boxes import MemoryBackend, MemoryBox
from support.worker_boxes import Bench, make_action

FUNCTION = CallRequest(module=__file__, function="anything")


def test_a23_a_call_whose_box_vanishes_is_our_fault_and_no_result() -> None:
    async def scenario() -> None:
        for request in (CallRequest(argv=("vanish",)), FUNCTION):

            async def vanish(box: MemoryBox, _request: RunRequest) -> RunResult:
                box.lost = True
                return RunResult(signal=9)

            bench = Bench(MemoryBackend(vanish))
            ended = await bench.do(make_action("call", request, effect=Effect.PURE))
            assert ended.status is CompletionStatus.ERROR
            assert ended.observation is None
            assert ended.fault is not None
            assert ended.fault.code == "box_failed"
            await bench.boxes.settled()
            assert bench.boxes.alive == 0

    asyncio.run(scenario())
