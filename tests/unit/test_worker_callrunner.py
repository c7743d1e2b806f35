import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ToolRefused
from stoker.model.execution import ExecutionPolicy, Isolation
from stoker.model.tools import CallRequest
from stoker.worker import callrunner, calls
from support.worker_boxes import make_action, module_file

RUNNER = Path(callrunner.__file__)


def ask(directory: Path, source: str, **arguments: object) -> tuple[dict[str, Any], bytes]:
    """Run ``tool`` of ``source`` as a box would; return its answer and its own stdout."""
    module = module_file(directory, source)
    order = {
        "module": str(module),
        "function": "tool",
        "arguments": arguments,
        "answer": "answer.json",
        "paths": [],
    }
    ran = subprocess.run(
        [sys.executable, "-I", "-S", str(RUNNER)],
        input=json.dumps(order).encode(),
        cwd=directory,
        capture_output=True,
        timeout=60,
        check=False,
    )
    answer = directory / "answer.json"
    return (json.loads(answer.read_text()) if answer.exists() else {}), ran.stdout


def test_a_function_is_called_with_keywords_and_its_output_stays_its_own(tmp_path: Path) -> None:
    source = "def tool(a, b):\n    print('said')\n    return {'sum': a + b}\n"
    assert ask(tmp_path, source, a=1, b=2) == ({"value": {"sum": 3}}, b"said\n")


def test_an_asynchronous_function_is_awaited(tmp_path: Path) -> None:
    answer, _ = ask(tmp_path, "async def tool():\n    return 'late'\n")
    assert answer == {"value": "late"}


def test_what_lies_beside_the_file_can_be_imported(tmp_path: Path) -> None:
    module_file(tmp_path, "NUMBER = 7\n", "beside_it.py")
    answer, _ = ask(tmp_path, "import beside_it\ndef tool():\n    return beside_it.NUMBER\n")
    assert answer == {"value": 7}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise ValueError('no')", "ValueError: no"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("return float('nan')", "not JSON"),
        ("return {1, 2}", "not JSON"),
        ("x = []; x.append(x); return x", "not JSON"),
        ("return 'x' * 17_000_000", "bytes of JSON, over"),
        ("raise ValueError('x' * 1_000_000)", "ValueError: xxx"),
    ],
)
def test_a25_an_error_or_an_unusable_result_is_text(tmp_path: Path, body: str, error: str) -> None:
    answer, _ = ask(tmp_path, f"def tool():\n    {body}\n")
    assert error in answer["error"]
    assert len(answer["error"]) <= callrunner.TEXT_MAX


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        ("import stoker\n    raise stoker.TooManyRequests(retry_after=2.5)", 2.5),
        ("import stoker\n    raise stoker.TooManyRequests", 0.0),
        ("e = Exception(); e.response = R(429, {'Retry-After': '7'}); raise e", 7.0),
        ("e = Exception(); e.code = 429; e.headers = {'Retry-After': 'soon'}; raise e", 0.0),
        ("e = Exception(); e.status = 429; e.retry_after = float('inf'); raise e", 0.0),
        ("e = Exception(); e.response = R(429, {'Retry-After': LATER}); raise e", 3600.0),
        ("e = Exception(); e.response = R(503, {'Retry-After': '7'}); raise e", None),
        ("raise ValueError('429')", None),
        (
            "class Odd(Exception):\n        response = property(lambda s: 1 / 0)\n    raise Odd",
            None,
        ),
    ],
)
def test_a_refusal_of_a_remote_service_is_known_by_its_shape(
    tmp_path: Path, body: str, waits: float | None
) -> None:
    source = f"""
import email.utils, time
LATER = email.utils.formatdate(time.time() + 3600, usegmt=True)
class R:
    def __init__(self, status, headers):
        self.status_code, self.headers = status, headers
    def __bool__(self):
        return False  # as a refused response of `requests` is
def tool():
    {body}
"""
    answer = ask(tmp_path, source)[0]
    found = answer["throttled_seconds"]
    assert answer["error"]
    assert found == (waits if waits is None else pytest.approx(waits, abs=120 * (waits > 100)))


def test_a_module_or_function_that_is_not_there_is_an_error_as_text(tmp_path: Path) -> None:
    assert "SyntaxError" in ask(tmp_path, "def tool(:\n")[0]["error"]
    assert "AttributeError" in ask(tmp_path, "x = 1\n")[0]["error"]


def test_a_tool_that_ends_its_process_leaves_no_answer(tmp_path: Path) -> None:
    assert ask(tmp_path, "import os\ndef tool():\n    os._exit(0)\n")[0] == {}


def test_the_decorator_costs_no_package(tmp_path: Path) -> None:
    source = """
import sys
import stoker

@stoker.tool(effect="idempotent", timeout="5s")
def tool(x: "int | stoker.Score") -> int:
    return sorted(name for name in sys.modules if name.startswith(("stoker", "msgspec")))

@stoker.rollout
async def program(ctx: stoker.Context, task: stoker.Task | None = None) -> stoker.Score: ...
"""
    assert ask(tmp_path, source, x=1)[0] == {"value": ["stoker"]}


def test_whoever_needs_the_package_gets_it(tmp_path: Path) -> None:
    source = """
import stoker
from stoker.model.tools import RunResult

class Mine(stoker.StokerError):
    pass

@stoker.tool
def tool():
    try:
        raise Mine("x")
    except stoker.StokerError as error:
        return [error.message, stoker.RunResult is RunResult, RunResult(exit_code=0).ok,
                isinstance(RunResult(), stoker.RunResult)]
"""
    assert ask(tmp_path, source)[0] == {"value": ["x", True, True, True]}


def test_the_plan_for_a_process_box_uses_this_interpreter(tmp_path: Path) -> None:
    module = module_file(tmp_path, "def tool(): ...\n")
    request = CallRequest(module=str(module), function="tool", arguments={"a": [1]}, key="k")
    plan = calls.plan(
        request,
        make_action("call", request),
        2,
        policy=ExecutionPolicy(),
        isolation=Isolation.PROCESS,
    )
    assert plan.run.argv == (sys.executable, "-I", "-S", str(RUNNER))
    assert plan.run.environment == {"STOKER_ACTION_KEY": "k", "STOKER_ATTEMPT": "2"}
    assert json.loads(plan.run.stdin)["arguments"] == {"a": [1]}
    assert not plan.policy.mounts


def test_the_plan_for_a_namespace_mounts_read_only_what_the_box_can_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_file(tmp_path, "def tool(): ...\n")
    request = CallRequest(module=str(module), function="tool")
    action = make_action("call", request)
    monkeypatch.setattr(calls, "reachable", lambda path: True)
    plan = calls.plan(request, action, 1, policy=ExecutionPolicy(), isolation=Isolation.NAMESPACE)
    assert str(tmp_path) in {mount.source for mount in plan.policy.mounts}
    assert not any(mount.writable for mount in plan.policy.mounts)
    assert json.loads(plan.run.stdin)["module"] == f"/opt/stoker-call/tool/{module.name}"

    monkeypatch.setattr(calls, "reachable", lambda path: False)
    alone = calls.plan(request, action, 1, policy=ExecutionPolicy(), isolation=Isolation.NAMESPACE)
    assert not alone.policy.mounts
    assert alone.files[f".stoker-tool/{module.name}"] == module.read_bytes()


@pytest.mark.parametrize(
    "request_",
    [
        CallRequest(),
        CallRequest(module="/nowhere/tool.py", function="tool"),
        CallRequest(module=__file__, function="tool", arguments={"x": float("nan")}),
    ],
)
def test_a_call_that_cannot_be_carried_out_is_refused(request_: CallRequest) -> None:
    action = make_action("call", b"")
    with pytest.raises(ToolRefused):
        calls.plan(request_, action, 1, policy=ExecutionPolicy(), isolation=Isolation.PROCESS)


def test_an_error_names_the_innermost_line_of_the_tools_own_file(tmp_path: Path) -> None:
    body = "import json\n\ndef tool():\n    return json.loads('{')\n"
    assert ask(tmp_path, body)[0]["error"].endswith("tools_under_test.py:4)")
    assert ask(tmp_path, "\n1 / 0\n")[0]["error"].endswith("tools_under_test.py:2)")
