"""``stoker bench attacks``: every attack of the corpus, without its defence and in a box."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from stoker.cli.bench_machine import machine
from stoker.model.execution import Isolation
from stoker.testing.attacks.run import Attackers, Outcome

ATTACKS_GOAL = 80

Say = Callable[[str], object]


def measure(*, warm: bool, isolation: Isolation, say: Say) -> dict[str, Any]:
    """Run every attack and return the bench document (DESIGN §9)."""
    outcomes = asyncio.run(_outcomes(warm=warm, isolation=isolation, say=say))
    counted = [one for one in outcomes if one.succeeds]
    right = [one for one in counted if one.right]
    return {
        "bench": "attacks",
        "machine": machine(),
        "figures": {
            "attacks_total": _figure(len(counted), ATTACKS_GOAL),
            "attacks_right": _figure(len(right), len(counted)),
        },
        "warm": warm,
        "isolation": isolation.value,
        "not_held": [msgspec.structs.asdict(one) for one in outcomes if not one.held],
        "not_counted": sorted(one.name for one in outcomes if not one.succeeds),
    }


async def _outcomes(*, warm: bool, isolation: Isolation, say: Say) -> list[Outcome]:
    async with Attackers.ready(warm=warm, isolation=isolation) as attackers:
        attacks = attackers.all()
        found = []
        for number, attack in enumerate(attacks, 1):
            if number % 10 == 1:
                say(f"bench attacks: {number} of {len(attacks)}, {attack.name} …")
            found.append(await attackers.outcome(attack))
        return found


def _figure(value: int, target: int) -> dict[str, Any]:
    return {"value": value, "unit": "count", "target": target, "against": "", "runs": 1}
