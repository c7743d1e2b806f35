"""Faults injected into ``sim:`` (C1) and what the lane makes of them."""

import asyncio
from collections import Counter

import pytest

from stoker.coordinator.lane import Lane
from stoker.errors import ModelUnavailable
from stoker.inference.sim import SimModel
from stoker.model.faults import FaultSide
from stoker.model.generation import Generation
from stoker.testing.virtual_clock import run_virtual
from support.inference import lane_over, profile, request, saying, sim

CALL_SECONDS = 11.0


async def _outcomes(lane: Lane, count: int) -> list[Generation | BaseException]:
    calls = (lane.generate(request(f"rol_{n}"), (n,)) for n in range(count))
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("fault", ["too_many", "broken", "closed", "hang", "late"])
def test_c1_a_faulty_replica_is_answered_for_by_the_other(fault: str) -> None:
    async def main() -> None:
        model = sim(replicas=2, window=50, faults={fault: 1.0, "replicas": [0], "late_by": 500})
        lane = lane_over(model, retries=1, call_timeout=60)
        answers = await _outcomes(lane, 40)
        assert all(isinstance(one, Generation) and one.replica == 1 for one in answers)
        figures = lane.figures()
        assert figures.retries == model._faults.injected.total() > 0
        assert model.load(0).running == 0
        await model.close()

    run_virtual(main())


@pytest.mark.parametrize("fault", ["too_many", "broken", "closed", "hang", "late"])
def test_c1_retries_are_bounded_and_end_in_a_typed_fault(fault: str) -> None:
    async def main() -> None:
        model = sim(faults={fault: 1.0, "late_by": 500})
        lane = lane_over(model, retries=2, retry_delay=1, call_timeout=60)
        with pytest.raises(
            ModelUnavailable, match=r"rol_a/0 .*failed 3 times.*replica 0"
        ) as caught:
            await lane.generate(request(), (0,))
        assert caught.value.side is FaultSide.INFRASTRUCTURE
        assert caught.value.context["rollout_id"] == "rol_a"
        assert model._faults.injected.total() == 3
        # Two pauses of 1 s and 2 s, and each try no longer than its timeout.
        assert asyncio.get_running_loop().time() <= 3 + 3 * 60 + 1
        assert lane.room() == 4 or lane.figures().healthy == 0
        assert model.load(0).running == 0

    run_virtual(main())


def test_c1_an_answer_after_our_deadline_is_never_used() -> None:
    async def main() -> None:
        model = sim(faults={"late": 1.0, "late_by": 50})
        lane = lane_over(model, retries=0, call_timeout=CALL_SECONDS + 49)
        with pytest.raises(ModelUnavailable, match=r"did not answer .* within 60 s"):
            await lane.generate(request(), (0,))
        patient = lane_over(model, retries=0, call_timeout=CALL_SECONDS + 51)
        assert (await patient.generate(request(), (0,))).text == "0123456789"
        assert lane.figures().calls == 0

    run_virtual(main())


@pytest.mark.parametrize("seed", range(5))
def test_c1_mixed_faults_leave_every_call_answered(seed: int) -> None:
    async def main() -> None:
        rates = {"too_many": 0.1, "broken": 0.1, "closed": 0.1, "hang": 0.05, "late": 0.05}
        model = sim(replicas=3, window=8, seed=seed, faults={**rates, "late_by": 1000})
        lane = lane_over(model, retries=20, call_timeout=200)
        answers = await _outcomes(lane, 200)
        assert [one for one in answers if not isinstance(one, Generation)] == []
        assert {one.text for one in answers if isinstance(one, Generation)} == {"0123456789"}
        assert len(model._faults.injected) == 5, f"seed {seed}: not every fault was injected"
        assert [one.held for one in lane._replicas.values()] == [0, 0, 0]
        assert [model.load(index).running for index in range(3)] == [0, 0, 0]

    run_virtual(main())


def test_faults_follow_the_seed_and_not_the_order() -> None:
    def drawn(order: list[int], seed: int) -> dict[str, str]:
        async def main() -> dict[str, str]:
            model = SimModel(
                profile(faults={"broken": 0.3, "too_many": 0.3}, seed=seed), saying("")
            )
            seen = {}
            for n in order:
                try:
                    await model.generate(0, request(f"rol_{n}"))
                except ModelUnavailable as error:
                    seen[f"rol_{n}"] = error.context["status"]
            return seen

        return run_virtual(main())

    forward = drawn(list(range(100)), 1)
    assert forward == drawn(list(reversed(range(100))), 1)
    assert forward != drawn(list(range(100)), 2)
    counts = Counter(forward.values())
    assert 15 < counts["429"] < 45
    assert 15 < counts["500"] < 45
