"""Which origins of guests there are: one made for all who ask, few kept that nobody uses."""

import asyncio
import os

import pytest

from stoker.errors import BoxFailed
from stoker.sandbox.qemu.origin import Origin
from stoker.sandbox.qemu.origins import IDLE_MAX, Held, Kind, Origins
from support.sandbox import run

KINDS = [Kind(1, state=str(number)) for number in range(IDLE_MAX + 3)]


class Making:
    """Makes origins of empty files, when it may."""

    def __init__(self) -> None:
        self.made: list[Made] = []
        self.may = asyncio.Event()
        self.may.set()
        self.fails = False

    async def __call__(self) -> Origin:
        await self.may.wait()
        if self.fails:
            raise BoxFailed("no memory")
        self.made.append(Made())
        return self.made[-1]


class Made(Origin):
    """Of two empty files."""

    def __init__(self) -> None:
        super().__init__(os.memfd_create("memory"), os.memfd_create("state"))
        self.closed = 0

    def close(self) -> None:
        """Count it."""
        super().close()
        self.closed += 1


def is_open(made: Made) -> bool:
    assert made.closed <= 1
    return not made.closed


def test_of_all_who_ask_at_once_one_makes_it_and_a_cancelled_one_leaves_it_to_the_others() -> None:
    async def body() -> None:
        origins, making = Origins(), Making()
        making.may.clear()
        asking = [asyncio.ensure_future(origins.take(KINDS[0], making)) for _ in range(3)]
        await asyncio.sleep(0)
        asking.pop(0).cancel()
        making.may.set()
        held = await asyncio.gather(*asking)
        assert held[0] is held[1]
        assert held[0].users == 2
        assert len(making.made) == 1
        for one in held:
            origins.give(one)
        assert origins.idle() == [KINDS[0]]
        await origins.close()
        assert not is_open(making.made[0])

    run(body)


def test_of_those_that_nobody_uses_the_least_recently_used_go_first() -> None:
    async def body() -> None:
        origins, making = Origins(), Making()
        used = await origins.take(KINDS[0], making)
        taken: list[Held] = [await origins.take(kind, making) for kind in KINDS[1:]]
        assert all(map(is_open, making.made)), "none goes that a box lives of, however many"
        for held in taken:
            origins.give(held)
        assert origins.idle() == KINDS[-IDLE_MAX:]
        assert [is_open(one) for one in making.made] == [True, False, False] + [True] * IDLE_MAX
        origins.give(await origins.take(KINDS[3], making))
        assert len(making.made) == len(KINDS), "it was found"
        origins.give(used)
        assert origins.idle() == [*KINDS[5:], KINDS[3], KINDS[0]]
        await origins.close()
        assert not any(map(is_open, making.made))

    run(body)


def test_one_that_could_not_be_made_is_tried_again_by_the_next_who_asks() -> None:
    async def body() -> None:
        origins, making = Origins(), Making()
        making.fails = True
        ends = await asyncio.gather(
            *(origins.take(KINDS[0], making) for _ in range(2)), return_exceptions=True
        )
        assert [type(end) for end in ends] == [BoxFailed, BoxFailed]
        making.fails = False
        origins.give(await origins.take(KINDS[0], making))
        assert origins.idle() == [KINDS[0]]
        await origins.close()

    run(body)


def test_what_nobody_waits_for_any_more_is_kept_idle_or_ended_with_the_rest() -> None:
    async def body() -> None:
        origins, making = Origins(), Making()
        making.may.clear()
        asking = [asyncio.ensure_future(origins.take(kind, making)) for kind in KINDS]
        await asyncio.sleep(0)
        for one in asking:
            one.cancel()
        await asyncio.wait(asking)
        making.may.set()
        async with asyncio.timeout(20):
            while len(making.made) < len(KINDS) or len(origins.idle()) > IDLE_MAX:
                await asyncio.sleep(0)
        assert sum(map(is_open, making.made)) == IDLE_MAX
        making.may.clear()
        last = asyncio.ensure_future(origins.take(Kind(2), making))
        await asyncio.sleep(0)
        await origins.close()
        with pytest.raises(BoxFailed, match="being removed"):
            await last
        assert not any(map(is_open, making.made))

    run(body)


def test_one_that_is_being_forked_as_all_are_let_go_of_is_closed_when_that_is_over() -> None:
    async def body() -> None:
        origins, making = Origins(), Making()
        held = [await origins.take(KINDS[0], making) for _ in range(2)]
        await origins.close()
        origins.give(held[0])
        assert is_open(making.made[0])
        origins.give(held[1])
        assert not is_open(making.made[0])

    run(body)
