import asyncio
import threading

import pytest

from stoker.testing.virtual_clock import (
    WALL_START,
    VirtualClock,
    VirtualDeadlock,
    VirtualLoop,
    run_virtual,
)


def test_an_hour_passes_at_once_and_timers_fire_in_order() -> None:
    async def main() -> tuple[list[str], float]:
        seen: list[str] = []

        async def after(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            seen.append(name)

        await asyncio.gather(after(3600, "late"), after(0.5, "early"), after(60, "middle"))
        return seen, VirtualClock().monotonic()

    seen, at = run_virtual(main())
    assert seen == ["early", "middle", "late"]
    assert at == pytest.approx(3600)


def test_wall_and_boot_move_with_the_loop() -> None:
    async def main() -> None:
        before = VirtualClock().now()
        assert before.wall == WALL_START
        await asyncio.sleep(10)
        after = VirtualClock().now()
        assert after.boot - before.boot == pytest.approx(10)
        assert after.wall - before.wall == pytest.approx(10)

    run_virtual(main())


def test_time_stands_still_while_something_is_ready() -> None:
    async def main() -> float:
        for _ in range(100):
            await asyncio.sleep(0)
        return VirtualClock().monotonic()

    assert run_virtual(main()) == 0.0


def test_a_deadlock_names_who_waits_and_where() -> None:
    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        await asyncio.sleep(5)
        await asyncio.create_task(stuck(), name="the-stuck-one")

    with pytest.raises(VirtualDeadlock, match=r"second 5\.000 .*the-stuck-one at .*\.py:\d+"):
        run_virtual(main())


def test_timeouts_and_cancellation_work_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(31)
        return VirtualClock().monotonic()

    assert run_virtual(main()) == pytest.approx(30)


def test_what_goes_to_a_thread_is_done_here_in_no_time() -> None:
    async def main() -> tuple[int, float]:
        here = await asyncio.to_thread(threading.get_ident)
        with pytest.raises(OSError, match="full"):
            await asyncio.to_thread(_full)
        return here, VirtualClock().monotonic()

    assert run_virtual(main()) == (threading.get_ident(), 0.0)


def test_each_jump_is_told_before_it_is_made() -> None:
    seen: list[tuple[float, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.on_passing(lambda seconds: seen.append((loop.time(), seconds)))
        await asyncio.sleep(2)
        await asyncio.sleep(0)
        await asyncio.sleep(3)

    run_virtual(main())
    assert seen == [(0.0, 2.0), (2.0, 3.0)]


def _full() -> None:
    raise OSError("the disk is full")
