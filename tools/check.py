"""The test command: lint, types, layers, then every floor, each with its time; skips are counted.

``check.py test`` is what must pass (under 15 minutes on 2 cores); ``all`` adds the long floors;
``lint`` stops before the tests. Standard library only; run with .venv's Python.
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

LINT = [
    ("format", [BIN / "ruff", "format", "--check", "--quiet", "."]),
    ("ruff", [BIN / "ruff", "check", "--quiet", "."]),
    ("mypy", [BIN / "mypy", "--no-error-summary"]),
    ("layers", [BIN / "lint-imports", "--no-logo"]),
]
# Floor → its folders and how many run side by side. Boxes and crashes measure time limits of real
# processes, so they get the machine to themselves.
FLOORS = [
    ("tidy and unit", ["tests/tidy", "tests/unit", "tests/golden", "tests/property"], 2),
    ("model", ["tests/model"], 2),
    ("simulation", ["tests/simulation"], 2),
    ("crash", ["tests/crash"], 1),
    ("security", ["tests/security"], 1),
    ("end to end", ["tests/e2e"], 1),
    ("real vLLM", ["tests/rig"], 1),
]


def main(mode: str) -> int:
    """Run what ``mode`` names; return 0 when everything passed."""
    failed = [name for name, command in LINT if not step(name, command)]
    passed = failures = 0
    skips: dict[str, int] = {}
    if mode != "lint":
        for name, folders, workers in FLOORS:
            counts = floor(name, folders, workers, slow=mode == "all")
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


def floor(
    name: str, folders: list[str], workers: int, *, slow: bool
) -> tuple[int, int, dict[str, int]]:
    """Run one floor; return passed, failed and skips by reason."""
    present = [folder for folder in folders if any((ROOT / folder).rglob("test_*.py"))]
    if not present:
        print(f"     {name}: no tests yet")
        return 0, 0, {}
    print(f"\n--- {name}", flush=True)
    with TemporaryDirectory(prefix="stoker-check-") as folder:
        report = Path(folder) / "report.xml"
        pytest = [BIN / "python", "-m", "pytest"]
        if slow and present == ["tests/rig"] and rig_stands():
            pytest = [BIN / "python", "tools/rig_vllm.py"]  # else they skip, and say what lacks
        command = [*pytest, *present, f"--junit-xml={report}", "-rs"]
        if workers > 1:
            command += ["-n", str(workers)]
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


def read_report(report: Path) -> tuple[int, int, dict[str, int]]:
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
