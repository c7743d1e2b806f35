import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "humaneval"
PROBLEMS = 12
CANNOT = ("isolation_unavailable", "HumanEval problems are not installed")


def demo(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "demo.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_demo_keeps_every_promise_on_a_few_problems(tmp_path: Path) -> None:
    ran = demo("--problems", str(PROBLEMS), cwd=tmp_path)
    if ran.returncode == 2 and any(reason in ran.stderr for reason in CANNOT):
        pytest.skip(f"the demo needs boxes and problems: {ran.stderr.strip().splitlines()[-1]}")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = ran.stdout
    assert f"solved: {PROBLEMS} of {PROBLEMS}, in each pass" in said
    assert "killed and resumed equals uninterrupted" in said
    assert "BROKEN" not in said
    assert "was killed with -9 after" in said
    assert "boxes leaked: 0" in said
    assert "shared kernel accepted" in said
    assert re.search(r"p50 \S+ m?s, p99 \S+ m?s", said)
    for figure in ("wall time", "lane active", "throughput ÷ bound", "occupancy", "idle while"):
        assert figure in said
    measured = [line for line in said.splitlines() if not line.startswith("  ")]
    assert max(map(len, measured)) <= 80, "what is not a path fits 80 columns"
    assert "\x1b" not in said, "no control characters where there is no terminal"

    (directory,) = (tmp_path / "runs").iterdir()
    picture = ET.fromstring((directory / "lanes.svg").read_text("utf-8"))
    assert sum("kill -9" in (node.text or "") for node in picture.iter()) == 1
    # Counted at the tool: each pass ran it once for each problem, under keys of its own.
    keys = (directory / "queue.log").read_text("ascii").split()
    assert len(keys) == len(set(keys)) == 3 * PROBLEMS
    shown = [line.strip() for line in said.splitlines() if " show " in line]
    assert len(shown) == 1
    found = subprocess.run(
        [sys.executable, "-m", "stoker.cli.main", *shown[0].split()[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Traceback" in found.stdout, "the first answer really failed in its box"


def test_a_wrong_number_of_problems_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    ran = demo("--problems", "165", cwd=tmp_path)
    assert ran.returncode == 2
    assert "allowed: 2 to 164" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_hold_runs_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file, not a directory")
    ran = demo("--problems", "2", cwd=tmp_path)
    if "HumanEval problems are not installed" in ran.stderr:
        pytest.skip(ran.stderr.strip())
    assert ran.returncode == 2
    assert "choose another place with --runs" in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1
