"""Modules that a warm box's interpreter imports ahead, and those it cannot."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from security.test_warm import LOADED, WARM, in_warm_box, result_of
from stoker.config.classes import WorkerClassSettings
from stoker.errors import BoxFailed
from stoker.sandbox.local import LocalBox
from stoker.sandbox.maker_client import MakerClient
from stoker.sandbox.warm import Plan, WarmServer
from support.sandbox import needs_root

INSIDE = Path(__file__).parents[2] / "src/stoker/sandbox/inside"
KEPT = (
    "import threading\nstop = threading.Event()\n"
    "t = threading.Thread(target=stop.wait)\nt.start()\n"
)
ENDS = KEPT + "import os\nos.register_at_fork(before=lambda: (stop.set(), t.join()))\n"


@needs_root
@pytest.mark.root
def test_modules_are_there_before_a_program_and_share_no_chance(tmp_path: Path) -> None:
    async def body(box: LocalBox) -> None:
        argv = ("python", "-c", "import sys; print('decimal' in sys.modules)")
        assert (await result_of(box, argv)).text == "True"
        chance = ("python", "-c", "import random; print(random.random())")
        assert len({(await result_of(box, chance)).text for _ in range(3)}) == 3
        assert box.server is not None
        assert box.server.without == ()

    in_warm_box(tmp_path, body, LOADED)


@needs_root
@pytest.mark.root
def test_a_module_that_cannot_be_imported_is_said_once_and_the_others_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(box: LocalBox) -> None:
        argv = ("python", "-c", "import sys; print('decimal' in sys.modules)")
        for _ in range(2):
            assert (await result_of(box, argv)).text == "True"
            assert box.server is not None
            await box.server.close()

    policy = msgspec.structs.replace(WARM, preload=("nothing_here", "decimal"))
    in_warm_box(tmp_path, body, policy)
    assert [r.getMessage() for r in caplog.records if "preload" in r.getMessage()] == [
        (
            "boxes are warm without preload nothing_here: ModuleNotFoundError: "
            "No module named 'nothing_here'"
        )
    ]


@needs_root
@pytest.mark.root
def test_where_no_server_comes_up_with_modules_boxes_are_warm_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, ...]] = []
    start = WarmServer.start

    async def refusing(maker: MakerClient, plan: Plan) -> WarmServer:
        tried.append(plan.preload)
        server = await start(maker, plan)
        if plan.preload:
            await server.close()
            raise BoxFailed("the box's server did not come up (a module keeps a thread)")
        return server

    monkeypatch.setattr(WarmServer, "start", refusing)

    async def body(box: LocalBox) -> None:
        for _ in range(2):
            assert (await result_of(box, ("python", "-c", "print(1)"))).ok
            assert box.server is not None
            await box.server.close()

    in_warm_box(tmp_path, body, msgspec.structs.replace(WARM, preload=("decimal",)))
    assert tried == [("decimal",), (), ()]
    assert "warm without preload decimal" in caplog.text


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("x = 1\n", 0, "[]"),
        (ENDS, 0, "[]"),
        ("raise SystemExit(5)\n", 0, "['made: SystemExit: 5']"),
        ("1 / 0\n", 0, "['made: ZeroDivisionError: division by zero']"),
        (KEPT, 1, "made keeps a thread, which a forked program would not have"),
        ("f = open('/dev/null')\n", 1, "made keeps a file open, which a forked program would not"),
    ],
    ids=["plain", "a thread that ends at a fork", "exits", "raises", "a thread", "a file"],
)
def test_a_module_that_a_fork_would_break_is_refused(
    tmp_path: Path, source: str, code: int, said: str
) -> None:
    (tmp_path / "made.py").write_text(source)
    script = (
        f"import sys, os; sys.path[:0] = [{str(INSIDE)!r}, {str(tmp_path)!r}]\n"
        "import stoker_program\n"
        "print(stoker_program.load_ahead(['made']), flush=True); os._exit(0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, said in ran.stdout + ran.stderr) == (code, True), ran


def test_numpy_bears_a_fork_and_gives_each_program_chance_of_its_own() -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(INSIDE)!r})
import stoker_program
failed = stoker_program.load_ahead(["numpy.random"])
print(failed, len(os.listdir("/proc/self/task")), flush=True)
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        stoker_program.seed_anew()
        import numpy
        ones = numpy.ones((300, 300))
        print((ones @ ones)[0, 0], numpy.random.rand(), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    first, *said = ran.stdout.splitlines()
    assert first == "[] 1"
    assert [line.split()[0] for line in said] == ["300.0", "300.0"]
    assert len(set(said)) == 2


def test_only_a_warm_class_may_load_modules_ahead_and_they_are_names() -> None:
    made = WorkerClassSettings(warm=True, preload=("numpy.random",))
    assert made.policy(accept_shared_kernel=True).preload == ("numpy.random",)
    plain = WorkerClassSettings(warm=True).policy(accept_shared_kernel=True)
    assert plain.preload is msgspec.UNSET
    with pytest.raises(ValueError, match="preload needs warm = true"):
        WorkerClassSettings(preload=("numpy",))
    with pytest.raises(ValueError, match="should match pattern"):
        WorkerClassSettings(warm=True, preload=("numpy,os",))
