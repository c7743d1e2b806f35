"""The fault script of the comparison, on ours: what its table says of us is tried here too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.source import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "becomes"),
    [("stoker-external", "told 2"), ("stoker-idempotent", "once 2")],
)
def test_jobs_of_a_killed_worker_are_done_again_or_told(
    system: str, becomes: str, tmp_path: Path
) -> None:
    found = tmp_path / "found.json"
    command = ["tools/bench_faults/faults.py", "--only", system, "--faults", "kill_before"]
    subprocess.run(
        [sys.executable, *command, "--json", str(found)], cwd=ROOT, check=True, timeout=300
    )
    one = json.loads(found.read_bytes())["systems"][system]
    assert one["faults"] == {"kill_before": becomes}
    assert one["versions"].startswith("stoker ")
