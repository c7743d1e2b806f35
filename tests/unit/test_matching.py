"""Where ready calls go when a replica that holds their contexts is ill."""

from stoker.coordinator.lane_replica import FAILURES_MAX, LaneReplica
from stoker.coordinator.matching import Matching
from stoker.coordinator.ready_set import ReadyCall
from stoker.coordinator.working_set import AGED_SECONDS, WorkingSet
from stoker.inference.base import ReplicaInfo
from stoker.model.ids import RolloutId
from stoker.testing.virtual_clock import run_virtual

KV = 10_000


class _World:
    def __init__(self, replicas: int) -> None:
        infos = [ReplicaInfo(replica=n, window=4, kv_tokens=KV) for n in range(replicas)]
        self.replicas = {one.replica: LaneReplica(one) for one in infos}
        self.working = WorkingSet(infos)
        self.matching = Matching(self.replicas, self.working)

    def ready(self, name: str, tokens: int, now: float) -> ReadyCall:
        """Have a call of history ``name`` ready; what stands before a ``/`` is its rollout."""
        rollout = RolloutId(name.partition("/")[0])
        call = ReadyCall(order=(now,), rollout=rollout, since=now, history=name, tokens=tokens)
        self.matching.add(call, now)
        return call

    def turn(self, name: str, replica: int, tokens: int) -> None:
        """Let ``name`` have had a turn on ``replica``; it waits for a tool now."""
        call = self.ready(name, tokens, 0.0)
        self.matching.given(call, self.replicas[replica])
        self.working.issue(call.number, name, replica)
        self.working.answer(
            call.number, name, replica, prompt=tokens, sampled=0, cached=None, now=0.0
        )

    def ill(self, replica: int) -> None:
        for _ in range(FAILURES_MAX):
            self.replicas[replica].failed()


def test_a_call_whose_replica_is_ill_is_parked_and_returns_elsewhere() -> None:
    async def main() -> None:
        world = _World(replicas=2)
        world.turn("a", 0, 4000)
        world.turn("b", 1, 8000)
        world.ill(0)
        call = world.ready("a", 4100, 1.0)
        assert world.matching.next(1.0) is None, "no memory for it on the other"
        assert world.matching.parked == 1, "and so no new rollout starts"
        assert world.matching.next(1.0 + AGED_SECONDS) == (call, world.replicas[1])

    run_virtual(main())


def test_it_goes_home_when_that_is_well_again_though_its_memory_is_full() -> None:
    async def main() -> None:
        world = _World(replicas=2)
        world.turn("a", 0, 9000)
        world.turn("b", 1, 9000)
        world.ill(0)
        call = world.ready("a", 9100, 1.0)
        assert world.matching.next(1.0) is None
        world.replicas[0].succeeded()
        assert world.matching.next(2.0) == (call, world.replicas[0])

    run_virtual(main())


def test_where_there_is_no_other_it_waits_at_home() -> None:
    async def main() -> None:
        world = _World(replicas=1)
        world.turn("a", 0, 4000)
        world.ill(0)
        world.ready("a", 4100, 1.0)
        assert world.matching.next(1.0) is None
        assert world.matching.parked == 0

    run_virtual(main())


def test_a_call_that_failed_at_home_returns_there_where_no_other_has_memory() -> None:
    async def main() -> None:
        world = _World(2)
        world.turn("here", 0, KV // 2)
        world.turn("there", 1, KV - 100)
        call = ReadyCall(
            order=(1.0,), rollout=RolloutId("here"), avoid=0, since=1.0, history="here",
            tokens=KV // 2 + 10,
        )  # fmt: skip
        world.matching.add(call, 1.0)
        assert world.matching.next(1.0) == (call, world.replicas[0])

    run_virtual(main())


def test_the_longest_wait_for_memory_is_not_only_that_of_whoever_is_first() -> None:
    async def main() -> None:
        world = _World(replicas=2)
        world.turn("b", 1, 8000)
        for name in ("later", "first"):
            world.turn(name, 0, 4000)
        world.ill(0)
        world.ready("later", 4100, 1.0).order = (9.0,)
        world.ready("first", 4100, 5.0)
        assert world.matching.next(5.0) is None
        assert world.matching.parked == 2
        assert world.matching.parked_since == 5.0
        assert world.matching.parked_longest_since() == 1.0

    run_virtual(main())


def test_each_history_of_a_rollout_returns_to_where_its_own_context_is() -> None:
    async def main() -> None:
        world = _World(replicas=2)
        world.turn("a/main", 0, 6000)
        world.turn("a/helper", 1, 6000)
        world.turn("b", 0, 3900)
        call = world.ready("a/main", 6100, 1.0)
        assert world.matching.next(1.0) == (call, world.replicas[0])
        assert world.matching.parked == 0

    run_virtual(main())


def test_a_call_that_fits_on_a_full_replica_alone_holds_up_nobody() -> None:
    async def main() -> None:
        world = _World(replicas=2)
        world.turn("a/main", 0, 9000)
        world.replicas[1].held = 4
        helper = world.ready("a/helper", 3000, 1.0)
        assert world.matching.next(1.0) is None, "there is memory where there is no room"
        assert (len(world.matching), world.matching.parked) == (1, 0)
        world.working.start(RolloutId("b"))
        new = world.ready("b", 100, 2.0)
        assert world.matching.next(2.0) == (new, world.replicas[0])
        world.matching.given(new, world.replicas[0])
        world.replicas[1].held = 3
        assert world.matching.next(3.0) == (helper, world.replicas[1])

    run_virtual(main())


def test_a_call_that_would_fit_on_a_replica_that_is_ill_is_parked_and_ages() -> None:
    async def main() -> None:
        world = _World(replicas=2)
        world.turn("a/main", 0, 9000)
        world.ill(1)
        helper = world.ready("a/helper", 3000, 1.0)
        assert world.matching.next(1.0) is None
        assert world.matching.parked == 1
        assert world.matching.next(1.0 + AGED_SECONDS) == (helper, world.replicas[0])

    run_virtual(main())


def test_a_parked_call_returns_to_the_replica_that_failed_it_where_that_alone_has_memory() -> None:
    async def main() -> None:
        world = _World(replicas=2)
        world.turn("a", 1, 3000)
        world.turn("b", 0, 9000)
        memory = world.working.memory(1)
        assert memory is not None
        memory.residency.forget()
        call = world.ready("a", 3100, 1.0)
        call.avoid = 1
        assert world.matching.parked == 1
        assert world.matching.next(1.0) == (call, world.replicas[1])

    run_virtual(main())
