"""Blows to the processes of a run, at moments that the run's own progress decides."""

import signal
import time
from typing import NamedTuple

from support.runs import Rig, send, tell, wait_gone


class Kill(NamedTuple):
    """One blow, due when the tools have left ``lines`` lines."""

    lines: int
    role: str
    """One of ``runs.ROLES``, or ``everything``: all of them at once, as when a machine dies."""
    number: signal.Signals
    which: int
    """Picks among several who play the role."""


def survive(one: Rig, kills: list[Kill], *, held_seconds: float) -> None:
    """Run to the end through ``kills``; what is stopped is continued after ``held_seconds``.

    The gate is opened after the last one: rollouts that wait for it keep the run from ending early.

    That time is the fault itself, not a wait for anything.
    """
    one.start()
    for kill in kills:
        one.until_lines(kill.lines)
        strike(one, kill, held_seconds)
    one.open_gate()
    one.finish()


def strike(one: Rig, kill: Kill, held_seconds: float) -> None:
    """Do one blow; a coordinator that is killed is resumed."""
    tell(f"{len(one.lines())} lines: {kill.number.name} {kill.role}")
    if kill.role == "everything":
        everything(one)
        return
    pid = one.signal(kill.role, kill.number, kill.which)
    if kill.number is signal.SIGSTOP:
        time.sleep(held_seconds)
        send(pid, signal.SIGCONT)
        return
    assert wait_gone(pid), f"{kill.role} {pid} outlived SIGKILL"
    if kill.role == "coordinator":
        assert one.ended() == -signal.SIGKILL
        one.start()


def everything(one: Rig) -> None:
    """Kill every process of the run at once, and go on."""
    assert one.coordinator is not None
    pids = [one.coordinator.pid, *one.pids("worker"), *one.pids("owner")]
    for pid in pids:
        send(pid, signal.SIGKILL)
    assert one.ended() == -signal.SIGKILL
    assert all(wait_gone(pid) for pid in pids)
    one.start()
