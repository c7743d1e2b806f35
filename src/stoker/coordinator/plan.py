"""Which rollouts a coordinator sees to, and what each one is derived from.

Order is the order of the task file, groups together. Randomness follows the *epoch*, which depends
on the run's seed, the task and the place in the group, never on the run's id: two runs of the same
seed draw the same numbers.
"""

from collections.abc import Iterator

import msgspec

from stoker.config.tree import Settings
from stoker.coordinator.partition import WHOLE, Partition
from stoker.model.events import Admitted
from stoker.model.ids import RolloutId, RunId, derive_id, group_id
from stoker.model.task import Task
from stoker.rollout.messages import Loaded

RESTARTED = "restarted with a changed program"
"""Reason of rollouts that ``--changed restart`` ends; others take their place."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All rollouts of one partition of a run."""

    run_id: RunId
    tasks: tuple[Task, ...]
    """This partition's."""
    group_size: int
    spare: int = 0
    """Begun beyond ``group_size``; see ``groups``."""
    seed: int
    restarts: int
    loaded: Loaded
    policy_digests: dict[str, str] = {}
    """Worker class → digest of its execution policy."""
    branches_max: int = 0
    """Rollouts that programs may branch off one of these, branches of branches counted."""
    partition: Partition = WHOLE

    @property
    def total(self) -> int:
        """How many rollouts there are."""
        return len(self.tasks) * (self.group_size + self.spare)

    def rollouts(self, known: set[tuple[str, int]]) -> Iterator[tuple[Task, int]]:
        """Yield every rollout that is not ``known`` (task id, index), in order."""
        for task in self.tasks:
            for index in range(self.group_size + self.spare):
                if (task.task_id, index) not in known:
                    yield task, index

    def is_of_this_start(self, admitted: Admitted) -> bool:
        """Whether a rollout belongs to the run as it is now, not to one before a restart."""
        if admitted.branched is not msgspec.UNSET:
            return self.has_program_of(admitted)
        return admitted.rollout_id == self.admit(admitted.task, admitted.index, 0.0).rollout_id

    def has_program_of(self, admitted: Admitted) -> bool:
        """Whether a rollout was made with the program as it is now."""
        return admitted.program_digest == self.loaded.source_digest

    def admit(self, task: Task, index: int, at: float) -> Admitted:
        """Return the admission of one rollout; ``at`` is wall time."""
        group = group_id(self.run_id, task.task_id)
        where = (str(index), str(self.restarts))
        return Admitted(
            run_id=self.run_id,
            rollout_id=RolloutId(derive_id("rol_", group, *where)),
            group_id=group,
            index=index,
            task=task,
            program=self.loaded.name,
            program_version=self.loaded.version,
            program_digest=self.loaded.source_digest,
            python=self.loaded.python,
            hash_seed=self.loaded.hash_seed,
            epoch=derive_id("epo_", str(self.seed), task.task_id, *where),
            at=at,
            timeout_seconds=self.loaded.timeout_seconds,
            policy_digests=self.policy_digests,
        )


def policy_digests(settings: Settings) -> dict[str, str]:
    """Return worker class → digest of the execution policy its boxes get."""
    shared = settings.sandbox.accept_shared_kernel
    return {
        name: one.policy(accept_shared_kernel=shared).digest()
        for name, one in settings.workers.classes.items()
    }
