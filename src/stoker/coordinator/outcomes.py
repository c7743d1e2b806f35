"""How a rollout ended, from how its program ended and what it met on the way.

The one place that decides; the fourth promise (an infrastructure fault is never a reward) rests on
this table and on ``Outcome`` itself, which refuses a reward anywhere but in ``completed``.
"""

import math
from collections.abc import Mapping

from stoker.errors import EffectAmbiguous, RewardInvalid
from stoker.model.faults import FaultRecord
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.rollout.messages import ProgramOutcome


def outcome_of(program: ProgramOutcome, tainted: Mapping[str, FaultRecord]) -> Outcome:
    """Return the rollout's outcome.

    Unrecovered taint goes first: whatever the program made of it, no reward is accepted, and an
    ambiguous effect stays ambiguous.
    """
    if EffectAmbiguous.code in tainted:
        fault = tainted[EffectAmbiguous.code]
        return Outcome(kind=OutcomeKind.AMBIGUOUS, reason=fault.message, fault=fault)
    if program.fault is not None:
        return Outcome(kind=OutcomeKind.FAILED, fault=program.fault, metrics=program.metrics)
    if tainted:
        fault = next(iter(tainted.values()))
        return Outcome(
            kind=OutcomeKind.FAILED,
            fault=fault,
            reason="the program met this fault and did not say it recovered",
            metrics=program.metrics,
        )
    if program.truncated:
        return Outcome(
            kind=OutcomeKind.TRUNCATED, reason=program.truncated, metrics=program.metrics
        )
    if program.reward is None or not math.isfinite(program.reward):
        refused = RewardInvalid(f"the program returned {program.reward}, which is no finite score")
        return Outcome(kind=OutcomeKind.FAILED, fault=refused.record(), metrics=program.metrics)
    return Outcome(kind=OutcomeKind.COMPLETED, reward=program.reward, metrics=program.metrics)
