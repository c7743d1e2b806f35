"""The live view of a run: rich on a terminal, one progress line every few seconds elsewhere.

Rendering has a thread of its own and looks at the latest snapshot only, so that a slow or stopped
terminal never holds the coordinator. Everything that came from an agent is cleaned first.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stoker.cli.output import counted, duration, percent, table
from stoker.cli.text import clean, shorten
from stoker.coordinator.request import Observer
from stoker.coordinator.view import BudgetView, CapsView, LaneView, RunSnapshot, ServiceView
from stoker.model.outcome import OutcomeKind

REFRESH_SECONDS = 0.25
PROGRESS_SECONDS = 5.0
_JOIN_SECONDS = 2.0
_RECENT_MAX = 5
_BAR_MAX = 48
_SHOWN_SHARE = 0.005
_FINE_BELOW = 0.1
_WAITS_SHOWN = 1.0
_STYLES = {
    OutcomeKind.COMPLETED: "green",
    OutcomeKind.TRUNCATED: "yellow",
    OutcomeKind.FAILED: "red",
    OutcomeKind.CANCELLED: "bright_black",
    OutcomeKind.AMBIGUOUS: "magenta",
}


class _View:
    """The latest snapshot, and the thread's two ways of showing it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._latest: RunSnapshot | None = None
        self._ended = threading.Event()

    def take(self, snapshot: RunSnapshot) -> None:
        """Keep ``snapshot`` for the next look; never blocks."""
        self._latest = snapshot

    def end(self) -> None:
        """Show the last snapshot once more and end the thread."""
        self._ended.set()

    def draw(self) -> None:
        """Redraw the view in place."""
        # stdout is the answer's, not the view's: a thread must not put another in its place.
        with Live(
            console=self._console,
            auto_refresh=False,
            vertical_overflow="crop",
            redirect_stdout=False,
            redirect_stderr=False,
        ) as live:
            ended = False
            while not ended:
                ended = self._ended.wait(REFRESH_SECONDS)
                if self._latest is not None:
                    live.update(frame(self._latest, self._console.width), refresh=True)

    def tell(self) -> None:
        """Write a line now and then, and one at the end."""
        ended = False
        while not ended:
            ended = self._ended.wait(PROGRESS_SECONDS)
            if self._latest is not None:
                self._console.print(progress_line(self._latest), soft_wrap=True)


@contextmanager
def watching(console: Console) -> Iterator[Observer]:
    """Show snapshots on ``console`` while the block runs; yields who takes them."""
    view = _View(console)
    rich = console.is_terminal and not console.is_dumb_terminal
    thread = threading.Thread(target=view.draw if rich else view.tell, name="live", daemon=True)
    thread.start()
    try:
        yield view.take
    finally:
        view.end()
        # A terminal that was stopped must not keep a finished run from ending.
        thread.join(_JOIN_SECONDS)


def frame(snapshot: RunSnapshot, width: int) -> RenderableType:
    """Return the whole view, ``width`` columns wide."""
    parts: list[RenderableType] = [
        _heading(snapshot, width),
        _line("lane", _lane_state(snapshot.lane)),
        _line("", lane_line(snapshot.lane)),
        *([_line("unused", _unused(snapshot.lane))] if snapshot.lane.unused else []),
        _classes(snapshot),
        _line("rollouts", _bar(snapshot, min(_BAR_MAX, width - 45))),
        _line("", outcome_line(snapshot)),
        _line("boxes", _boxes(snapshot)),
        _line("actions", _actions(snapshot)),
    ]
    if snapshot.caps is not None:
        parts.append(_line("ledger", _caps(snapshot.caps)))
    if snapshot.services:
        parts.append(_line("services", _services(snapshot.services)))
    if snapshot.budget is not None:
        parts.append(_line("budget", _budget(snapshot.budget)))
    if snapshot.held:
        parts.append(_line("held", Text(clean(snapshot.held), "yellow")))
    if snapshot.stragglers is not None:
        parts.append(_line("groups", Text(snapshot.stragglers.told(), "yellow")))
    if snapshot.faults:
        parts.append(_line("faults", Text(clean(_counts(snapshot.faults)), "yellow")))
    parts += [
        Text(shorten(f"  {line}", width), "dim", no_wrap=True)
        for line in snapshot.recent[-_RECENT_MAX:]
    ]
    return Group(*parts)


def lane_line(lane: LaneView) -> Text:
    """Return the four figures that always stand together; throughput is a share of its bound."""
    return Text.assemble(
        ("active ", "dim"), percent(lane.active_share),
        ("  throughput ", "dim"), percent(lane.throughput_share),
        ("  occupancy ", "dim"), percent(lane.occupancy),
        ("  idle while ready ", "dim"), _fine(lane.idle_while_ready_share),
    )  # fmt: skip


def _unused(lane: LaneView) -> Text:
    """Return what the window was not used for, the largest cause first."""
    causes = [
        f"{clean(cause)} {percent(share)}"
        for cause, share in sorted(lane.unused.items(), key=lambda one: -one[1])
        if share >= _SHOWN_SHARE
    ]
    text = Text(f"{percent(sum(lane.unused.values()))} of the window")
    return text.append(f": {'  '.join(causes)}" if causes else "", "dim")


def outcome_line(snapshot: RunSnapshot) -> Text:
    """Return how the finished rollouts ended."""
    text = Text()
    for kind, style in _STYLES.items():
        if count := snapshot.outcomes.get(kind, 0):
            text.append(f"{count} {kind}  ", style)
    if not text.plain:
        text.append("none finished yet  ", "dim")
    if snapshot.reward_mean is not None:
        text.append(f"mean reward {snapshot.reward_mean:.3f}", "bold")
    return text


def progress_line(snapshot: RunSnapshot) -> str:
    """Return one line for a log or a pipe."""
    lane = snapshot.lane
    queued = sum(one.queued for one in snapshot.classes.values())
    outcomes = f" ({_counts(snapshot.outcomes)})" if snapshot.outcomes else ""
    unserved = [
        name for name, one in sorted(snapshot.classes.items()) if one.queued > one.slots == 0
    ]
    waiting = f", no worker serves {', '.join(unserved)}" if unserved else ""
    return clean(
        f"{_name(snapshot)} {snapshot.state} {duration(snapshot.seconds)} · "
        f"{_finished(snapshot)}/{snapshot.rollouts_total} finished{outcomes} · "
        f"{snapshot.rollouts_active} active · lane {percent(lane.active_share)} active, "
        f"{lane.running}/{lane.window} running, {lane.ready} ready · {queued} queued{waiting} · "
        f"{counted(snapshot.boxes_leaked, 'box')} leaked"
    )


def _heading(snapshot: RunSnapshot, width: int) -> Text:
    left = f"stoker {clean(_name(snapshot))}"
    right = f"{snapshot.state}  {duration(snapshot.seconds)}"
    gap = " " * max(2, width - len(left) - len(right))
    return Text.assemble((left, "bold"), gap, (right, "bold cyan"), no_wrap=True)


def _name(snapshot: RunSnapshot) -> str:
    return f"{snapshot.run_id} {snapshot.partition or ''}".rstrip()


def _line(label: str, content: Text) -> Text:
    return Text.assemble((f"{label:<9}", "dim"), content, no_wrap=True, overflow="ellipsis")


def _lane_state(lane: LaneView) -> Text:
    text = Text.assemble((clean(lane.model), "bold"))
    if lane.simulated:
        text.append(" (simulated)", "yellow")
    text.append(f"  {lane.running}/{lane.window} running  {lane.ready} ready")
    text.append(f"  {counted(lane.calls, 'call')}")
    if lane.retries:
        text.append(f"  {lane.retries} retried", "yellow")
    if lane.paused:
        text.append("  weight update", "yellow")
    return text


def _classes(snapshot: RunSnapshot) -> Table:
    parked = any(one.parked for one in snapshot.classes.values())
    columns = [">queued", *([">parked"] if parked else []), ">oldest", ">running"]
    sized = any(one.slots_needed is not None for one in snapshot.classes.values())
    made = table("class", *columns, ">slots", *([">needs"] if sized else []), ">busy", ">done")
    for name, one in sorted(snapshot.classes.items()):
        needs = None if one.slots_needed is None else math.ceil(one.slots_needed)
        missing = "red" if one.slots == 0 else "yellow" if one.slots < (needs or 0) else ""
        made.add_row(
            Text(shorten(name, 16)),
            str(one.queued),
            *([str(one.parked)] if parked else []),
            duration(one.oldest_queued_seconds) if one.queued else "-",
            str(one.running),
            Text(str(one.slots), missing),
            *(["-" if needs is None else str(needs)] if sized else []),
            percent(one.busy_share),
            str(one.finished),
        )
    return made


def _bar(snapshot: RunSnapshot, width: int) -> Text:
    total = max(1, snapshot.rollouts_total)
    text = Text()
    drawn = counted = 0
    for kind, style in _STYLES.items():
        # Ends are rounded, not lengths: the whole never comes out longer than the bar.
        counted += snapshot.outcomes.get(kind, 0)
        end = width * counted // total
        text.append("█" * (end - drawn), style)
        drawn = end
    active = min(width - drawn, -(-width * snapshot.rollouts_active // total))
    text.append("▒" * active, "cyan")
    text.append("·" * (width - drawn - active), "dim")
    text.append(f" {_finished(snapshot)}/{snapshot.rollouts_total}", "bold")
    text.append(f" {snapshot.rollouts_active} active", "cyan")
    text.append(f", target {snapshot.admission_target}", "dim")
    return text


def _boxes(snapshot: RunSnapshot) -> Text:
    leaked = snapshot.boxes_leaked
    text = Text(f"{snapshot.boxes_alive} alive, ")
    if snapshot.boxes_ready:
        text.append(f"{snapshot.boxes_ready} of them ready, ")
    text.append(f"{leaked} leaked", "bold red" if leaked else "green")
    if snapshot.memory_short_share:
        text.append("  memory short", "yellow")
    if snapshot.accept_shared_kernel:  # first: what a narrow terminal cuts off must not be this
        text.append("  shared kernel accepted", "yellow")
    for name, got in sorted(snapshot.isolation.items()):
        text.append(f"  {clean(name)}: {clean(got)}")
    return text


def _caps(caps: CapsView) -> Text:
    """Return how far the ledger's caps are used; what is over one is marked."""
    text = Text(f"{_of(caps.queued, caps.queued_max)} queued, ")
    text.append(f"{_of(caps.unacknowledged, caps.results_max)} results")
    if caps.run_queued_max is not None:
        text.append(f", {_of(caps.run_queued, caps.run_queued_max)} of this run")
    if caps.run_leased_max is not None:
        text.append(f", {_of(caps.run_leased, caps.run_leased_max)} of this run leased")
    if caps.parked:
        text.append(f", {caps.parked} parked over a cap", "yellow")
    if caps.other_runs:
        text.append(f", shared with {counted(caps.other_runs, 'other run')}", "dim")
    return text


def _services(services: dict[str, ServiceView]) -> Text:
    """Return what remote services are asked for; a rate that was lowered is marked."""
    text = Text()
    for name, one in sorted(services.items()):
        text.append(f"  {clean(name)}: " if text.plain else f"{clean(name)}: ", "dim")
        full = one.rate >= one.rate_max
        text.append(f"{one.rate:.3g}/s of {one.rate_max:.3g}/s", "" if full else "yellow")
        if one.lowered:
            text.append(f", lowered {counted(one.lowered, 'time')}")
        if one.waits_seconds >= _WAITS_SHOWN:
            text.append(f", next in {duration(one.waits_seconds)}")
    return text


def _budget(budget: BudgetView) -> Text:
    """Return what is spent of each budget there is."""
    said = []
    if budget.tokens_max is not None:
        said.append(f"{budget.tokens:,} of {budget.tokens_max:,.0f} tokens")
    if budget.box_seconds_max is not None:
        said.append(
            f"{duration(budget.box_seconds)} of {duration(budget.box_seconds_max)} in boxes"
        )
    if budget.money_max is not None:
        said.append(f"{budget.money:,.2f} of {budget.money_max:,.2f} money")
    return Text(", ".join(said))


def _of(used: int, most: int) -> str:
    return f"{used}/{most}"


def _actions(snapshot: RunSnapshot) -> Text:
    p50, p99 = (
        duration(None if value is None else value / 1000)
        for value in (snapshot.latency_ms_p50, snapshot.latency_ms_p99)
    )
    return Text(
        f"{snapshot.actions} done, {counted(snapshot.retries, 'retry')}  "
        f"selected → received p50 {p50}, p99 {p99}"
    )


def _fine(share: float) -> str:
    return percent(share) if share >= _FINE_BELOW else f"{share * 100:.1f} %"


def _finished(snapshot: RunSnapshot) -> int:
    return sum(snapshot.outcomes.values())


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
