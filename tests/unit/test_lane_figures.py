"""The lane's figures against what can be worked out by hand."""

import asyncio

import pytest

from stoker.config.tree import AdmissionSettings, LaneSettings
from stoker.coordinator.admission import Admission
from stoker.coordinator.figures import RunFigures
from stoker.coordinator.lane import Lane
from stoker.coordinator.lane_figures import LaneTotals
from stoker.coordinator.sampling import AdmissionFeed
from stoker.observe.metrics import Metrics
from stoker.testing.virtual_clock import VirtualClock, run_virtual
from support.inference import HandModel, lane_over, request, sim


def test_the_four_figures_of_a_known_schedule() -> None:
    async def main() -> None:
        # Window 4, a step 1 + 0.25 b: two calls of 11 tokens take 16.5 s; then 3.5 s of nothing.
        model = sim(c=0.25, kv_tokens=1000)
        lane = lane_over(model)
        await asyncio.gather(*(lane.generate(request(f"r{n}"), (0,)) for n in range(2)))
        await asyncio.sleep(3.5)
        seen = lane.figures()
        assert seen.active_share == pytest.approx(16.5 / 20)
        assert seen.occupancy == pytest.approx(2 / 4)
        assert seen.throughput_share == pytest.approx(22 / (20 * 4 / 2))
        assert seen.idle_while_ready_share == 0
        assert seen.room_share == pytest.approx((16.5 * 2 + 3.5 * 4) / (20 * 4))
        assert (seen.calls, seen.tokens, seen.retries) == (2, 22, 0)
        assert seen.service_seconds == pytest.approx(16.5)
        assert seen.wait_seconds == 0
        assert seen.capacity_calls_per_second == pytest.approx(2 / 11)
        assert (seen.simulated, seen.window, seen.replicas, seen.healthy) == (True, 4, 1, 1)
        assert seen.kv_share == 0

    run_virtual(main())


def test_sequences_put_back_for_lack_of_memory_are_counted_and_lower_the_target() -> None:
    async def main() -> None:
        clock = VirtualClock()
        lane = Lane(sim(kv_tokens=40), LaneSettings(), clock, kv_share=0.0)
        admission = Admission(AdmissionSettings(active_start=4), clock)
        feed = AdmissionFeed(admission, lane, RunFigures(Metrics()), results_max=1)
        changes = []
        for turn in range(2):
            calls = (lane.generate(request(f"r{turn}{n}"), (0,)) for n in range(4))
            await asyncio.gather(*calls)
            changes.append(feed.sample(active=4, boxes_reserved=0, stats=None))
        assert lane.figures().preemptions > 0
        assert changes[0] is None
        assert changes[1] is not None
        assert "put back for lack of KV memory" in changes[1].reason

    run_virtual(main())


def test_figures_since_are_of_that_stretch_only() -> None:
    async def main() -> None:
        lane = lane_over(sim())
        await lane.generate(request("r0"), (0,))
        before = lane.totals()
        await asyncio.sleep(11)
        await lane.generate(request("r1"), (0,))
        seen = lane.figures(before)
        assert seen.active_share == pytest.approx(0.5)
        assert seen.calls == 1
        assert lane.figures().active_share == pytest.approx(2 / 3)
        assert lane.totals().since(lane.totals()) == LaneTotals()

    run_virtual(main())


def test_waiting_and_service_are_measured_apart() -> None:
    async def main() -> None:
        model = HandModel()
        model.behave = lambda *_: 2.0
        lane = lane_over(model)
        await asyncio.gather(*(lane.generate(request(f"r{n}"), (0,)) for n in range(3)))
        seen = lane.figures()
        assert seen.service_seconds == pytest.approx(2)
        assert seen.wait_seconds == pytest.approx((0 + 2 + 4) / 3)
        assert seen.throughput_share is None
        assert seen.kv_share is None
        assert seen.active_share == 1

    run_virtual(main())


def test_idle_while_ready_is_measured_and_can_be_seen() -> None:
    """Were room kept from a ready call, the figure would say so: it is not zero by definition."""

    async def main() -> None:
        model = HandModel(windows=(2,))
        model.behave = lambda *_: 10.0
        lane = lane_over(model)
        first = asyncio.create_task(lane.generate(request("a"), (0,)))
        await asyncio.sleep(0)
        lane._ready.__dict__["next"] = lambda _now: None  # a lane that overlooks its room
        second = asyncio.create_task(lane.generate(request("b"), (0,)))
        await asyncio.sleep(5)
        assert lane.figures().idle_while_ready_share == pytest.approx(1)
        del lane._ready.__dict__["next"]
        lane.resume()
        await asyncio.gather(first, second)
        assert lane.totals().idle_while_ready_seconds == pytest.approx(5)

    run_virtual(main())


def test_an_empty_lane_has_figures() -> None:
    async def main() -> None:
        seen = lane_over(sim()).figures()
        assert (seen.active_share, seen.occupancy, seen.idle_while_ready_share) == (0, 0, 0)
        assert seen.throughput_share is None or seen.throughput_share == 0
        assert seen.service_seconds is None

    run_virtual(main())
