"""The public box API: the contract of a box without coordinator or ledger, used as anyone would."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import stoker
from stoker.errors import BadInput, BoxFailed, ConfigInvalid, IsolationUnavailable, ToolRefused
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Rung, Trust
from stoker.model.tools import OpenResult
from stoker.sandbox import alone
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.maker_client import MakerClient
from stoker.sandbox.namespace import NamespaceBackend
from stoker.testing.boxes import MemoryBackend
from support import sandbox
from support.sandbox import MARK, SMALL, needs_root, ordinary_output

SHARED = stoker.ExecutionPolicy(accept_shared_kernel=True, limits=SMALL)
TRUSTED = stoker.ExecutionPolicy(
    isolation=stoker.Isolation.PROCESS, trust=stoker.Trust.TRUSTED, limits=SMALL
)
UNPLACED = stoker.ExecutionPolicy(
    accept_shared_kernel=True,
    network=(stoker.Destination(host="api.example"),),
    credentials=(stoker.Credential(variable="KEY", host="other.example", file="/none"),),
)
TESTS = stoker.Tests(source="def check(f):\n    assert f(2) == 4\n", entry_point="double")

SCENARIO = """
import asyncio, sys
from pathlib import Path
import stoker
from stoker.sandbox.host import SandboxHost

async def scenario(state, policy):
    async with stoker.boxes(state) as boxes:
        async with boxes.box(policy, files={"in/a.txt": "one\\n"}) as box:
            seen = await box.run(
                ["python", "-c", "import sys; print(open('in/a.txt').read() + sys.stdin.read())"],
                timeout="20s", stdin="two",
            )
            assert seen.stdout.kept == b"one\\ntwo\\n", seen.text
            assert seen.ok and seen.usage.cpu_seconds > 0, seen
            late = await box.run(["sleep", "100"], timeout=0.2)
            assert late.timed_out and not late.ok, late
            told = await box.run(["sh", "-c", "echo x > b.txt; exit 3"])
            assert (told.exit_code, told.interrupted_before) == (3, True), told
            assert (await box.read_file("b.txt")).content == b"x\\n"
            await box.write_files({"solution.py": "def double(x):\\n    return x + x\\n"})
            assert set((await box.export()).files) == {"in/a.txt", "b.txt", "solution.py"}
            source = "def check(f):\\n    assert f(2) == 4\\n"
            assert (await box.score(stoker.Tests(source=source, entry_point="double"))).passed
            opened = box.opened
    async with SandboxHost.open(state) as host:
        assert host.leaked() == 0 and not host.ledger.records()
    return opened
"""


async def scenario(state: Path, policy: stoker.ExecutionPolicy) -> Any:
    names: dict[str, Any] = {}
    exec(SCENARIO, names)
    return await names["scenario"](state, policy)


@needs_root
@pytest.mark.root
def test_a_box_alone_keeps_the_contract_as_root(tmp_path: Path) -> None:
    opened = sandbox.run(lambda: scenario(tmp_path, SHARED))
    assert (opened.isolation, opened.rung) == ("namespace", Rung.ROOT.value)
    assert opened.baseline_digest


def test_a_box_alone_keeps_the_contract_for_an_ordinary_user() -> None:
    ask = """
policy = stoker.ExecutionPolicy(accept_shared_kernel=True)
print(asyncio.run(scenario(Path(sys.argv[1]), policy)).rung)
"""
    assert ordinary_output(SCENARIO + ask).split() == [b"c"]


def test_a_process_box_alone_is_for_trusted_work(tmp_path: Path) -> None:
    opened = sandbox.run(lambda: scenario(tmp_path, TRUSTED))
    assert opened.isolation == "process"


@pytest.mark.parametrize(
    ("policy", "options", "kind", "says"),
    [
        (stoker.ExecutionPolicy(), {}, IsolationUnavailable, "accept_shared_kernel"),
        ("namespace", {}, ConfigInvalid, "stoker.ExecutionPolicy"),
        (stoker.ExecutionPolicy(isolation="vm"), {}, ConfigInvalid, "isolation"),  # type: ignore[arg-type]
        (
            stoker.ExecutionPolicy(limits=stoker.Limits(memory_bytes="1GiB")),  # type: ignore[arg-type]
            {}, ConfigInvalid, "memory_bytes",
        ),
        (
            stoker.ExecutionPolicy(limits=stoker.Limits(cpu_seconds=0)),
            {}, ConfigInvalid, "limits.cpu_seconds is 0",
        ),
        (
            stoker.ExecutionPolicy(isolation=stoker.Isolation.MICROVM),
            {}, IsolationUnavailable, "isolation 'microvm'",
        ),
        (
            stoker.ExecutionPolicy(
                accept_shared_kernel=True, mounts=(stoker.Mount(source="here", target="/x"),)
            ),
            {}, ConfigInvalid, "absolute",
        ),
        (UNPLACED, {}, ConfigInvalid, "none of the destinations"),
        (TRUSTED, {"baseline": "ubuntu"}, ConfigInvalid, "no baseline 'ubuntu'"),
        (TRUSTED, {"files": {"../x": "1"}}, ToolRefused, "leaves the workspace"),
        (TRUSTED, {"files": {"x": 1}}, ToolRefused, "text or bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_given_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, policy: Any, options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    async def body() -> str:
        async with stoker.boxes(tmp_path) as boxes:
            with pytest.raises(kind) as refused:
                async with boxes.box(policy, **options):
                    raise AssertionError("it was given")
            return str(refused.value)

    said = sandbox.run(body)
    assert says in said
    assert "\n" not in said
    assert not list((tmp_path / "boxes").iterdir())


def test_what_cannot_be_run_is_refused_and_the_box_goes_on(tmp_path: Path) -> None:
    async def body() -> None:
        async with stoker.boxes(tmp_path) as boxes, boxes.box(TRUSTED) as box:
            for argv, options in (
                ("echo", {}),
                ([], {}),
                (["true"], {"timeout": "soon"}),
                (["true"], {"timeout": -1}),
                (["true"], {"stdin": 5.0}),
                (["true"], {"directory": "../.."}),
                (["true"], {"environment": {"A=B": "c"}}),
            ):
                with pytest.raises(ToolRefused, match="nothing was run"):
                    await box.run(argv, **options)
            with pytest.raises(ToolRefused, match="nothing was graded"):
                await box.score("assert True")  # type: ignore[arg-type]
            assert (await box.run(["true"])).ok
        with pytest.raises(BoxFailed, match="being removed"):
            await box.run(["true"])

    sandbox.run(body)


def test_a_box_alone_is_branched_and_kept(tmp_path: Path) -> None:
    async def body() -> None:
        async with stoker.boxes(tmp_path / "state") as boxes:
            async with boxes.box(TRUSTED, files={"a": "1"}) as box:
                one, two = await box.branch(2)
                assert one.began is not None
                assert (one.began.generation, one.began.parent) == (1, box.opened.baseline_digest)
                await one.write_files({"a": "2"})
                (three,) = await one.branch()
                read = [(await of.read_file("a")).content for of in (box, two, three)]
                assert read == [b"1", b"1", b"2"]
                await one.remove()
                with pytest.raises(BoxFailed, match="being removed"):
                    await three.read_file("a")
                saved = await two.checkpoint(tmp_path)
                with pytest.raises(ToolRefused, match="a number from 1"):
                    await box.branch(0)
            async with boxes.box(TRUSTED, checkpoint=saved) as back:
                assert (await back.read_file("a")).content == b"1"
        state = tmp_path / "state"
        assert [*(state / "boxes").iterdir(), *(state / "work").iterdir()] == []

    sandbox.run(body)


def test_cancelling_kills_the_work_and_removes_the_box(tmp_path: Path) -> None:
    async def body() -> None:
        reached = asyncio.Event()

        async def work() -> None:
            async with stoker.boxes(tmp_path) as boxes, boxes.box(TRUSTED) as box:
                reached.set()
                await box.run(["sh", "-c", f"trap '' TERM; sleep {MARK}"], timeout="10m")

        task = asyncio.ensure_future(work())
        await reached.wait()
        while not sandbox.marked_pids():
            assert not task.done()
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # somebody in a hurry
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sandbox.marked_pids() == []
        assert not list((tmp_path / "boxes").iterdir())
        async with SandboxHost.open(tmp_path) as host:
            assert host.leaked() == 0

    sandbox.run(body)


def test_what_a_dead_process_left_is_swept_and_the_living_are_not(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
from pathlib import Path
import stoker
async def main():
    policy = stoker.ExecutionPolicy(isolation="process", trust="trusted")
    async with stoker.boxes(Path(sys.argv[1])) as boxes, boxes.box(policy) as box:
        run = asyncio.ensure_future(box.run(
            ["sh", "-c", "echo x > started; (setsid sleep {MARK} &); sleep {MARK}"], timeout="1h"))
        while not (await box.read_file("started")).content:
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        await run
asyncio.run(main())
"""

    @contextlib.contextmanager
    def holder() -> Any:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdout is not None
        with process.stdout:
            try:
                assert process.stdout.readline() == b"ready\n"
                yield process
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait(30)

    async def body() -> None:
        async with stoker.boxes(tmp_path) as boxes, boxes.box(TRUSTED) as box:
            assert len(list((tmp_path / "boxes").glob("*.json"))) == expected
            assert (await box.run(["true"])).ok

    with holder(), holder() as one:
        one.send_signal(signal.SIGKILL)
        one.wait(30)
        assert len(list((tmp_path / "boxes").glob("*.json"))) == 2
        expected = 2  # the living one's and ours: the dead one's is gone
        sandbox.run(body)
        assert sandbox.marked_pids()
    expected = 1
    sandbox.run(body)
    assert sandbox.marked_pids() == []


def test_boxes_open_at_once_share_a_helper_and_the_last_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "_ROOT_STATE", tmp_path / "state")
    if not sandbox.ROOT:
        monkeypatch.setattr(alone, "_state_directory", lambda _: tmp_path)
    helpers: list[MakerClient] = []
    start = MakerClient.start

    def counted() -> MakerClient:
        helpers.append(start())
        return helpers[-1]

    monkeypatch.setattr(MakerClient, "start", counted)

    async def one(barrier: asyncio.Barrier) -> str:
        async with stoker.box(TRUSTED) as box:
            await barrier.wait()
            seen = await asyncio.gather(*(box.run(["echo", str(n)]) for n in range(3)))
            assert [s.stdout.kept for s in seen] == [b"0\n", b"1\n", b"2\n"]
            return box.box_id

    async def body() -> None:
        barrier = asyncio.Barrier(4)
        names = await asyncio.gather(*(one(barrier) for _ in range(4)))
        assert len(set(names)) == 4
        assert len(helpers) == 1
        assert helpers[0].dead
        assert await one(asyncio.Barrier(1))
        assert len(helpers) == 2

    sandbox.run(body)


def test_a_refusal_of_one_box_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "boxes", None)

    async def body() -> None:
        with pytest.raises(BadInput):
            async with stoker.box(baseline="ubuntu"):
                raise AssertionError("it was given")

    sandbox.run(body)


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state").chmod(0o777)

    async def body() -> None:
        with pytest.raises(IsolationUnavailable, match="only this user can change"):
            async with stoker.boxes(tmp_path / "state"):
                raise AssertionError("it was used")

    sandbox.run(body)


def test_the_canary_decides_for_a_box_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_offer(self: NamespaceBackend) -> Any:
        found = await offer(self)
        return type(found)(
            isolation=found.isolation, rung=found.rung, available=False, shared_kernel=True,
            missing="it did not hold", remedy="another host",
        )  # fmt: skip

    offer = NamespaceBackend.offer
    monkeypatch.setattr(NamespaceBackend, "offer", no_offer)

    async def body() -> None:
        async with stoker.boxes(tmp_path) as boxes:
            with pytest.raises(IsolationUnavailable, match="it did not hold"):
                async with boxes.box(replace(SHARED, isolation=Isolation.NAMESPACE)):
                    raise AssertionError("it was given")

    sandbox.run(body)


def test_a23_a_box_that_is_lost_is_an_error_and_no_result() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        made = await backend.create("box_one", Baseline(), ExecutionPolicy(trust=Trust.TRUSTED))
        opened = OpenResult(isolation="qemu", rung="a", baseline_digest="")
        box = alone.OpenBox(made, backend, opened)
        assert (await box.run(["echo", "x"])).ok
        with pytest.raises(BoxFailed, match="was lost"):
            await box.run(["vanish"])

    asyncio.run(body())
