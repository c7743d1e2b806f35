"""Which digests a rollout was made with, and what differs among several."""

from collections.abc import Iterable

from stoker.export.rows import FinishedRollout


def digests_of(rollout: FinishedRollout) -> dict[tuple[str, str], str]:
    """Return (what it is of, its name) → digest: program, baselines, execution policies."""
    admitted = rollout.standing.admitted
    found = {("program", admitted.program): admitted.program_digest}
    found |= {("baseline", name): digest for name, digest in rollout.baselines.items()}
    return found | {
        ("execution policy of class", name): digest
        for name, digest in admitted.policy_digests.items()
    }


def disagreements(rollouts: Iterable[FinishedRollout]) -> tuple[str, ...]:
    """Say what differs among ``rollouts``, one sentence each with both sides; nothing: nothing."""
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    found = []
    for rollout in rollouts:
        rollout_id = rollout.standing.admitted.rollout_id
        for (what, name), digest in digests_of(rollout).items():
            first, before = seen.setdefault((what, name), (rollout_id, digest))
            if before != digest:
                found.append(
                    f"{what} {name} is {before[:12]} in {first} and {digest[:12]} in {rollout_id}"
                )
    return tuple(found)
