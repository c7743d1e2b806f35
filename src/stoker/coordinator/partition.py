"""Which groups of a run one coordinator owns.

A run may have several coordinators, one per partition: the agent-loop workers of a trainer, say,
each with a handle to the engine. The run's groups are put in the order of their ids and dealt out
in turn, as cards are. An id is a digest of run and task, so partitions differ by one group at most
whatever the file is sorted by, and the hand is the same at every resume, since the record fixes the
run's id, its tasks and the number of partitions.
"""

import msgspec

from stoker.errors import BadInput
from stoker.model.ids import RunId, group_id
from stoker.model.task import Task

PARTITIONS_MAX = 1024
PORT_MAX = 65_535


class Partition(msgspec.Struct, frozen=True):
    """One of the parts a run is divided into: ``Partition(1, 4)`` is the second of four."""

    index: int = 0
    """From 0."""
    count: int = 1
    """Of the whole run; all its coordinators are given the same."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= PARTITIONS_MAX:
            raise BadInput(
                f"a run has 1 to {PARTITIONS_MAX} partitions, not {self.count}; nothing was started"
            )
        if not 0 <= self.index < self.count:
            raise BadInput(
                f"there is no partition {self}; those of {self.count} are 0/{self.count} to "
                f"{self.count - 1}/{self.count}; nothing was started"
            )

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def name(self) -> str:
        """What the ledger calls it."""
        return str(self.index)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its run."""
        return self.count == 1

    def hand(self, run_id: RunId, tasks: tuple[Task, ...]) -> tuple[Task, ...]:
        """Return the tasks whose groups are this partition's, in the order of ``tasks``."""
        groups = {group_id(run_id, task.task_id): task for task in tasks}
        mine = set(sorted(groups)[self.index :: self.count])
        return tuple(task for group, task in groups.items() if group in mine)

    def share(self, total: int) -> int:
        """Return this partition's share of what the whole run may have; all shares make ``total``.

        The first partitions get what does not divide.
        """
        return total // self.count + (self.index < total % self.count)

    def port(self, first: int) -> int:
        """Return where this one's coordinator listens when the first one's is told ``first``.

        Raises:
            BadInput: there are not so many ports. 0 stays 0: any free one.
        """
        port = first + self.index if first else 0
        if port > PORT_MAX:
            raise BadInput(
                f"partition {self} would take the metrics port {port}, past {PORT_MAX}; nothing "
                f"was changed; set observe.metrics_port to {PORT_MAX - self.count} or less"
            )
        return port


WHOLE = Partition()
"""The one partition of a run that is not divided."""


def divided(count: int) -> tuple[Partition, ...]:
    """Return all partitions of a run."""
    return tuple(Partition(index, count) for index in range(count))


def partition_of(text: str) -> Partition:
    """Read ``1/4``.

    Raises:
        BadInput: it is no such partition.
    """
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise BadInput(
            f"{text!r} is no partition; write INDEX/COUNT, from 0: the first of four is 0/4"
        )
    return Partition(int(index), int(count))
