"""Boxes made ahead: for whom they wait, how many, and when they go."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from stoker.config.classes import WorkerClassSettings
from stoker.errors import BoxFailed
from stoker.model.execution import Baseline, Destination, ExecutionPolicy, Isolation, Limits
from stoker.sandbox.base import Box
from stoker.testing.boxes import MemoryBackend
from stoker.testing.engines import ManualClock
from stoker.worker.assembly import make_ahead
from stoker.worker.boxes import Boxes, Chosen
from stoker.worker.ready import Ahead
from support.worker_boxes import TRUSTED, quiet_log

PLAIN = Baseline()
OTHER = Baseline(environment={"A": "1"})
SMALLER = msgspec.structs.replace(TRUSTED, limits=Limits(processes_max=7))
IDLE = 60.0


class Case:
    """Boxes of memory of which some are made ahead."""

    def __init__(self, ahead: int = 2, **more: int) -> None:
        self.backend = MemoryBackend()
        self.clock = ManualClock()
        self.available = 1 << 40

        async def choose(policy: ExecutionPolicy) -> Chosen:
            offer = await self.backend.offer()
            return Chosen(self.backend, msgspec.structs.replace(offer, isolation=policy.isolation))

        self.boxes = Boxes(choose, quiet_log(), self.clock)
        counts = {"fast": ahead, **more}
        self.boxes.ready.ahead = {name: Ahead(count, IDLE) for name, count in counts.items()}
        self.boxes.reserve_memory_bytes = 1 << 30
        self.boxes.memory_available = lambda: self.available

    @property
    def waiting(self) -> int:
        return len(self.boxes.ready)

    async def ask(
        self, baseline: Baseline = PLAIN, policy: ExecutionPolicy = TRUSTED, name: str = "fast"
    ) -> Box:
        """Have a box, and let others be made ahead."""
        box = await self.boxes.create(baseline, policy, worker_class=name)
        await self.settle()
        return box

    async def settle(self) -> None:
        await self.boxes.ready.settled()
        await self.boxes.settled()


def play(scenario: Callable[[Case], Awaitable[None]], **ahead: int) -> None:
    async def whole() -> None:
        case = Case(**ahead)
        await scenario(case)
        await case.boxes.close()
        assert not case.backend.boxes
        assert case.boxes.alive == case.waiting == 0

    asyncio.run(whole())


def test_a_worker_may_hold_more_descriptors_than_the_usual_limit() -> None:
    code = (
        "import resource as r; from stoker.worker.process import allow_descriptors as allow\n"
        "_, hard = r.getrlimit(r.RLIMIT_NOFILE)\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, min(hard, 2000))); allow()\n"
        "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    soft, hard = map(int, ran.stdout.split())
    assert soft == hard > 256


def test_boxes_wait_once_one_was_asked_for_and_are_made_anew() -> None:
    async def scenario(case: Case) -> None:
        assert case.waiting == 0, "nobody asked for any yet"
        first = await case.ask()
        waited = [box.box_id for box in case.backend.made if box.box_id != first.box_id]
        assert len(waited) == case.waiting == 2
        second, third = await case.ask(), await case.ask()
        assert [second.box_id, third.box_id] == waited
        assert (case.waiting, case.boxes.ready.taken, case.boxes.made) == (2, 2, 1)
        assert case.boxes.alive == 5

    play(scenario)


def test_a_class_without_the_setting_and_a_saved_state_get_boxes_of_their_own() -> None:
    async def scenario(case: Case) -> None:
        await case.ask(name="slow")
        assert case.waiting == 0
        await case.ask(policy=TRUSTED)
        await case.ask(name="slow")
        assert case.boxes.ready.taken == 0

    play(scenario)


def test_a_class_that_says_nothing_has_two_of_boxes_that_take_next_to_nothing() -> None:
    classes = {
        "said": WorkerClassSettings(ready=1),
        "warm": WorkerClassSettings(ready=1),
        "none": WorkerClassSettings(ready=0),
        "unsaid": WorkerClassSettings(),
        "tickets": WorkerClassSettings(by_ticket=True),
    }
    warm = msgspec.structs.replace(TRUSTED, warm=True)
    guest = msgspec.structs.replace(TRUSTED, isolation=Isolation.QEMU)

    async def scenario(case: Case) -> None:
        make_ahead(case.boxes, classes)
        waits = []
        for name, policy in [
            ("unsaid", warm),
            ("unsaid", guest),
            ("none", TRUSTED),
            ("tickets", TRUSTED),
        ]:
            await case.ask(policy=policy, name=name)
            waits.append(case.waiting)
        for name in ("said", "unsaid"):
            await case.ask(name=name)
            waits.append(case.waiting)
        await case.ask(policy=warm, name="warm")
        await case.ask(policy=warm, name="warm")
        assert case.boxes.ready.taken == 1, "who asks for warm boxes by number gets them"
        assert waits == [0, 0, 0, 0, 1, 3]

    play(scenario)


@pytest.mark.parametrize(
    ("baseline", "policy", "name"),
    [
        (OTHER, TRUSTED, "fast"),
        (PLAIN, SMALLER, "fast"),
        (PLAIN, msgspec.structs.replace(TRUSTED, warm=True), "fast"),
        (PLAIN, TRUSTED, "other"),
        (msgspec.structs.replace(PLAIN, digest="sha256:" + "0" * 64), TRUSTED, "fast"),
    ],
)
def test_no_box_goes_to_another_baseline_policy_or_class(
    baseline: Baseline, policy: ExecutionPolicy, name: str
) -> None:
    async def scenario(case: Case) -> None:
        await case.ask()
        waited = {box.box_id for box in case.backend.made}
        got = await case.ask(baseline, policy, name)
        assert got.box_id not in waited
        assert (got.baseline, got.policy) == (baseline, policy)

    play(scenario, other=2)


def test_a_class_never_has_more_waiting_than_it_says() -> None:
    async def scenario(case: Case) -> None:
        await case.ask()
        assert case.waiting == 4
        case.clock.boot += 1
        await case.ask(OTHER)
        assert case.waiting == 4
        assert len(case.backend.made) == 1 + 4 + 1 + 2, "half of the places went to the other"
        case.clock.boot += 1
        before = len(case.backend.made)
        await case.ask()
        assert (case.waiting, len(case.backend.made)) == (4, before + 1), "its own place again"

    play(scenario, ahead=4)


def test_boxes_nobody_asks_for_go() -> None:
    async def scenario(case: Case) -> None:
        kept = await case.ask()
        case.clock.boot += IDLE / 2
        await case.ask(OTHER)
        case.clock.boot += IDLE / 2
        case.boxes.ready.tend()
        await case.settle()
        waiting = [b for b in case.backend.boxes.values() if b.baseline == PLAIN]
        assert waiting == [kept], "only the one in use is left of the idle baseline"
        assert case.waiting == 2, "the other baseline has the places"
        case.clock.boot += IDLE
        case.boxes.ready.tend()
        await case.settle()
        assert case.waiting == 0

    play(scenario)


def test_where_memory_is_short_what_waits_goes_first_and_comes_back() -> None:
    async def scenario(case: Case) -> None:
        await case.ask()
        case.available = 1 << 20
        assert not case.boxes.has_room()
        case.boxes.ready.tend()
        await case.settle()
        assert (case.waiting, case.boxes.alive) == (0, 1)
        await case.ask()
        assert case.waiting == 0, "none is made ahead meanwhile"
        case.available = 1 << 40
        case.boxes.ready.tend()
        await case.settle()
        assert case.waiting == 2

    play(scenario)


def test_what_waits_does_not_keep_a_worker_from_its_one_box() -> None:
    async def scenario(case: Case) -> None:
        case.boxes.discard(await case.ask())
        await case.settle()
        case.available = 1 << 20
        assert case.boxes.alive == case.waiting == 2
        assert case.boxes.has_room()

    play(scenario)


def test_one_that_cannot_be_made_ahead_is_left_to_whoever_needs_one() -> None:
    async def scenario(case: Case) -> None:
        case.boxes.discard(await case.boxes.create(PLAIN, TRUSTED, worker_class="fast"))
        case.backend.create_fails = 2
        await case.settle()
        assert (case.waiting, case.backend.create_fails) == (0, 1), "it was tried once"
        with pytest.raises(BoxFailed):
            await case.ask()
        await case.settle()
        assert case.waiting == 2

    play(scenario)


def test_one_that_ended_while_it_waited_is_given_to_nobody() -> None:
    async def scenario(case: Case) -> None:
        first = await case.ask()
        waited = [box for box in case.backend.made if box.box_id != first.box_id]
        waited[0].lost = True
        assert (await case.ask()).box_id == waited[1].box_id
        for box in case.backend.made[3:]:
            box.lost = True
        assert not (await case.boxes.create(PLAIN, TRUSTED, worker_class="fast")).lost
        await case.settle()
        assert case.boxes.made == 2, "none that waited was of use: one was made"
        assert waited[0].box_id not in case.backend.boxes

    play(scenario)


def test_a_bug_in_making_one_ahead_is_told_and_not_met_again_until_one_is_asked_for() -> None:
    async def scenario(case: Case) -> None:
        create = case.backend.create

        async def flawed(box_id: str, baseline: Baseline, policy: ExecutionPolicy) -> Box:
            tries.append(box_id)
            if len(tries) > 1:
                raise ValueError("a bug")
            return await create(box_id, baseline, policy)

        tries: list[str] = []
        case.backend.create = flawed  # type: ignore[method-assign]
        await case.ask(PLAIN)
        case.boxes.ready.tend()
        await case.settle()
        assert len(tries) == 2, "it is not tried over and over"
        assert case.boxes.ready._filling is not None
        assert case.boxes.ready._filling.exception() is None

    play(scenario)


def test_one_being_made_when_the_worker_ends_is_removed() -> None:
    async def scenario(case: Case) -> None:
        begun, go = asyncio.Event(), asyncio.Event()
        create = case.backend.create

        async def slow(box_id: str, baseline: Baseline, policy: ExecutionPolicy) -> Box:
            box = await create(box_id, baseline, policy)
            if len(case.backend.made) > 1:
                begun.set()
                try:
                    await go.wait()
                except asyncio.CancelledError:
                    await box.destroy()
                    raise
            return box

        case.backend.create = slow  # type: ignore[method-assign]
        await case.boxes.create(PLAIN, TRUSTED, worker_class="fast")
        await begun.wait()

    play(scenario)


def test_whatever_is_asked_each_box_goes_once_and_to_what_it_was_made_for() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)  # noqa: T201 - shown when it fails
    drawn = random.Random(seed)

    async def scenario(case: Case) -> None:
        given: set[str] = set()
        for _ in range(300):
            baseline = drawn.choice((PLAIN, OTHER))
            policy = drawn.choice((TRUSTED, SMALLER))
            name = drawn.choice(("fast", "other", "slow"))
            box = await case.boxes.create(baseline, policy, worker_class=name)
            assert box.box_id not in given
            assert (box.baseline, box.policy) == (baseline, policy)
            given.add(box.box_id)
            if drawn.random() < 0.5:
                await case.boxes.ready.settled()
                assert case.waiting <= 3 + 1
            if drawn.random() < 0.1:
                case.available = drawn.choice((1 << 20, 1 << 40))
            if drawn.random() < 0.2:
                case.clock.boot += drawn.choice((0.1, 1.0, IDLE))
                case.boxes.ready.tend()
            case.boxes.discard(box)
        assert case.boxes.ready.taken + case.boxes.made == 300
        assert case.boxes.ready.taken > 0

    play(scenario, ahead=3, other=1)


@pytest.mark.parametrize("network", [(), (Destination(host="pypi.org"),)])
def test_what_waits_in_a_warm_class_has_run_an_empty_program(
    network: tuple[Destination, ...],
) -> None:
    async def scenario(case: Case) -> None:
        first = await case.ask(policy=msgspec.structs.replace(TRUSTED, warm=True, network=network))
        waiting = [box for box in case.backend.made if box is not first]
        assert [box.runs for box in waiting] == [1, 1]

    play(scenario)
