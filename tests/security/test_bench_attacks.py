"""``stoker bench attacks``: its corpus, and that what it counts is held."""

import asyncio
import os
import shutil
from collections import Counter

import pytest

from stoker.cli.bench_attacks import ATTACKS_GOAL, measure
from stoker.model.execution import Isolation
from stoker.testing.attacks.forgery import FORGERIES
from stoker.testing.attacks.run import ATTACKS, Attackers, Outcome
from support import needs
from support.sandbox import needs_root

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers are x86_64's")
EVERY = 6
"""The default run tries one in so many, from every kind; the slow one tries all."""


def test_attacks_are_told_apart_by_name() -> None:
    names = Counter(one.name for one in ATTACKS) + Counter(one.name for one in FORGERIES)
    assert max(names.values()) == 1
    assert len(names) >= ATTACKS_GOAL


@needs_root
@pytest.mark.root
def test_a_sample_of_the_attacks_succeeds_without_its_defence_and_is_held() -> None:
    async def body() -> list[Outcome]:
        async with Attackers.ready() as attackers:
            return [await attackers.outcome(one) for one in attackers.all()[::EVERY]]

    outcomes = asyncio.run(body())
    assert not [one for one in outcomes if not one.held]
    # This kernel may refuse some by itself; most must prove something.
    assert sum(one.succeeds for one in outcomes) * 2 > len(outcomes)


@needs_root
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize(
    ("warm", "isolation"),
    [
        pytest.param(False, Isolation.NAMESPACE, id="fresh"),
        pytest.param(True, Isolation.NAMESPACE, id="warm"),
        pytest.param(
            False,
            Isolation.CONTAINER,
            marks=pytest.mark.skipif(shutil.which("runc") is None, reason=needs.RUNC),
            id="container",
        ),
    ],
)
def test_every_attack_is_held(
    warm: bool,  # noqa: FBT001 - a parameter of the test
    isolation: Isolation,
) -> None:
    document = measure(warm=warm, isolation=isolation, say=lambda _: None)
    assert document["not_held"] == []
    assert document["figures"]["attacks_total"]["value"] >= ATTACKS_GOAL
