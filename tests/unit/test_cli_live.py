import io
import threading

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from stoker.cli import live
from stoker.cli.live import frame, progress_line, watching
from stoker.coordinator.view import ClassView, RunSnapshot, ServiceView
from support.snapshots import LANE, SNAPSHOT


def drawn(snapshot: RunSnapshot, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(frame(snapshot, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def changed(**fields: object) -> RunSnapshot:
    result: RunSnapshot = msgspec.structs.replace(SNAPSHOT, **fields)
    return result


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(SNAPSHOT, width)
    assert max(cell_len(line) for line in lines) <= width
    if width >= 80:
        assert len(lines) == len(drawn(SNAPSHOT, 200)), "nothing wraps from 80 columns on"


@pytest.mark.parametrize("width", [80, 120])
def test_the_four_lane_figures_stand_together_with_model_and_label(width: int) -> None:
    full = msgspec.structs.replace(
        LANE, active_share=1.0, throughput_share=1.0, occupancy=1.0, idle_while_ready_share=1.0
    )
    text = "\n".join(drawn(changed(lane=full), width))
    assert "active 100 %  throughput 100 %  occupancy 100 %  idle while ready 100 %" in text
    assert "sim:a100 (simulated)" in text


def test_an_unknown_bound_is_a_dash_and_small_idle_shows_a_decimal() -> None:
    text = "\n".join(drawn(changed(lane=msgspec.structs.replace(LANE, throughput_share=None)), 80))
    assert "throughput -  " in text
    assert "idle while ready 0.1 %" in text


def test_what_agents_wrote_cannot_leave_its_line() -> None:
    text = "\n".join(drawn(SNAPSHOT, 120))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\x1b[2Jevil [red]markup[/red] \\u202e" in text


@pytest.mark.parametrize(
    ("outcomes", "active", "total"),
    [
        ({}, 0, 0),
        ({"completed": 1}, 9, 10),
        ({"completed": 333, "failed": 333, "truncated": 333, "cancelled": 1}, 0, 1000),
        ({"completed": 1, "ambiguous": 1}, 500, 10_000),
    ],
)
def test_the_bar_is_never_longer_than_its_place(
    outcomes: dict[str, int], active: int, total: int
) -> None:
    snapshot = changed(outcomes=outcomes, rollouts_active=active, rollouts_total=total)
    bar = next(line for line in drawn(snapshot, 80) if line.startswith("rollouts"))
    assert sum(bar.count(part) for part in "█▒·") == 35


def test_a_leak_is_shown() -> None:
    assert any("3 leaked" in line for line in drawn(changed(boxes_leaked=3), 80))


def test_boxes_made_ahead_are_shown() -> None:
    lines = drawn(changed(boxes_alive=5, boxes_ready=2), 80)
    assert any("5 alive, 2 of them ready, 0 leaked" in line for line in lines)


def test_without_a_terminal_there_is_one_line_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=80)
    with watching(console) as observer:
        observer(SNAPSHOT)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == progress_line(SNAPSHOT) + "\n"


def test_on_a_terminal_the_last_snapshot_stays_and_the_cursor_comes_back() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with watching(console) as observer:
        observer(changed(state="running"))
        observer(changed(state="finished"))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "finished" in shown
    assert shown.rstrip().endswith("\x1b[?25h")


def test_a_stopped_terminal_does_not_hold_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_JOIN_SECONDS", 0.05)
    stopped, writing = threading.Event(), threading.Event()

    class Stopped(io.StringIO):
        def write(self, text: str, /) -> int:
            writing.set()
            stopped.wait(30)
            return len(text)

    console = Console(file=Stopped(), width=80, force_terminal=True)
    with watching(console) as observer:
        assert writing.wait(30)
        for _ in range(1000):
            observer(SNAPSHOT)
    stopped.set()


def test_a_class_with_work_and_no_worker_is_named_in_the_progress_line() -> None:
    assert "no worker" not in progress_line(SNAPSHOT)
    alone = ClassView(
        queued=2, running=0, slots=0, oldest_queued_seconds=9.0, finished=0, busy_share=0.0
    )
    said = progress_line(changed(classes={"code": alone, "fast": SNAPSHOT.classes["fast"]}))
    assert " · 5 queued, no worker serves code · " in said


def test_slots_that_are_too_few_for_the_lane_are_shown_beside_what_it_needs() -> None:
    needs = msgspec.structs.replace(SNAPSHOT.classes["fast"], slots_needed=13.2)
    lines = drawn(changed(classes={**SNAPSHOT.classes, "fast": needs}), 100)
    heads = next(line for line in lines if "slots" in line and "busy" in line).split()
    fast = next(line for line in lines if line.strip().startswith("fast")).split()
    assert heads[heads.index("slots") + 1] == "needs"
    at = fast.index("14")
    assert fast[at - 1] == str(needs.slots)
    assert "needs" not in "".join(drawn(SNAPSHOT, 100))


def test_a_service_whose_rate_was_lowered_shows_by_how_much_and_when_the_next_may_go() -> None:
    assert not any(line.startswith("services") for line in drawn(SNAPSHOT, 120))
    web = ServiceView(rate=7.0, rate_max=10.0, waits_seconds=4.2, lowered=2)
    calm = ServiceView(rate=0.5, rate_max=0.5)
    [line] = [
        line
        for line in drawn(changed(services={"web": web, "db": calm}), 120)
        if line.startswith("services")
    ]
    assert "db: 0.5/s of 0.5/s  web: 7/s of 10/s, lowered 2 times, next in 4" in line


def test_a_lane_that_is_held_for_a_weight_update_says_so() -> None:
    held = changed(lane=msgspec.structs.replace(LANE, paused=True))
    assert any("weight update" in line for line in drawn(held, 120))
