"""Times of the simulated device against the formula, in virtual time."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.inference.device import Device, DeviceCall
from stoker.inference.sim import SimModel
from stoker.model.generation import FinishReason, GenerateRequest, Generation, Message, Role
from stoker.testing.virtual_clock import run_virtual
from support.inference import profile, request, saying, sim

A, C, P = 1.0, 0.25, 0.125
PROMPT = 8
"""Ids of the prompt of ``request()``: a speaker, five bytes, an end, a speaker."""
TOKENS = 11
"""``sim()`` says ten bytes and the end."""


def _finish(
    model: SimModel, asked: dict[float, list[GenerateRequest]], until: float = 1e6
) -> tuple[dict[str, float], dict[str, Generation], Any]:
    """Issue requests at their times; return when and with what each came back, and the load."""

    async def main() -> tuple[dict[str, float], dict[str, Generation], Any]:
        loop = asyncio.get_running_loop()
        ends: dict[str, float] = {}
        said: dict[str, Generation] = {}

        async def one(at: float, asked: GenerateRequest) -> None:
            await asyncio.sleep(at)
            said[asked.request_id] = await model.generate(0, asked)
            ends[asked.request_id] = loop.time()

        async with asyncio.timeout(until):
            await asyncio.gather(*(one(at, ask) for at, many in asked.items() for ask in many))
        return ends, said, model.load(0)

    return run_virtual(main())


def test_a_single_sequence_takes_steps_times_a_plus_c() -> None:
    ends, _, load = _finish(sim(a=A, c=C), {0: [request()]})
    assert ends["rol_a/0"] == pytest.approx(TOKENS * (A + C))
    assert load.tokens_sampled == TOKENS
    assert load.tokens_prefilled == PROMPT
    assert load.active_seconds == load.sequence_seconds == pytest.approx(TOKENS * (A + C))


def test_prefill_is_paid_once_per_new_token() -> None:
    ends, _, _ = _finish(sim(a=A, c=C, p=P), {0: [request()]})
    assert ends["rol_a/0"] == pytest.approx(TOKENS * (A + C) + P * PROMPT)


def test_a_long_prefill_is_cut_in_chunks_that_decode_nothing() -> None:
    ends, _, _ = _finish(sim(a=A, c=C, p=P, prefill_tokens_max=3), {0: [request()]})
    # 3 + 3 + 2 tokens: two steps without decoding, the third samples the first token.
    assert ends["rol_a/0"] == pytest.approx(2 * A + TOKENS * (A + C) + P * PROMPT)


def test_a_full_window_runs_at_capacity() -> None:
    window = 8
    model = sim(a=A, c=C, window=window)
    ends, _, load = _finish(model, {0: [request(f"rol_{n}") for n in range(window)]})
    expected = TOKENS * (A + C * window)
    assert list(ends.values()) == pytest.approx([expected] * window)
    assert load.sequence_seconds == pytest.approx(window * expected)
    assert load.tokens_sampled / load.active_seconds == pytest.approx(
        load.capacity_tokens_per_second
    )


def test_calls_past_the_window_wait_in_order() -> None:
    ends, _, _ = _finish(sim(a=A, window=2), {0: [request(f"rol_{n}") for n in range(5)]})
    turn = TOKENS * A
    assert [ends[f"rol_{n}/0"] for n in range(5)] == pytest.approx(
        [turn, turn, 2 * turn, 2 * turn, 3 * turn]
    )


def test_an_arrival_joins_at_the_next_step_and_slows_the_others() -> None:
    ends, _, _ = _finish(sim(a=A, c=C), {0: [request("rol_a")], 3.0: [request("rol_b")]})
    # a decodes alone in steps of 1.25: the step under way at 3.0 ends at 3.75 with 3 tokens done.
    together = 8 * (A + 2 * C)
    assert ends["rol_a/0"] == pytest.approx(3.75 + together)
    assert ends["rol_b/0"] == pytest.approx(3.75 + together + 3 * (A + C))


def test_tokens_per_turn_and_bytes_per_token_set_the_steps() -> None:
    ends, said, load = _finish(sim(a=A, tokens_per_turn=3), {0: [request()]})
    assert ends["rol_a/0"] == pytest.approx(3 * A)
    assert load.tokens_sampled == 3
    assert said["rol_a/0"].token_count == TOKENS
    ends, _, load = _finish(sim(a=A, p=P, bytes_per_token=4.0), {0: [request()]})
    assert ends["rol_a/0"] == pytest.approx(3 * A + 2 * P)
    assert load.tokens_prefilled == 2


def test_time_scale_multiplies_every_duration() -> None:
    ends, _, load = _finish(sim(a=A, c=C, p=P, time_scale=0.01), {0: [request()]})
    assert ends["rol_a/0"] == pytest.approx(0.01 * (TOKENS * (A + C) + P * PROMPT))
    assert load.capacity_tokens_per_second == pytest.approx(100 * 4 / (A + 4 * C))


def _second_turn(first: Generation, rollout: str = "rol_a") -> GenerateRequest:
    history = (
        Message(role=Role.USER, content="hello"),
        Message(role=Role.ASSISTANT, content=first.text),
        Message(role=Role.TOOL, content="seen"),
    )
    return request(rollout, step=1, messages=history)


NEW = 7
"""Ids the second turn adds: a speaker, four bytes, an end, a speaker."""


async def _turn(model: SimModel, asked: GenerateRequest) -> tuple[Generation, float, int]:
    """Return the answer, the seconds it took and the tokens it prefilled."""
    loop = asyncio.get_running_loop()
    at, before = loop.time(), model.load(0).tokens_prefilled
    said = await model.generate(0, asked)
    return said, loop.time() - at, model.load(0).tokens_prefilled - before


def test_the_cached_prefix_of_the_last_turn_saves_its_prefill() -> None:
    async def main() -> None:
        model = sim(a=A, p=P)
        first, _, _ = await _turn(model, request())
        _, seconds, prefilled = await _turn(model, _second_turn(first))
        assert prefilled == NEW
        assert seconds == pytest.approx(TOKENS * A + P * NEW)

    run_virtual(main())


def test_a_rerendered_history_saves_nothing() -> None:
    async def main() -> None:
        model = sim(a=A, p=P)
        await _turn(model, request())
        other = request(step=1, messages=(Message(role=Role.USER, content="h" * 50),))
        _, _, prefilled = await _turn(model, other)
        assert prefilled == PROMPT - 5 + 50

    run_virtual(main())


def test_idle_prefixes_are_evicted_least_recently_used_first_from_the_tail() -> None:
    held = PROMPT + TOKENS  # 19 tokens after a turn

    async def main() -> None:
        model = sim(a=A, p=P, kv_tokens=2 * held + 10)
        first, _, _ = await _turn(model, request("rol_old"))
        second, _, _ = await _turn(model, request("rol_new"))
        # 10 tokens are free, 19 are needed: the oldest loses 9 of its 19.
        await _turn(model, request("rol_c"))
        _, _, new = await _turn(model, _second_turn(second, "rol_new"))
        assert new == NEW
        _, _, old = await _turn(model, _second_turn(first, "rol_old"))
        # Continuing rol_new took 7 + 11 more: of rol_old's 10, none can be left.
        assert old == held + NEW

    run_virtual(main())


def test_a_partly_evicted_prefix_saves_what_is_left_of_it() -> None:
    held = PROMPT + TOKENS

    async def main() -> None:
        model = sim(a=A, kv_tokens=2 * held + 10)
        first, _, _ = await _turn(model, request("rol_old"))
        await _turn(model, request("rol_b"))
        await _turn(model, request("rol_c"))
        _, _, prefilled = await _turn(model, _second_turn(first, "rol_old"))
        assert prefilled == 9 + NEW

    run_virtual(main())


def test_overflow_preempts_the_newest_which_prefills_again() -> None:
    # 20 tokens of memory, prompts of 8, 11 steps each. a and b start together and fill it after two
    # steps (2 x 10): b is preempted. At 11 a is done: b starts again (prefills 8 + 2), and c fits
    # beside its 10 for one step, then is preempted in turn and runs after b (prefills 8 + 1).
    ends, said, load = _finish(
        sim(a=A, kv_tokens=20), {0: [request("rol_a"), request("rol_b"), request("rol_c")]}
    )
    assert ends["rol_a/0"] == pytest.approx(11)
    assert ends["rol_b/0"] == pytest.approx(11 + 9)
    assert ends["rol_c/0"] == pytest.approx(20 + 10)
    assert load.tokens_prefilled == 8 + 8 + (8 + 2) + 8 + (8 + 1)
    assert load.tokens_sampled == 3 * TOKENS
    assert {one.token_count for one in said.values()} == {TOKENS}


def test_a_call_starts_only_when_its_prompt_and_a_margin_fit() -> None:
    # Prompts of 1000: beside the first, the second needs 1000 and 1 %.
    long = (Message(role=Role.USER, content="y" * 997),)
    asked = {0.0: [request("rol_a", messages=long), request("rol_b", messages=long)]}
    for kv_tokens, end in ((2010, 2), (2009, 4)):
        ends, _, _ = _finish(sim("x", a=A, kv_tokens=kv_tokens), asked)
        assert ends["rol_a/0"] == pytest.approx(2)
        assert ends["rol_b/0"] == pytest.approx(end)


def test_a_context_that_reaches_the_cache_size_is_cut() -> None:
    _, said, _ = _finish(sim("x" * 100, a=A, kv_tokens=30), {0: [request()]})
    assert said["rol_a/0"].finish_reason is FinishReason.LENGTH
    assert said["rol_a/0"].token_count == 30 - PROMPT
    long = request(messages=(Message(role=Role.USER, content="y" * 50),))
    ends, said, load = _finish(sim(a=A, kv_tokens=30), {0: [long]})
    assert said["rol_a/0"].token_count == 0
    assert (ends["rol_a/0"], load.tokens_sampled) == (0, 0)


def test_an_aborted_call_frees_memory_and_window_at_once() -> None:
    async def main() -> float:
        model = sim(a=A, window=1)
        task = asyncio.create_task(model.generate(0, request("rol_a")))
        await asyncio.sleep(2.5)
        waiting = asyncio.create_task(model.generate(0, request("rol_b")))
        await asyncio.sleep(0)
        task.cancel()
        await waiting
        assert task.cancelled()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(2.5 + TOKENS * A)


def test_no_token_costs_a_wake_up() -> None:
    async def main() -> int:
        model = SimModel(profile(a=A), saying("x" * 100_000))
        loop = asyncio.get_running_loop()
        woken = 0

        def count() -> None:
            nonlocal woken
            woken += 1
            loop.call_later(10_000.0, count)

        count()
        await model.generate(0, request())
        return woken

    # 100,001 steps of one second: the counter ticks every 10,000 s and nothing else wakes the loop.
    assert run_virtual(main()) == 11


@given(
    calls=st.lists(
        st.tuples(
            st.floats(0, 30), st.integers(1, 12), st.integers(1, 20), st.floats(0, 20) | st.none()
        ),
        min_size=1,
        max_size=12,
    ),
    window=st.integers(1, 5),
    kv_tokens=st.none() | st.integers(32, 80),
    stride=st.floats(0.05, 7),
)
@settings(max_examples=150, deadline=None)
def test_the_device_does_not_depend_on_who_drives_it(
    calls: list[tuple[float, int, int, float | None]],
    window: int,
    kv_tokens: int | None,
    stride: float,
) -> None:
    """Advanced at its own events or on a grid that is late for each, it finishes the same calls."""
    keys: dict[str, Any] = {"a": 1.0, "c": 0.3, "p": 0.07, "window": window}
    events = sorted(
        [(at, 0, n) for n, (at, _, _, _) in enumerate(calls)]
        + [(at + stay, 1, n) for n, (at, _, _, stay) in enumerate(calls) if stay is not None]
    )

    def drive(grid: float | None) -> tuple[list[int], float, float, int]:
        device = Device(profile(kv_tokens=kv_tokens, **keys), 0.0)
        made = [
            DeviceCall(
                owner=f"{n}",
                prompt=bytes(4 * prompt),
                context=bytes(4 * (prompt + sample)),
                prompt_tokens=prompt,
                sample_tokens=sample,
            )
            for n, (_, prompt, sample, _) in enumerate(calls)
        ]
        finished: list[DeviceCall] = []
        now = 0.0

        def go_to(at: float) -> None:
            finished.extend(device.advance(at))
            while device.start_at is not None and device.start_at < at:
                device.begin()
                finished.extend(device.advance(at))

        for at, kind, n in [*events, (1e5, 2, 0)]:
            while grid is not None and now + grid < min(at, 500):
                now += grid
                go_to(now)
            go_to(at)
            now = at
            if kind == 0:
                device.submit(made[n], at)
            elif kind == 1:
                device.abort(made[n], at)
        load = device.load()
        assert load.running == 0
        assert load.kv_used_share == 0
        return (
            [made.index(call) for call in finished],
            load.active_seconds,
            load.sequence_seconds,
            load.tokens_sampled,
        )

    eager, late = drive(stride), drive(None)
    assert eager[0] == late[0]
    assert eager[1:] == pytest.approx(late[1:])
    stayed = {n for n, (_, _, _, stay) in enumerate(calls) if stay is None}
    assert stayed <= set(late[0])


def test_the_cache_never_holds_more_than_its_size() -> None:
    device = Device(profile(a=1.0, window=8, kv_tokens=40), 0.0)
    for n in range(8):
        device.submit(
            DeviceCall(
                owner=f"{n}",
                prompt=bytes(40),
                context=bytes(120),
                prompt_tokens=10,
                sample_tokens=20,
            ),
            0.0,
        )
    seen = []
    for second in range(1, 400):
        device.begin()
        seen += device.advance(float(second))
        assert device.load().kv_used_share <= 1
    assert len(seen) == 8
    assert device.preemptions > 0
