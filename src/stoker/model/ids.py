"""Identifiers: readable prefixes, distinct types, and ids derived so that a replay repeats them.

An id that must come out the same after a crash is *derived* from what it identifies; only run and
worker ids are drawn at random (in ``seams.entropy``).
"""

from hashlib import blake2b
from typing import NewType

RunId = NewType("RunId", str)
"""One invocation of the coordinator: ``run_…``."""
GroupId = NewType("GroupId", str)
"""Rollouts of one task meant to be compared: ``grp_…``."""
RolloutId = NewType("RolloutId", str)
"""One policy acting on one task: ``rol_…``."""
ActionId = NewType("ActionId", str)
"""One action, over all its attempts: ``act_…``."""
AttemptId = NewType("AttemptId", str)
"""One execution of an action: ``att_…``."""
EnvironmentId = NewType("EnvironmentId", str)
"""The box a rollout acts in, over all its generations: ``env_…``."""
WorkerId = NewType("WorkerId", str)
"""One *incarnation* of a worker; a restarted worker has another: ``wrk_…``."""
CallPath = NewType("CallPath", str)
"""Where a context verb stands in its rollout: ``3.0.2`` is verb 2 of child 0 of verb 3."""
Fence = NewType("Fence", int)
"""A fencing token (glossary): ``epoch << 40 | counter``. A string in JSON: it passes 2**53."""

_DIGEST_BYTES = 10


def derive_id(prefix: str, *parts: str) -> str:
    """Return ``prefix`` + 20 hex digits that depend on every part and on where parts divide."""
    hasher = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "big"))
        hasher.update(encoded)
    return prefix + hasher.hexdigest()


def action_id(rollout: RolloutId, path: CallPath) -> ActionId:
    """Return the id of the action issued at ``path``: same rollout and path, same action (I7)."""
    return ActionId(derive_id("act_", rollout, path))


def attempt_id(action: ActionId, attempt: int) -> AttemptId:
    """Return the id of the ``attempt``-th execution (from 1) of ``action``."""
    return AttemptId(derive_id("att_", action, str(attempt)))


def environment_id(rollout: RolloutId, path: CallPath) -> EnvironmentId:
    """Return the id of the environment opened at ``path`` of ``rollout``."""
    return EnvironmentId(derive_id("env_", rollout, path))


def group_id(run: RunId, task: str) -> GroupId:
    """Return the id of the group of rollouts of ``task`` in ``run``."""
    return GroupId(derive_id("grp_", run, task))


def rollout_id(group: GroupId, index: int) -> RolloutId:
    """Return the id of the ``index``-th rollout (from 0) of ``group``."""
    return RolloutId(derive_id("rol_", group, str(index)))
