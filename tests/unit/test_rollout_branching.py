"""``ctx.branch`` as a program sees it: what is asked for, and where it is refused."""

import stoker
from stoker.errors import VerbMisused
from stoker.model.events import Verb
from stoker.rollout.arguments import BranchArguments
from stoker.testing.driver import Asked, drive, replay_every_prefix


def answer(asked: Asked) -> object:
    return 2 if asked.verb is Verb.BRANCH else None


@stoker.rollout(boxes=2)
async def twice(ctx: stoker.Context, task: stoker.Task) -> float:
    await ctx.environment("python")
    await ctx.environment("python")
    async with ctx.timeout("1m"):
        await ctx.call(["true"])
    which = await ctx.branch(3)
    alone = await ctx.branch(1)
    return float(which + 10 * alone)


def test_every_environment_is_kept_before_the_rollout_is_branched() -> None:
    result = drive(twice, answer)
    assert result.outcome is not None
    assert result.outcome.reward == 22.0
    *_, left, right, three, one = result.calls
    assert (left.verb, right.verb) == (Verb.CHECKPOINT, Verb.CHECKPOINT)
    assert {left.arguments.environment, right.arguments.environment} == {"0", "1"}
    assert three.arguments == BranchArguments(count=3)
    assert one.arguments == BranchArguments(count=1), "nobody needs a checkpoint for it"
    assert replay_every_prefix(twice, result) == len(result.history)


def test_it_is_refused_where_other_calls_are_outstanding() -> None:
    refused: list[str] = []

    @stoker.rollout(boxes=1)
    async def program(ctx: stoker.Context, task: stoker.Task) -> float:
        await ctx.environment("python")

        async def child() -> None:
            await ctx.branch(2)

        async def in_time() -> None:
            async with ctx.timeout("1m"):
                await ctx.branch(2)

        for tried in (ctx.gather(ctx.sleep(9), child()), ctx.first(child()), in_time()):
            try:
                await tried
            except VerbMisused as error:
                refused.append(error.message)
        return 1.0

    result = drive(program)
    assert len(refused) == 3
    assert all("nothing was done; await it outside of them" in one for one in refused)
    asked = {one.verb for one in result.calls}
    assert asked == {Verb.ENVIRONMENT, Verb.SLEEP, Verb.TIMER}, "no checkpoint either"
    assert result.outcome is not None
    assert result.outcome.reward is None
