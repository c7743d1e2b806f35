"""A server that several runs use: divided by one rule, from claims made through the ledger."""

import asyncio
import random
from pathlib import Path
from typing import NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stoker.broker.base import Claim, ClaimRequest, Ledger, LedgerLimits
from stoker.broker.claims import CLAIM_SECONDS
from stoker.broker.memory import MemoryLedger
from stoker.config.tree import AdmissionSettings, LaneSettings
from stoker.coordinator.admission import Admission
from stoker.coordinator.figures import RunFigures
from stoker.coordinator.lane import Lane
from stoker.coordinator.sampling import AdmissionFeed
from stoker.coordinator.server_share import ServerShare, divide, part_of
from stoker.inference.base import DeviceLoad, ModelInfo, ReplicaInfo
from stoker.inference.profile import SimProfile
from stoker.model.generation import GenerateRequest, Generation, Sampling
from stoker.model.ids import RolloutId, RunId
from stoker.observe.metrics import Metrics
from stoker.testing.simulator.device_model import DeviceModel, ids
from stoker.testing.virtual_clock import VirtualClock, run_virtual
from support.ledger import ENGINES, Harness, with_ledger

A, B, C = RunId("run_a"), RunId("run_b"), RunId("run_c")
SERVER = "http://model:8000"
WINDOW = 64
WARM = 20
"""Seconds before anything is counted."""


def claim(
    run: RunId, wanted: int, partition: str = "0", weight: float = 1.0, memory: float = 0.0
) -> Claim:
    return Claim(
        run_id=run,
        partition=partition,
        servers=(SERVER,),
        window=WINDOW,
        wanted=wanted,
        memory=memory,
        weight=weight,
    )


def calls(mine: Claim, claims: list[Claim]) -> float:
    return part_of(mine, claims)[0]


def test_a_run_alone_has_all_of_it_whatever_its_partitions() -> None:
    mine = claim(A, 64)
    assert part_of(mine, [mine]) == (1.0, 1.0)
    assert calls(mine, [mine, claim(A, 64, "1")]) == 1.0


def test_two_runs_that_want_all_get_half_each_and_partitions_divide_it() -> None:
    one, other = claim(A, 200), claim(B, 64)
    assert calls(one, [one, other]) == calls(other, [one, other]) == 0.5
    half = claim(B, 64, "1")
    assert calls(half, [one, other, half]) == 0.25


def test_what_one_does_not_want_is_the_other_s_and_weights_count() -> None:
    one, little, none = claim(A, 100), claim(B, 10), claim(C, 0)
    assert calls(one, [one, little, none]) == pytest.approx(54 / 64)
    assert calls(little, [one, little, none]) == pytest.approx(10 / 64)
    heavy = claim(B, 100, weight=3.0)
    assert calls(heavy, [one, heavy]) == 0.75


def test_memory_is_divided_apart_from_calls_and_not_once_more_among_partitions() -> None:
    long, short = claim(A, 5, memory=0.9), claim(B, 100, memory=0.2)
    assert part_of(long, [long, short]) == pytest.approx((5 / 64, 0.8))
    assert part_of(short, [long, short]) == pytest.approx((59 / 64, 0.2))
    halves = [claim(B, 50, name, memory=0.4) for name in "01"]
    assert part_of(halves[0], [long, *halves]) == pytest.approx((59 / 128, 0.5))


wants = st.dictionaries(
    st.sampled_from([A, B, C, RunId("run_d")]),
    st.tuples(st.integers(0, 200), st.sampled_from([0.5, 1.0, 3.0])),
    min_size=1,
)


@given(asked=wants, total=st.integers(1, 200))
def test_it_is_max_min_fair_and_everything_is_divided(
    asked: dict[RunId, tuple[int, float]], total: int
) -> None:
    wanted = {run: float(most) for run, (most, _) in asked.items()}
    weights = {run: weight for run, (_, weight) in asked.items()}
    given_ = divide(total, wanted, weights)
    assert sum(given_.values()) == pytest.approx(total)
    short = {run for run in wanted if given_[run] < wanted[run] - 1e-6}
    for run in short:
        for other in wanted:
            level, mine = given_[other] / weights[other], given_[run] / weights[run]
            assert level <= mine + 1e-6, "nobody has more than one who wants more"


@pytest.mark.parametrize("engine", ENGINES)
def test_claims_are_heard_by_all_on_the_server_and_forgotten(engine: str, tmp_path: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.ledger.claim(ClaimRequest(claim=claim(A, 1)))
        elsewhere = Claim(run_id=C, servers=("http://other:1",), window=1, wanted=1)
        await h.ledger.claim(ClaimRequest(claim=elsewhere))
        heard = await h.ledger.claim(ClaimRequest(claim=claim(B, 2)))
        assert heard.claims == (claim(A, 1), claim(B, 2))
        heard = await h.ledger.claim(ClaimRequest(claim=claim(A, 5)))
        assert heard.claims == (claim(A, 5), claim(B, 2)), "the latest counts"
        await h.advance(CLAIM_SECONDS - 1)
        await h.ledger.claim(ClaimRequest(claim=claim(A, 6)))
        await h.advance(2)
        heard = await h.ledger.claim(ClaimRequest(claim=claim(A, 6)))
        assert heard.claims == (claim(A, 6),), "who says nothing for a while has none"

    with_ledger(engine, tmp_path, scenario, LedgerLimits())


class OneServer(DeviceModel):
    """A device behind an address, as a run sees it that gives it so many calls at once."""

    def __init__(self, device: DeviceModel, window: int) -> None:
        self._device_model, self._calls = device, window

    def info(self) -> ModelInfo:
        found = self._device_model.info()
        seen = (replace(r, server=SERVER, window=self._calls) for r in found.replicas)
        return replace(found, replicas=tuple(seen))

    async def generate(self, replica: int, request: GenerateRequest) -> Generation:
        return await self._device_model.generate(replica, request)

    def load(self, replica: int) -> DeviceLoad:
        return self._device_model.load(replica)


class Run:
    """Rollouts of a run in a closed loop: a call, a wait, a call … on a lane of its own."""

    def __init__(self, name: RunId, model: DeviceModel, clock: VirtualClock, seed: int) -> None:
        self.name = name
        self.lane = Lane(model, LaneSettings(call_timeout=1e9), clock, kv_share=0.0)
        self.answers = 0
        self._random = random.Random(seed)

    async def rollout(self, number: int, think: float) -> None:
        rollout, step = RolloutId(f"{self.name}_{number}"), 0
        while True:
            request = GenerateRequest(
                request_id=f"{rollout}/{step}",
                rollout_id=rollout,
                task_id="",
                step=step,
                messages=(),
                tools=(),
                sampling=Sampling(tokens_max=1),
                seed=0,
                prompt_ids=ids(1),
            )
            await self.lane.generate(request, (number,))
            self.answers += 1
            step += 1
            await asyncio.sleep(self._random.expovariate(1 / think))


class Load(NamedTuple):
    """What a run asks for."""

    rollouts: int
    think: float
    window: int = WINDOW


def shares(
    asked: dict[RunId, Load], *, seconds: float = 120, shared: bool = True
) -> tuple[dict[RunId, float], float]:
    """Return the share of each run's answers, and all answers ÷ the device's capacity."""
    profile = SimProfile(policy="scripted:none", a=0.25, c=0.02, window=WINDOW, name="turns")

    async def main() -> tuple[dict[RunId, float], float]:
        clock = VirtualClock()
        device, ledger = DeviceModel(profile), MemoryLedger(clock=clock)
        runs = [
            Run(name, OneServer(device, load.window), clock, seed)
            for seed, (name, load) in enumerate(asked.items())
        ]
        tasks = [
            asyncio.create_task(run.rollout(number, asked[run.name].think))
            for run in runs
            for number in range(asked[run.name].rollouts)
        ]
        parts = [
            ServerShare(
                cast("Ledger", ledger),
                run.lane,
                replace(claim(run.name, 0), window=asked[run.name].window),
            )
            for run in runs
        ]
        for second in range(int(seconds)):
            if second == WARM:
                for run in runs:
                    run.answers = 0
            for part in parts:
                if shared:
                    await part.refresh(more=False)
            await asyncio.sleep(1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        total = sum(run.answers for run in runs)
        capacity = WINDOW / (profile.a + profile.c * WINDOW)
        await device.close()
        await ledger.close()
        return {run.name: run.answers / total for run in runs}, total / (seconds - WARM) / capacity

    return run_virtual(main())


def test_two_runs_on_one_server_are_fair_within_5_percent() -> None:
    """One has three times the window and many more rollouts than the other."""
    asked = {A: Load(600, 1.0, 3 * WINDOW), B: Load(150, 1.0)}
    unfair, _ = shares(asked, shared=False)
    assert unfair[A] > 0.6, "without claims who asks more gets more: else this shows nothing"
    fair, used = shares(asked)
    assert fair[A] == pytest.approx(0.5, abs=0.025)
    assert used >= 0.97, "and the server is as busy as before"


def test_a_run_that_wants_little_gets_that_and_the_other_all_the_rest() -> None:
    little = Load(20, 5.0)
    got, used = shares({A: Load(400, 1.0), B: little})
    assert used >= 0.97
    _, alone = shares({B: little})
    assert got[B] * used >= 0.75 * alone, "what it would have had alone, but for fuller batches"


def test_a_run_whose_part_binds_grows_to_its_fair_share() -> None:
    """Its rollouts do not wait between calls: what it uses is its part, which says no more."""
    profile = SimProfile(policy="scripted:none", a=0.25, c=0.02, window=WINDOW, name="turns")

    async def main() -> int:
        clock = VirtualClock()
        device, ledger = DeviceModel(profile), MemoryLedger(clock=clock)
        full, grows = (Run(name, OneServer(device, WINDOW), clock, 0) for name in (A, B))
        tasks = [asyncio.create_task(full.rollout(n, 0.001)) for n in range(200)]
        admission = Admission(AdmissionSettings(), clock)
        feed = AdmissionFeed(admission, grows.lane, RunFigures(Metrics()), 1000)
        parts = [
            ServerShare(cast("Ledger", ledger), run.lane, claim(run.name, 0))
            for run in (full, grows)
        ]
        active = 0
        for _ in range(WARM):
            for part in parts:
                await part.refresh(more=True)
            feed.sample(active=active, boxes_reserved=0, stats=None)
            while active < admission.target():
                tasks.append(asyncio.create_task(grows.rollout(active, 0.001)))
                active += 1
            await asyncio.sleep(1)
        running = grows.lane.running
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await device.close()
        await ledger.close()
        return running

    assert run_virtual(main()) == WINDOW // 2


def test_only_the_server_that_two_share_is_divided() -> None:
    async def main() -> list[int]:
        clock = VirtualClock()
        profile = SimProfile(
            policy="scripted:none", a=1, c=0, window=WINDOW, name="turns", replicas=2, kv_tokens=999
        )
        device, ledger = DeviceModel(profile), MemoryLedger(clock=clock)
        found = device.info()
        servers = (SERVER, "http://other:1")
        replicas = tuple(map(named, found.replicas, servers))
        device.info = lambda: replace(found, replicas=replicas)  # type: ignore[method-assign]
        lane = Lane(device, LaneSettings(), clock)
        mine = ServerShare(
            cast("Ledger", ledger), lane, replace(claim(A, 0, memory=0), servers=servers)
        )
        rooms = [lane.room()]
        await ledger.claim(ClaimRequest(claim=claim(B, WINDOW, memory=1.0)))
        await mine.refresh(more=False)
        rooms.append(lane.room())
        memories = [lane.working.memory(replica) for replica in (0, 1)]
        rooms += [int(one.residency.kept) for one in memories if one is not None]
        await device.close()
        await ledger.close()
        return rooms

    assert run_virtual(main()) == [2 * WINDOW, 1 + WINDOW, 1, 999]


def named(replica: ReplicaInfo, server: str) -> ReplicaInfo:
    return replace(replica, server=server)


def test_a_smaller_part_takes_no_call_back_and_a_larger_one_gives_room_at_once() -> None:
    async def main() -> None:
        clock = VirtualClock()
        profile = SimProfile(policy="scripted:none", a=1.0, c=0.0, window=8, name="turns")
        model = DeviceModel(profile)
        run = Run(A, model, clock, 0)
        tasks = [asyncio.create_task(run.rollout(n, 0.001)) for n in range(20)]
        await asyncio.sleep(0.5)
        assert (run.lane.running, run.lane.wanting) == (8, 20)
        run.lane.share({0: (0.25, 0.25)})
        assert run.lane.running == 8
        assert run.lane.room() == 0
        await asyncio.sleep(2.0)
        assert run.lane.running == 2
        run.lane.share({0: (0.01, 0.01)})
        await asyncio.sleep(2.0)
        assert run.lane.running == 1, "never nothing"
        run.lane.share({0: (1.0, 1.0)})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert run.lane.running == 8
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await model.close()

    run_virtual(main())
