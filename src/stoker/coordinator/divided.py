"""Several partitions of a run executed side by side on one loop, each by its own coordinator."""

import asyncio
from collections.abc import Sequence

import msgspec

from stoker.coordinator.execute import execute
from stoker.coordinator.partition import Partition
from stoker.coordinator.record import RunDirectory
from stoker.coordinator.request import Changed, Observer, RunReport, RunRequest, StopSignal
from stoker.coordinator.sharing import parts_of
from stoker.coordinator.view import RunSnapshot
from stoker.coordinator.whole import merged
from stoker.errors import BadInput, RunOwned


def resumable(run: RunDirectory) -> tuple[Partition, ...]:
    """Return the partitions that no living coordinator holds.

    Raises:
        RunOwned: each of them has one.
    """
    parts = parts_of(run)
    found = tuple(part.partition for part in parts if not part.holder())
    if not found:
        held = ", ".join(f"{part.partition} by process {part.holder()}" for part in parts)
        raise RunOwned(
            f"all partitions of the run in {run.path} are owned: {held}; nothing was changed; "
            "watch it with: stoker status"
        )
    return found


async def execute_all(
    request: RunRequest,
    partitions: Sequence[Partition],
    *,
    observer: Observer | None = None,
    stop: StopSignal | None = None,
) -> RunReport:
    """Execute ``partitions`` of one run on this loop; one that breaks does not end the others.

    Raises:
        BadInput: the caller's: a restart, which one partition alone begins.
        StokerError: a partition's, once all have ended.

    **Cancellation:** as ``execute``.
    """
    if request.changed is Changed.RESTART:
        raise BadInput(
            f"run {request.resume} is divided: a restart is begun by one partition; nothing was "
            f"changed; name it (--partition {partitions[0]}), then go on with the others"
        )
    latest: dict[Partition, RunSnapshot] = {}

    async def one(partition: Partition) -> RunReport:
        def observed(snapshot: RunSnapshot) -> None:
            latest.pop(partition, None)  # the latest comes last
            latest[partition] = snapshot
            if observer is not None:
                observer(merged(list(latest.values())))

        asked = msgspec.structs.replace(request, partition=partition)
        return await execute(asked, observer=observed, stop=stop)

    ended = await asyncio.gather(*(one(p) for p in partitions), return_exceptions=True)
    for end in ended:
        if isinstance(end, BaseException):
            raise end
    reports = [end for end in ended if isinstance(end, RunReport)]
    return RunReport(
        snapshot=merged([report.snapshot for report in reports]),
        resumable=any(report.resumable for report in reports),
    )
