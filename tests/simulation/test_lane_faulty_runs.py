"""Runs in which everything happens at once: faults, tight memory, cancels, several replicas."""

import asyncio
import random

import pytest

from stoker.inference.sim import SimModel
from stoker.model.generation import Message, Role
from stoker.testing.virtual_clock import run_virtual
from support.inference import lane_over, request, sim

FAULTS = {
    "too_many": 0.05,
    "broken": 0.05,
    "closed": 0.05,
    "hang": 0.03,
    "late": 0.03,
    "late_by": 100,
}


def _model(chance: random.Random, seed: int) -> SimModel:
    return sim(
        "y" * chance.randint(1, 60),
        c=0.1,
        p=0.01,
        window=chance.randint(1, 8),
        replicas=chance.randint(1, 3),
        kv_tokens=chance.choice([None, 90, 300]),
        seed=seed,
        faults=FAULTS,
    )


@pytest.mark.parametrize("seed", range(25))
def test_every_call_is_answered_or_cancelled_and_nothing_is_left(seed: int) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        model = _model(chance, seed)
        lane = lane_over(model, retries=30, call_timeout=300)

        async def rollout(name: int) -> None:
            known, messages = b"", [Message(role=Role.USER, content="q")]
            await asyncio.sleep(chance.uniform(0, 30))
            for step in range(4):
                said = await lane.generate(
                    request(
                        f"r{name}",
                        step=step,
                        messages=tuple(messages),
                        prompt_ids=known if chance.random() < 0.5 else b"",
                    ),
                    (name,),
                )
                known = said.prompt_ids + said.token_ids
                seen = "z" * chance.randint(0, 10)
                messages += [
                    Message(role=Role.ASSISTANT, content=said.text),
                    Message(role=Role.TOOL, content=seen),
                ]
                await asyncio.sleep(chance.expovariate(0.2))

        rollouts = [asyncio.create_task(rollout(name)) for name in range(30)]

        async def cancels() -> None:
            for task in rollouts:
                await asyncio.sleep(chance.uniform(0, 10))
                if chance.random() < 0.3:
                    task.cancel()

        ended, _ = await asyncio.gather(
            asyncio.gather(*rollouts, return_exceptions=True), cancels()
        )
        odd = [
            end for end in ended if end is not None and not isinstance(end, asyncio.CancelledError)
        ]
        assert odd == [], f"seed {seed}"
        assert (lane.ready_depth(), lane.figures().running) == (0, 0)
        assert all(replica.held == 0 for replica in lane._replicas.values())
        assert lane.figures().idle_while_ready_share == 0
        for replica in model._replicas.values():
            assert replica.load().running == 0
            assert not replica._waiters
            device = replica._device
            assert device._held == 0
            assert device._idle.tokens == sum(one.tokens for one in device._idle._by_age.values())
            assert device._kv is None or device._idle.tokens <= device._kv

    run_virtual(main())
