"""The closing lines of a run."""

import io

import msgspec
from rich.console import Console

from stoker.cli.report import summary
from stoker.coordinator.request import RunReport
from stoker.coordinator.view import RunSnapshot
from support.snapshots import SNAPSHOT


def told(snapshot: RunSnapshot, *, resumable: bool = False, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    report = RunReport(snapshot=snapshot, resumable=resumable)
    console.print(summary(report), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_first_failure_of_each_kind_is_told_on_a_line_of_its_own() -> None:
    failed = {"box_failed": "a (rol_1): no box\nwas \x1b[2Jmade", "program_raised": "b (rol_2): x"}
    lines = told(msgspec.structs.replace(SNAPSHOT, first_failures=failed))
    where = lines.index("faults met: box_failed 2")
    assert lines[where + 1 : where + 3] == [
        "  first box_failed: a (rol_1): no box\\nwas \\x1b[2Jmade",
        "  first program_raised: b (rol_2): x",
    ]


def test_a_command_to_copy_stays_on_one_line() -> None:
    directory = "/somewhere/rather/deep/in/a/home/of/a/reader/runs/run_0a1b2c3d4e5f"
    lines = told(msgspec.structs.replace(SNAPSHOT, run_directory=directory), resumable=True)
    assert f"look closer with: stoker show {directory}" in lines
    assert f"work is left; go on with: stoker run … --resume {directory}" in lines


def test_faults_that_failed_no_rollout_are_to_be_found_in_the_log() -> None:
    lines = told(SNAPSHOT)
    where = lines.index("faults met: box_failed 2")
    assert lines[where + 1] == "  each is told in runs/run_0a1b2c3d4e5f/logs/coordinator.log"
    alone = msgspec.structs.replace(SNAPSHOT, first_failures={"box_failed": "a (rol_1): no box"})
    assert "told in" not in "\n".join(told(alone))
