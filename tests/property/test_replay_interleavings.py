"""Random programs under random interleavings: every prefix rebuilds, every time.

A program is drawn as a small tree of verbs, joins and timeouts, run with drawn choices of which
result comes next, and replayed from each prefix of its journal.
"""

import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.errors import Infrastructure, WorkerLost
from stoker.model.events import Verb
from stoker.rollout.program import Rollout
from stoker.testing.driver import FIRE, NEVER, Asked, drive, replay_every_prefix
from support.rollout_programs import PROGRAMS, script_for

Plan = tuple[str, Any]

leaves: st.SearchStrategy[Plan] = st.sampled_from(
    [("call", 0), ("call", 1), ("sleep", 0), ("local", 0), ("draw", 0), ("id", 0), ("fail", 0)]
)


def branches(inner: st.SearchStrategy[Plan]) -> st.SearchStrategy[Plan]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.tuples(st.just("gather"), several),
        st.tuples(st.just("first"), several),
        st.tuples(st.just("sequence"), several),
        st.tuples(st.just("timeout"), several),
        st.tuples(st.just("finally"), several),
    )


plans = st.recursive(leaves, branches, max_leaves=14)


def program_of(plan: Plan) -> Rollout:
    @stoker.rollout
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        shared: list[str] = []
        with contextlib.suppress(KeyError, Infrastructure):
            await _walk(ctx, plan, shared)
        await ctx.call(["end", *shared])
        return float(len(shared))

    return program


async def _walk(ctx: stoker.Context, plan: Plan, shared: list[str]) -> None:
    kind, inner = plan
    if kind == "call":
        await ctx.call(["call", *shared])
        shared.append("c")
    elif kind == "sleep":
        await ctx.sleep(len(shared))
        shared.append("s")
    elif kind == "local":
        await ctx.local(len, list(shared))
    elif kind == "draw":
        shared.append(f"{ctx.random.randrange(1000)}")
    elif kind == "id":
        shared.append(ctx.new_id())
    elif kind == "fail":
        await ctx.sleep(1)
        raise KeyError("drawn to fail")
    elif kind == "timeout":
        with contextlib.suppress(TimeoutError):
            async with ctx.timeout(1):
                await _each(ctx, inner, shared)
    elif kind == "finally":
        try:
            await _each(ctx, inner, shared)
        finally:
            await ctx.call(["cleanup", *shared])
    elif kind == "sequence":
        await _each(ctx, inner, shared)
    else:
        join = ctx.gather if kind == "gather" else ctx.first
        await join(*(_walk(ctx, part, shared) for part in inner))


async def _each(ctx: stoker.Context, parts: list[Plan], shared: list[str]) -> None:
    for part in parts:
        await _walk(ctx, part, shared)


@settings(max_examples=120, deadline=None, print_blob=True)
@given(plan=plans, data=st.data())
def test_random_programs_replay_at_every_prefix(plan: Plan, data: st.DataObject) -> None:
    program = program_of(plan)

    def script(asked: Asked) -> Any:
        if asked.verb is Verb.TIMER:
            return data.draw(st.sampled_from([FIRE, NEVER]))
        if asked.verb is Verb.CALL and "cleanup" not in asked.arguments.request.argv:
            return data.draw(st.sampled_from([None, None, None, WorkerLost("gone")]))
        return None

    result = drive(program, script, choose=lambda paths: data.draw(st.integers(0, len(paths) - 1)))
    assert result.outcome is not None
    replay_every_prefix(program, result)
    assert not result.outstanding, "nothing is left waiting behind an outcome"


@settings(max_examples=40, deadline=None, print_blob=True)
@given(name=st.sampled_from(sorted(PROGRAMS)), data=st.data())
def test_c13_written_programs_replay_under_random_interleavings(
    name: str, data: st.DataObject
) -> None:
    program = PROGRAMS[name]
    result = drive(
        program,
        script_for(name),
        choose=lambda paths: data.draw(st.integers(0, len(paths) - 1)),
    )
    assert replay_every_prefix(program, result) == len(result.history)
