"""The test command: lint, types, layers, then every floor, each with its time; skips are counted.

``check.py test`` is what must pass (about 20 minutes on 2 cores); ``all`` adds the long floors;
``lint`` stops before the tests. Standard library only; run with .venv's Python. As root on Debian
it installs the programs that some tests drive (``debian_packages.py``).

Models in this process need torch, gigabytes where it comes as a CUDA build: their floor has
an environment of its own (``torch_env.py``) and is run where that is a CPU build, or with
WITH_TORCH=1; WITH_TORCH=0 leaves it out. Every other floor runs without torch.
"""

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
Counts = tuple[int, int, dict[str, int]]
"""Passed, failed, and skipped by reason."""

LINT = [
    ("format", [BIN / "ruff", "format", "--check", "--quiet", "."]),
    ("ruff", [BIN / "ruff", "check", "--quiet", "."]),
    ("mypy", [BIN / "mypy", "--no-error-summary"]),
    ("layers", [BIN / "lint-imports", "--no-logo"]),
]
# Floor → its folders and how many run side by side. Boxes measure the limits of real processes, so
# they get the machine to themselves; a crash mostly waits for who is killed.
FLOORS = [
    ("tidy and unit", ["tests/tidy", "tests/unit", "tests/golden", "tests/property"], 2),
    ("model", ["tests/model"], 2),
    ("simulation", ["tests/simulation"], 2),
    ("crash", ["tests/crash"], 2),
    ("security", ["tests/security"], 1),
    ("end to end", ["tests/e2e"], 2),
    ("real vLLM", ["tests/rig"], 1),
]
BY_FILE = ("crash", "end to end")
"""Floors whose files share a run that takes long: each file is one process's."""
TORCH_FOLDERS = ["tests/in_process", "tests/unit/test_inference_contract.py"]
"""Run by ``-k torch``: of the contract that every model keeps, the part of this one."""
TORCH_SKIPPED = (
    "models in this process: torch would be no CPU build here, or cannot be fetched; WITH_TORCH=1 "
    "make test (with TORCH_INDEX=https://download.pytorch.org/whl/cpu for a small one)"
)


def main(mode: str) -> int:
    """Run what ``mode`` names; return 0 when everything passed."""
    # Each of some thousand short processes would compile all of it again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    failed = [name for name, command in LINT if not step(name, command)]
    passed = failures = 0
    skips: dict[str, int] = {}
    if mode != "lint":
        subprocess.run([BIN / "python", "tools/debian_packages.py"], cwd=ROOT, check=False)
        floors = [floor(*one, slow=mode == "all") for one in FLOORS]
        for counts in [*floors, torch_floor(slow=mode == "all")]:
            passed += counts[0]
            failures += counts[1]
            for reason, count in counts[2].items():
                skips[reason] = skips.get(reason, 0) + count
    if skips:
        print("\nskipped, and what would run them:")
        for reason, count in sorted(skips.items()):
            print(f"  {count:4}  {reason}")
    if failed:
        print(f"\nfailed before the tests: {', '.join(failed)}")
    if mode != "lint":
        print(f"\n{passed} passed, {failures + len(failed)} failed, {sum(skips.values())} skipped")
    return 1 if failed or failures else 0


def step(name: str, command: list[str | Path]) -> bool:
    """Run one command; show its output only when it fails."""
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    ok = done.returncode == 0
    print(f"{'ok  ' if ok else 'FAIL'} {name} ({time.monotonic() - began:.0f} s)", flush=True)
    if not ok:
        print(done.stdout[-20_000:] + done.stderr[-5_000:])
    return ok


def floor(name: str, folders: list[str], workers: int, *, slow: bool) -> Counts:
    """Run one floor; return passed, failed and skips by reason."""
    present = [folder for folder in folders if any((ROOT / folder).rglob("test_*.py"))]
    if not present:
        print(f"     {name}: no tests yet")
        return 0, 0, {}
    pytest = [BIN / "python", "-m", "pytest", "--durations=12", "--durations-min=5"]
    if slow and present == ["tests/rig"] and rig_stands():
        pytest = [BIN / "python", "tools/rig_vllm.py"]  # else they skip, and say what lacks
    side_by_side = ["-n", str(workers), "--dist", "loadfile" if name in BY_FILE else "load"]
    return run_tests(name, [*pytest, *present, *(side_by_side if workers > 1 else [])], slow)


def torch_floor(*, slow: bool) -> Counts:
    """Run what needs torch, in its own environment, or count it as skipped."""
    asked = os.environ.get("WITH_TORCH", "")
    tool = [BIN / "python", "tools/torch_env.py"]
    if asked == "0":
        return 0, 0, {"models in this process: WITH_TORCH=0 leaves them out": torch_tests()}
    print("\n--- models in this process: their environment", flush=True)
    if not asked and subprocess.run([*tool, "check"], cwd=ROOT, check=False).returncode != 0:
        return 0, 0, {TORCH_SKIPPED: torch_tests()}
    began = time.monotonic()
    if subprocess.run([*tool, "make"], cwd=ROOT, check=False).returncode != 0:
        print("FAIL .venv-torch cannot be made")
        return 0, 1, {}
    print(f"     environment: {time.monotonic() - began:.0f} s", flush=True)
    python = ROOT / ".venv-torch" / "bin" / "python"
    command = [python, "-m", "pytest", *TORCH_FOLDERS, "-k", "torch"]
    return run_tests("models in this process", command, slow)


def torch_tests() -> int:
    """Count the test functions of the folder that needs torch."""
    files = (ROOT / TORCH_FOLDERS[0]).glob("test_*.py")
    return sum(file.read_text(encoding="utf-8").count("\ndef test_") for file in files)


def run_tests(name: str, command: list[str | Path], slow: bool) -> Counts:  # noqa: FBT001 - one of two modes
    """Run pytest by ``command``; return passed, failed and skips by reason."""
    print(f"\n--- {name}", flush=True)
    with TemporaryDirectory(prefix="stoker-check-") as folder:
        report = Path(folder) / "report.xml"
        command = [*command, f"--junit-xml={report}", "-rs"]
        if not slow:
            command += ["-m", "not slow"]
        began = time.monotonic()
        # The command's own output is shown as it comes: long work shows progress.
        code = subprocess.run(command, cwd=ROOT, check=False, env=dict(os.environ)).returncode
        counts = read_report(report)
    print(f"     {name}: {time.monotonic() - began:.0f} s", flush=True)
    if code not in {0, 5} and counts[1] == 0:
        return counts[0], 1, counts[2]
    return counts


def rig_stands() -> bool:
    """Return whether a real vLLM was installed by ``make rig-vllm``."""
    asked = [BIN / "python", "tools/rig_vllm.py", "check"]
    return subprocess.run(asked, cwd=ROOT, check=False).returncode == 0


def read_report(report: Path) -> Counts:
    """Count passed, failed and skipped tests of one JUnit report."""
    passed = failed = 0
    skips: dict[str, int] = {}
    if not report.exists():
        return 0, 1, skips
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - written by our own pytest
        skip = case.find("skipped")
        if skip is not None:
            reason = skip.get("message", "no reason given")
            skips[reason] = skips.get(reason, 0) + 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        else:
            passed += 1
    return passed, failed, skips


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "test"))
