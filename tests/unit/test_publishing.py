"""Publishing a policy while others hold the lane, and with calls in flight."""

import asyncio
from types import SimpleNamespace
from typing import Any

from stoker.config.tree import LaneSettings
from stoker.coordinator.lane import Lane
from stoker.coordinator.publishing import Mode, publish
from stoker.inference.callable import CallableModel
from stoker.model.generation import GenerateRequest, Generation
from stoker.testing.virtual_clock import VirtualClock, run_virtual
from support.inference import request, turns_of_loop


class _World:
    """A lane over an engine of this process, and as much of a coordinator as publishing needs."""

    def __init__(self) -> None:
        self.running = 0
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.model = CallableModel(self._generate, window=2)
        self.lane = Lane(self.model, LaneSettings(), VirtualClock())
        self.model.watch_pauses(self.lane.pause, self.lane.resume)
        self.call: asyncio.Task[Generation]

    async def _generate(self, asked: GenerateRequest) -> Generation:
        del asked
        self.running += 1
        try:
            await asyncio.sleep(10)
            return Generation(text="done")
        finally:
            self.running -= 1

    def start(self) -> None:
        self.call = asyncio.create_task(self.lane.generate(request(), (0,)))

    async def publish(self, mode: Mode, weights: Any = None) -> None:
        log = SimpleNamespace(event=lambda name, **fields: self.said.append((name, fields)))
        flow = SimpleNamespace(active={}, parts=SimpleNamespace(log=log))
        coordinator = SimpleNamespace(
            parts=SimpleNamespace(lane=self.lane),
            flow=flow,
            keeper=SimpleNamespace(cut_stale=lambda _: None),
        )

        async def written(_: int) -> None:
            pass

        feed = SimpleNamespace(publish=written)
        parts: tuple[Any, Any] = coordinator, feed
        await publish(*parts, self.model, 1, mode=mode, weights=weights)


def test_a_publication_does_not_end_the_pause_of_whoever_owns_the_weights() -> None:
    async def main() -> None:
        world = _World()
        world.model.pause()  # as another run on the same servers does while it loads
        await world.publish("drain")
        world.start()
        await asyncio.sleep(1)
        assert (world.lane.figures().paused, world.running) == (True, 0)
        world.model.resume()
        assert (await world.call).text == "done"

    run_virtual(main())


def test_the_owner_s_resume_does_not_end_a_drain() -> None:
    async def main() -> None:
        world = _World()
        world.start()
        await turns_of_loop()
        publishing = asyncio.create_task(world.publish("drain"))
        await asyncio.sleep(1)
        world.model.pause()
        world.model.resume()
        held = asyncio.create_task(world.lane.generate(request("other"), (0,)))
        await asyncio.sleep(1)
        assert world.running == 1, "only the call that is drained"
        await publishing
        await held

    run_virtual(main())


def test_weights_change_when_the_calls_that_were_taken_back_have_let_go() -> None:
    async def main() -> None:
        world = _World()
        world.start()
        await turns_of_loop()
        seen: list[int] = []

        async def load() -> None:
            seen.append(world.running)

        assert world.running == 1
        await world.publish("abort", load)
        assert seen == [0]
        assert world.said[-1] == ("calls_taken_back", {"continued": 0, "anew": 1})
        said = await world.call
        assert (said.text, said.reissued) == ("done", True), "what it had sampled is lost"

    run_virtual(main())


def test_weights_that_changed_elsewhere_leave_nothing_cached_to_believe_in() -> None:
    async def main() -> None:
        world = _World()
        flushed = []
        world.lane.working.flush = lambda: flushed.append(world.running)  # type: ignore[method-assign]
        world.start()
        await turns_of_loop(3)
        await world.publish("keep")
        assert flushed == [1], "once, and the call in flight goes on"
        await world.call

    run_virtual(main())
