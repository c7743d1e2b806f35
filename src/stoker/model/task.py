"""Tasks: the immutable problems a run works on."""

from typing import Any

import msgspec


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The immutable problem one or more rollouts act on."""

    task_id: str
    """Name of the task, unique in its source (``HumanEval/7``)."""
    data: dict[str, Any] = {}
    """What the program needs: JSON values only."""
    seed: int = 0
    """Seed of everything random in rollouts of this task; a group's rollouts differ by index."""
