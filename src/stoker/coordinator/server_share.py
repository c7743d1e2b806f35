"""A model server that several runs use: which part of it is ours.

Each coordinator says once a second, through the ledger, what it would use; all divide the server by
the same rule from the same claims, so nobody has to be asked. A server takes calls as they come,
so without this a run with more calls in flight gets more of it, and contexts of all runs together
overflow a KV cache that each believes its own.

The rule is max-min fairness over runs, by weight: no run gets less than its share while another
gets more than its own, and what nobody wants is anybody's. The partitions of a run divide its part.
Calls and memory of each server are divided apart: few long contexts want much of the one and little
of the other. Of calls, ``model.window`` is divided, those a server batches; where runs name
different ones the smallest counts, since past the batch a server takes calls as they come.

What a run uses is bounded by its part, so from that alone no part would ever grow: a run with more
rollouts to begin claims somewhat more than it used.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from math import ceil

from msgspec.structs import replace

from stoker.broker.base import Claim, ClaimRequest, Ledger
from stoker.config.tree import LaneSettings
from stoker.coordinator.lane import Lane
from stoker.coordinator.plan import Plan
from stoker.model.ids import RunId

_LOOKS = 3
"""What was wanted at most in so many seconds is claimed: calls come and go."""
_HEADROOM = 1.25
"""What is claimed over that, while more could begin."""


class ServerShare:
    """Keeps one lane to its part of the servers it uses."""

    def __init__(self, ledger: Ledger, lane: Lane, claim: Claim) -> None:
        """``claim``: what is constant of it; without servers nothing is shared."""
        self._ledger = ledger
        self._lane = lane
        self._claim = claim
        self._wanted: deque[tuple[int, float]] = deque(maxlen=_LOOKS)

    @classmethod
    def of_run(
        cls, ledger: Ledger, lane: Lane, plan: Plan, settings: LaneSettings
    ) -> "ServerShare":
        """Return the share of a run's partition."""
        replicas = lane.info.replicas
        claim = Claim(
            run_id=plan.run_id,
            partition=plan.partition.name,
            servers=tuple(one.server for one in replicas if one.server),
            window=max(one.window for one in replicas),
            wanted=0,
            weight=settings.weight,
        )
        return cls(ledger, lane, claim)

    async def refresh(self, *, more: bool) -> None:
        """Say what is wanted here, and keep to what the claims of all leave.

        ``more``: rollouts wait to be begun, which would want more than what is active does.

        Raises:
            LedgerUnavailable: nobody could be heard; the part is as it was.
        """
        claim = self._claim
        if not claim.servers:
            return
        calls = -(-self._lane.wanting // len(claim.servers))
        # Where nothing is known of memory, calls stand for it.
        working = self._lane.working
        self._wanted.append((calls, working.wanting if working.limits else calls / claim.window))
        calls, memory = (max(looks) for looks in zip(*self._wanted, strict=True))
        if more:
            calls, memory = ceil(calls * _HEADROOM) + 1, memory * _HEADROOM + 1 / claim.window
        claim = replace(claim, wanted=calls, memory=memory)
        claims = (await self._ledger.claim(ClaimRequest(claim=claim))).claims
        self._lane.share(
            {
                one.replica: part_of(claim, [c for c in claims if one.server in c.servers])
                for one in self._lane.info.replicas
            }
        )


def part_of(mine: Claim, claims: Sequence[Claim]) -> tuple[float, float]:
    """Return which part of its window on a server a coordinator may use, and of its memory there.

    ``claims``: those on that server. All is one's own where no other run claims any. Of the memory
    a partition has its share to begin with; the part is of that.
    """
    others = [one for one in claims if (one.run_id, one.partition) != (mine.run_id, mine.partition)]
    if all(one.run_id == mine.run_id for one in others):
        return 1.0, 1.0
    everybody = [mine, *others]
    calls: defaultdict[RunId, float] = defaultdict(float)
    memory: defaultdict[RunId, float] = defaultdict(float)
    for one in everybody:
        calls[one.run_id] += one.wanted
        memory[one.run_id] += one.memory
    weights = {one.run_id: one.weight for one in everybody}
    slots = divide(min(one.window for one in everybody), calls, weights)[mine.run_id]
    partitions = sum(one.run_id == mine.run_id for one in everybody)
    kept = divide(1.0, memory, weights)[mine.run_id]
    return min(1.0, slots / partitions / mine.window), min(1.0, kept)


def divide(
    total: float, wanted: Mapping[RunId, float], weights: Mapping[RunId, float]
) -> dict[RunId, float]:
    """Divide ``total`` by weight, nobody given more than wanted before all have what they want.

    What is left over then is divided by weight as well.
    """
    given = dict.fromkeys(wanted, 0.0)
    hungry = {run for run, most in wanted.items() if most > 0}
    left = float(total)
    while hungry and left > 0:
        each = left / sum(weights[run] for run in hungry)
        full = {run for run in hungry if wanted[run] - given[run] <= each * weights[run]}
        for run in full or hungry:
            more = wanted[run] - given[run] if full else each * weights[run]
            given[run] += more
            left -= more
        if not full:
            return given
        hungry -= full
    whole = sum(weights[run] for run in given)
    return {run: most + max(0.0, left) * weights[run] / whole for run, most in given.items()}
