"""Scores that cannot be forged (CASES A28), and whose fault a failure is."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.errors import BoxFailed, ToolRefused
from stoker.model.execution import Limits, Rung
from stoker.model.tools import RunRequest, Tests, Verdict
from stoker.sandbox import runtime
from stoker.sandbox.base import BoxRun
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBox
from support import sandbox
from support.sandbox import HERE, SMALL, backend_of, needs_root, policy_of

CHECK = """
def check(candidate):
    assert candidate([1, 2, 3]) == 6
    assert candidate([]) == 0
    for _ in range(3):
        assert candidate([5]) == 5
"""
RIGHT = "def total(numbers):\n    return sum(numbers)\n"


JUDGED = [pytest.param(Rung.ROOT if sandbox.ROOT else Rung.PROCESS, id="here"), *sandbox.CONTAINER]


def judged(
    state: Path,
    solution: str,
    *,
    rung: Rung = Rung.PROCESS if not sandbox.ROOT else Rung.ROOT,
    source: str = CHECK,
    files: dict[str, bytes] | None = None,
    limits: Limits = SMALL,
    timeout_seconds: float = 10.0,
) -> Verdict:
    async def body() -> Verdict:
        async with SandboxHost.open(state) as host:
            backend = backend_of(host, rung)
            try:
                verdict, usage = await backend.judge(
                    "box_judge",
                    {"solution.py": solution.encode(), **(files or {})},
                    Tests(source=source, entry_point="total"),
                    policy=policy_of(rung, limits),
                    timeout_seconds=timeout_seconds,
                )
            finally:
                assert host.leaked() == 0
            assert usage.cpu_seconds is not None
            return verdict

    return sandbox.run(body)


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", HERE)
def test_a_right_answer_passes(tmp_path: Path, rung: Rung) -> None:
    verdict = judged(tmp_path, RIGHT, rung=rung)
    assert verdict == Verdict(passed=True, detail="", run=verdict.run)
    assert verdict.run is not None
    assert verdict.run.ok


@pytest.mark.parametrize("how", ["lost", "failed"])
def test_a_solution_whose_box_is_lost_is_not_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    running = LocalBox.run_with

    async def lost(self: LocalBox, request: RunRequest, **given: Any) -> BoxRun:
        run = await running(self, request, **given)
        if not any("solution_server" in word for word in request.argv):
            return run
        if how == "failed":
            raise BoxFailed("its launcher was killed")
        return msgspec.structs.replace(run, box_lost=True)

    monkeypatch.setattr(LocalBox, "run_with", lost)
    with pytest.raises(BoxFailed, match="the solution's box was lost"):
        judged(tmp_path, "import os\ndef total(numbers):\n    os._exit(1)\n")


@pytest.mark.parametrize("rung", HERE)
def test_a_wrong_answer_fails_and_shows_the_assertion(tmp_path: Path, rung: Rung) -> None:
    verdict = judged(tmp_path, "def total(numbers):\n    return 7\n", rung=rung)
    assert not verdict.passed
    assert "assert candidate([1, 2, 3]) == 6" in verdict.detail
    assert "AssertionError" in verdict.detail
    assert "judge_main" not in verdict.detail


EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
"""
FORGERIES = {
    "exit(0) while loading": "exit(0)",
    "os._exit(0) while loading": "import os\nos._exit(0)",
    "exit(0) in the call": "def total(n):\n    exit(0)",
    "os._exit(0) in the call": "import os\ndef total(n):\n    os._exit(0)",
    "success lines": (
        "import sys\nprint('PASSED', 'ok', '1 passed in 0.01s')\n"
        'print(\'{"event": "verdict", "passed": true}\')\n'
        "def total(n):\n    print('PASSED'); sys.stdout.flush(); return None"
    ),
    "patched builtins and assert": (
        "import builtins, sys\n"
        "builtins.AssertionError = type('A', (Exception,), {'__init__': lambda *a: exit(0)})\n"
        "builtins.__build_class__ = None; builtins.sum = lambda n: 6\n"
        "for m in list(sys.modules): sys.modules[m] = sys.modules['builtins']\n"
        "def total(n):\n    return 6"
    ),
    "an object equal to everything": EQUAL + "def total(n):\n    return Equal()",
    "an int equal to everything": (
        EQUAL + "class Int(Equal, int):\n    pass\ndef total(n):\n    return Int(41)"
    ),
    "a list with an equal-to-everything element": EQUAL + "def total(n):\n    return [Equal()]",
    "recursion in repr": (
        "class R(Exception):\n"
        "    def __repr__(self): return repr(self)\n    __str__ = __repr__\n"
        "def total(n):\n    raise R()"
    ),
    "a hostile exception class": (
        "class E(BaseException):\n"
        "    def __str__(self): import os; os._exit(0)\n"
        "def total(n):\n    raise E()"
    ),
    "writes to every descriptor": (
        "import os\n"
        'good = b\'{"event": "checked"}\\n{"event": "verdict", "nonce": "", "passed": true}\\n\'\n'
        "for n in range(3, 64):\n"
        "    try: os.write(n, good * 10)\n"
        "    except OSError: pass\n"
        "def total(n):\n    return 0"
    ),
    "forged replies on the channel": (
        "import os, struct\n"
        "d = b'{\"result\": 6}'\n"
        "def total(n):\n"
        "    for _ in range(9): os.write(3, struct.pack('>I', len(d)) + d)\n"
        "    os._exit(0)"
    ),
    "reads /proc/self/fd": (
        "import os\n"
        "for n in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        with open('/proc/self/fd/' + n, 'wb', buffering=0) as f: f.write(b'x' * 100)\n"
        "    except (OSError, ValueError): pass\n"
        "def total(n):\n    return 0"
    ),
    "malformed data": (
        "import os, struct\n"
        "def total(n):\n"
        "    d = b'{\"result\": {\"q\": []}}'; os.write(3, struct.pack('>I', len(d)) + d)\n"
        "    import time; time.sleep(1000)"
    ),
    "deeply nested data": (
        "import os, struct\n"
        "def total(n):\n"
        "    d = b'[' * 1000000; os.write(3, struct.pack('>I', len(d)) + d)\n"
        "    import time; time.sleep(1000)"
    ),
    "an enormous message": (
        "import os, struct\n"
        "def total(n):\n"
        "    os.write(3, struct.pack('>I', 1 << 31))\n"
        "    import time; time.sleep(1000)"
    ),
    "no such function": "def other(n):\n    return 6",
    "a syntax error": "def total(n) return 6",
    "closes the channel": "import os\nos.close(3)\ndef total(n):\n    return 6",
    "kills its parent": "import os, signal\nos.kill(-1 if os.getuid() == 1000 else os.getpid(), 9)",
    "stops itself": "import os, signal\ndef total(n):\n    os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("rung", JUDGED)
@pytest.mark.parametrize("name", FORGERIES)
def test_a28_forgeries_score_nothing(tmp_path: Path, rung: Rung, name: str) -> None:
    verdict = judged(tmp_path, FORGERIES[name], rung=rung, timeout_seconds=3.0)
    assert not verdict.passed
    assert verdict.detail


def test_a28_planted_files_change_nothing(tmp_path: Path) -> None:
    planted = b"import builtins, os, sys\nbuiltins.AssertionError = SystemExit\nos._exit(0)\n"
    names = ("sitecustomize.py", "usercustomize.py", "conftest.py", "tests.py", "json.py",
             "socket.py", "crossing.py", "solution_server.py", "judge_main.py", "pytest.ini",
             "python", ".pth")  # fmt: skip
    files = dict.fromkeys(names, planted)
    assert not judged(tmp_path, "def total(n):\n    return 1", files=files).passed
    assert judged(tmp_path, RIGHT, files=files).passed


def test_a28_a_swallowed_death_is_still_a_failure(tmp_path: Path) -> None:
    source = (
        "def check(candidate):\n"
        "    try:\n        candidate([1])\n    except BaseException:\n        pass\n"
    )
    verdict = judged(tmp_path, "import os\ndef total(n):\n    os._exit(0)", source=source)
    assert not verdict.passed
    assert "process ended" in verdict.detail


def test_a28_an_in_process_harness_is_fooled() -> None:
    # The attack works on the usual harness: the tests share the solution's process.
    program = "import os\ndef total(n):\n    os._exit(0)\n" + CHECK + "\ncheck(total)\n"
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode == 0


def test_exceptions_of_the_solution_reach_the_tests_by_name(tmp_path: Path) -> None:
    source = """
def check(candidate):
    for bad, kind in ((-1, ValueError), ("x", TypeError), ({}, KeyError)):
        try:
            candidate(bad)
        except kind as error:
            assert "told" in str(error)
        else:
            assert False, "nothing was raised"
"""
    solution = (
        "def total(n):\n"
        "    raise {int: ValueError, str: TypeError, dict: KeyError}[type(n)]('told')\n"
    )
    verdict = judged(tmp_path, solution, source=source)
    assert verdict.passed, verdict.detail


def test_plain_data_crosses_both_ways(tmp_path: Path) -> None:
    source = """
import math
VALUES = [None, True, 0, -1, 10**40, 1.5, float("inf"), 1 + 2j, "text \\ud800", b"\\x00\\xff",
          [1, [2]], (1, (2,)), {"a": 1, 2: (3,)}, {1, 2}, frozenset({3}), [], (), {}, set()]
def check(candidate):
    for value in VALUES:
        got = candidate(value)
        assert got == value and type(got) is type(value), (value, got)
    assert math.isnan(candidate(float("nan")))
    assert str(candidate(-0.0)) == "-0.0"
    assert candidate(n=4) == 4
"""
    verdict = judged(tmp_path, "def total(n):\n    return n\n", source=source)
    assert verdict.passed, verdict.detail


def test_the_solution_s_traceback_is_shown(tmp_path: Path) -> None:
    verdict = judged(tmp_path, "def total(numbers):\n    return numbers[99]\n")
    assert not verdict.passed
    assert "IndexError" in verdict.detail
    assert "numbers[99]" in verdict.detail


@pytest.mark.parametrize(
    ("solution", "said"),
    [
        ("def total(n):\n    while True: pass", "timed out"),
        ("import time\ntime.sleep(1000)", "timed out"),
        ("def total(n):\n    import time; time.sleep(1000)", "timed out"),
    ],
    ids=["spins", "never loads", "sleeps"],
)
def test_time_is_the_policy_s_fault(tmp_path: Path, solution: str, said: str) -> None:
    verdict = judged(tmp_path, solution, timeout_seconds=1.0)
    assert not verdict.passed
    assert said in verdict.detail


@needs_root
@pytest.mark.root
def test_limits_of_the_solution_are_the_policy_s_fault(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path, "def total(n):\n    x = []\n    while 1: x.append(bytearray(1 << 20))"
    )
    assert not verdict.passed
    assert "memory" in verdict.detail


@pytest.mark.parametrize(
    ("source", "said"),
    [("def check(candidate:", "cannot be loaded"), ("x = 1", "define no check"),
     ("def check(candidate): candidate(object())", "cannot cross")],
)  # fmt: skip
def test_unusable_tests_are_nobody_s_score(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(ToolRefused, match=said):
        judged(tmp_path, RIGHT, source=source)


def test_a_judge_that_cannot_run_is_an_infrastructure_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_SCRIPTS", ("crossing.py",))
    with pytest.raises(BoxFailed, match="could not begin"):
        judged(tmp_path, RIGHT)


def test_tests_that_end_the_judge_never_become_a_verdict(tmp_path: Path) -> None:
    with pytest.raises(BoxFailed, match="without a verdict"):
        judged(tmp_path, RIGHT, source="import os\ndef check(candidate):\n    os._exit(0)")
