"""How a run ended, as people read it: a few lines on stdout when ``stoker run`` is over."""

from typing import TYPE_CHECKING

from msgspec import UNSET
from rich.console import Group, RenderableType
from rich.text import Text

from stoker.cli.live import lane_line, outcome_line
from stoker.cli.output import counted, duration
from stoker.cli.text import cell

if TYPE_CHECKING:
    from stoker.coordinator.request import RunReport

_SAID_MAX = 400


def summary(report: "RunReport") -> RenderableType:
    """Return the closing lines of a run."""
    snapshot = report.snapshot
    run, part, log = snapshot.run_id, "", "coordinator.log"
    if snapshot.partition is not UNSET:
        log = f"coordinator-{snapshot.partition.partition('/')[0] or '*'}.log"
    if snapshot.partition:
        run, part = f"{run} {snapshot.partition}", f" --partition {snapshot.partition}"
    lines: list[RenderableType] = [
        Text(f"{run} {snapshot.state} after {duration(snapshot.seconds)}", "bold"),
        outcome_line(snapshot),
        lane_line(snapshot.lane),
        Text(
            f"{counted(snapshot.actions, 'action')}, {counted(snapshot.retries, 'retry')} · "
            f"selected → received p50 {milliseconds(snapshot.latency_ms_p50)}, "
            f"p99 {milliseconds(snapshot.latency_ms_p99)} · boxes leaked {snapshot.boxes_leaked}"
        ),
        cell(f"it lies in {snapshot.run_directory}", "dim"),
        cell(f"look closer with: stoker show {snapshot.run_directory}", "dim"),
    ]
    if snapshot.faults:
        faults = ", ".join(f"{code} {count}" for code, count in sorted(snapshot.faults.items()))
        first = [
            cell(f"  first {code}: {said}", "yellow", length=_SAID_MAX)
            for code, said in sorted(snapshot.first_failures.items())
        ]
        if (
            snapshot.faults.keys() - snapshot.first_failures.keys()
        ):  # rollouts went on, or had ended
            first.append(cell(f"  each is told in {snapshot.run_directory}/logs/{log}", "yellow"))
        lines[2:2] = [cell(f"faults met: {faults}", "yellow"), *first]
    if snapshot.stragglers is not None:
        lines.append(cell(snapshot.stragglers.told(), "yellow"))
    if snapshot.held:
        lines.append(cell(snapshot.held, "yellow"))
    if report.resumable:
        lines.append(
            cell(
                f"work is left; go on with: stoker run … --resume {snapshot.run_directory}{part}",
                "yellow",
            )
        )
    return Group(*lines)


def milliseconds(value: float | None) -> str:
    """Return a latency given in milliseconds."""
    return duration(None if value is None else value / 1000)
