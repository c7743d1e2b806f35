import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart"


def test_the_quickstart_runs_as_written(tmp_path: Path) -> None:
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "stoker.cli.main", "run", str(EXAMPLE / "program.py")),
            *("--tasks", str(EXAMPLE / "tasks.jsonl")),
            *("--model", f"scripted:{EXAMPLE / 'model.toml'}"),
            *("--set", "sandbox.accept_shared_kernel=true", "--json"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if ran.returncode == 2 and "isolation" in ran.stderr:
        pytest.skip(f"the quickstart needs boxes: {ran.stderr.strip().splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    snapshot = json.loads(ran.stdout)["snapshot"]
    assert snapshot["outcomes"] == {"completed": 3}
    assert snapshot["reward_mean"] == pytest.approx(2 / 3)
    assert snapshot["boxes_leaked"] == 0
