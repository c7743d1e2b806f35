"""Randomness and ids follow epoch and scope, and can be re-keyed in place."""

import statistics

import pytest

import stoker
from stoker.errors import VerbMisused
from stoker.model.ids import RolloutId
from stoker.model.task import Task
from stoker.rollout.messages import Deliver, StartRollout
from stoker.rollout.randomness import RolloutRandom
from stoker.rollout.trampoline import Trampoline


def test_draws_depend_on_epoch_and_scope_alone() -> None:
    draws = {
        (epoch, scope): [RolloutRandom(epoch, scope).random() for _ in range(2)]
        for epoch in ("e1", "e2")
        for scope in ("", "0.1")
    }
    assert len({one[0] for one in draws.values()}) == 4
    assert all(first == again for first, again in draws.values())


def test_every_method_draws_from_the_counter() -> None:
    def sample(generator: RolloutRandom) -> list[object]:
        items = list(range(20))
        generator.shuffle(items)
        return [
            items,
            generator.choice("abc"),
            generator.gauss(0, 1),
            generator.getrandbits(1000),
            generator.randbytes(9),
            generator.sample(range(100), 5),
        ]

    assert sample(RolloutRandom("e", "s")) == sample(RolloutRandom("e", "s"))
    assert sample(RolloutRandom("e", "s")) != sample(RolloutRandom("e", "t"))


def test_draws_look_uniform_and_bits_are_in_range() -> None:
    generator = RolloutRandom("e", "")
    draws = [generator.random() for _ in range(4000)]
    assert all(0.0 <= draw < 1.0 for draw in draws)
    assert abs(statistics.fmean(draws) - 0.5) < 0.02
    assert {generator.getrandbits(3) for _ in range(300)} == set(range(8))
    assert generator.getrandbits(0) == 0


def test_rekeying_in_place_leaves_no_old_gaussian() -> None:
    generator, fresh = RolloutRandom("old", "s"), RolloutRandom("new", "s")
    generator.gauss(0, 1)  # keeps a second Gaussian for the next call
    generator.rekey("new")
    assert generator.gauss(0, 1) == fresh.gauss(0, 1)
    assert generator.random() == fresh.random()


def test_seeding_is_refused() -> None:
    with pytest.raises(VerbMisused, match="epoch"):
        RolloutRandom("e", "").seed(7)


def test_a_rekeyed_rollout_keeps_the_reference_the_program_holds() -> None:
    drawn: list[float] = []
    ids: list[str] = []

    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        generator = ctx.random
        drawn.append(generator.random())
        await ctx.sleep(1)
        drawn.append(generator.random())
        ids.append(ctx.new_id())
        return 1.0

    for epoch in ("a", "b"):
        trampoline = Trampoline(
            program,
            StartRollout(
                rollout_id=RolloutId("rol_1"),
                task=Task(task_id="t"),
                epoch="parent",
                index=0,
                group_id="g",
                at=0.0,
            ),
        )
        call = trampoline.begin().calls[0]
        trampoline.rekey(epoch)
        trampoline.deliver(
            Deliver(
                rollout_id=RolloutId("rol_1"), path=call.path, value=b"\xc0", fault=None, at=1.0
            )
        )
    assert drawn[0] == drawn[2]
    assert drawn[1] != drawn[3]
    assert ids[0] != ids[1]
