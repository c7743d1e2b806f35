"""A real program host: load, run, replay, local calls, stuck programs, eviction, and its end."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from stoker.errors import HostLost, ProgramInvalid
from stoker.model.events import Verb
from stoker.model.ids import CallPath, RolloutId
from stoker.model.task import Task
from stoker.model.value import canonical_bytes
from stoker.rollout.hosts import HostProcess, inspect_program
from stoker.rollout.messages import (
    Deliver,
    Differed,
    Evict,
    FromHost,
    Loaded,
    LoadFailed,
    LocalDone,
    RecordedResult,
    StartRollout,
    Stuck,
    Turn,
)
from stoker.rollout.program import load_program
from stoker.testing.driver import record_turn

T = TypeVar("T", bound=FromHost)
WAIT_SECONDS = 30.0

PROGRAM = '''
import os
import re
import sys
import time

import stoker

print("loading \\x1b[31m loudly")


@stoker.rollout(version="7", boxes=3, timeout="2m")
async def program(ctx: stoker.Context, task: stoker.Task) -> float:
    """Does what its task says."""
    doing = task.data["do"]
    if doing == "block":
        await ctx.sleep(1)
        time.sleep(3600)
    if doing == "spin":
        await ctx.sleep(1)
        while True:
            try:
                await ctx.sleep(1)
            except BaseException:
                pass
    if doing == "hold":
        await ctx.sleep(1)
        re.match("(a+)+$", "a" * 60 + "b")  # for ever, with the interpreter lock held
    if doing == "die":
        os._exit(3)
    if doing == "exit":
        sys.exit("bye")
    if doing == "local":
        got = await ctx.local(os.path.basename, "a/b.txt")
        await ctx.call([got])
    if doing == "impure":
        await ctx.call([str(time.time_ns())])
    if doing == "big":
        return await ctx.local(bytes, 40_000_000)
    if doing == "sets":
        await ctx.call(list({"alpha", "beta", "gamma", "delta", "epsilon"}))
    await ctx.sleep(5)
    return 1.0
'''


class Talk:
    """A host and what it said."""

    def __init__(self, host: HostProcess) -> None:
        self.host = host
        self._messages: AsyncIterator[FromHost] = host.messages()

    async def next(self, kind: type[T]) -> T:
        message = await asyncio.wait_for(anext(self._messages), WAIT_SECONDS)
        assert isinstance(message, kind), message
        return message

    async def ended(self) -> None:
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(self._messages), WAIT_SECONDS)


def start_of(doing: str, name: str = "rol_1", **more: Any) -> StartRollout:
    return StartRollout(
        rollout_id=RolloutId(name),
        task=Task(task_id="t", data={"do": doing}),
        epoch="e",
        index=0,
        group_id="g",
        at=1.0,
        **more,
    )


def result_for(path: str, name: str = "rol_1", value: bytes | None = None) -> Deliver:
    return Deliver(rollout_id=RolloutId(name), path=CallPath(path), value=value, fault=None, at=2.0)


def descriptors(pid: int) -> list[str]:
    return [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Run a conversation with a fresh host; nothing of it is left afterwards."""
    path = tmp_path / "programs.py"
    path.write_text(PROGRAM)

    def conversation(talk_to: Callable[[Talk], Coroutine[Any, Any, None]], **options: Any) -> None:
        async def whole() -> None:
            log = tmp_path / "host.log"
            async with await HostProcess.start(path, log=log, **options) as host:
                await talk_to(Talk(host))
            assert host.returncode is not None

        asyncio.run(whole())

    return conversation


def test_a_host_loads_runs_and_stops(run: Callable[..., None]) -> None:
    async def talk_to(talk: Talk) -> None:
        loaded = await talk.next(Loaded)
        assert (loaded.name, loaded.version, loaded.boxes) == ("program", "7", 3)
        assert (loaded.timeout_seconds, loaded.hash_seed) == (120.0, 11)
        assert loaded.pid == talk.host.pid
        assert len(loaded.source_digest) == 64
        talk.host.send(start_of("nothing"))
        turn = await talk.next(Turn)
        assert [(call.path, call.verb) for call in turn.calls] == [("0", Verb.SLEEP)]
        talk.host.send(result_for("0"))
        turn = await talk.next(Turn)
        assert turn.outcome is not None
        assert turn.outcome.reward == 1.0
        assert "\x1b" not in talk.host.log_tail()
        assert "loading \\x1b[31m loudly" in talk.host.log_tail()
        await talk.host.stop()
        assert talk.host.returncode == 0

    run(talk_to, hash_seed=11)


def test_the_same_hash_seed_gives_the_same_set_order_on_another_host(
    run: Callable[..., None],
) -> None:
    digests: list[str] = []

    async def talk_to(talk: Talk) -> None:
        await talk.next(Loaded)
        talk.host.send(start_of("sets"))
        digests.append((await talk.next(Turn)).calls[0].digest)

    for hash_seed in (5, 5, 6, 7, 8):
        run(talk_to, hash_seed=hash_seed)
    assert digests[0] == digests[1]
    assert len(set(digests)) > 1, "the seed decides the order"


def test_replay_on_another_host_goes_on_where_it_stood(run: Callable[..., None]) -> None:
    history: list[Any] = []

    async def first_half(talk: Talk) -> None:
        await talk.next(Loaded)
        talk.host.send(start_of("local"))
        history.append(record_turn(await talk.next(Turn), None))
        done = await talk.next(LocalDone)
        assert msgspec.msgpack.decode(done.value or b"") == "b.txt"
        talk.host.send(result_for(done.path, value=done.value))
        result = RecordedResult(path=done.path, value=done.value, fault=None, at=2.0)
        history.append(record_turn(await talk.next(Turn), result))

    async def second_half(talk: Talk) -> None:
        await talk.next(Loaded)
        talk.host.send(start_of("local", history=tuple(history)))
        stood = await talk.next(Turn)
        assert (stood.calls, stood.outcome) == ((), None)
        talk.host.send(result_for("1", value=canonical_bytes({"value": None})))
        turn = await talk.next(Turn)
        assert [call.path for call in turn.calls] == ["2"]

    run(first_half)
    run(second_half)


def test_a_local_call_in_flight_at_a_crash_is_run_again(run: Callable[..., None]) -> None:
    history: list[Any] = []

    async def before(talk: Talk) -> None:
        await talk.next(Loaded)
        talk.host.send(start_of("local"))
        history.append(record_turn(await talk.next(Turn), None))

    async def after(talk: Talk) -> None:
        await talk.next(Loaded)
        talk.host.send(start_of("local", history=tuple(history)))
        await talk.next(Turn)
        assert (await talk.next(LocalDone)).path == "0"

    run(before)
    run(after)


def test_c6_wall_time_differs_on_replay_and_the_host_lives(run: Callable[..., None]) -> None:
    async def talk_to(talk: Talk) -> None:
        await talk.next(Loaded)
        talk.host.send(start_of("impure"))
        recorded = record_turn(await talk.next(Turn), None)
        talk.host.send(start_of("impure", history=(recorded,)))
        differed = await talk.next(Differed)
        assert differed.fault.code == "non_deterministic"
        assert "programs.py:" in differed.fault.message
        talk.host.send(start_of("nothing", "rol_2"))
        assert (await talk.next(Turn)).rollout_id == "rol_2"

    run(talk_to)


@pytest.mark.parametrize("doing", ["block", "spin"])
def test_c6_the_watchdog_names_the_line_that_holds_the_host(
    run: Callable[..., None], doing: str
) -> None:
    async def talk_to(talk: Talk) -> None:
        await talk.next(Loaded)
        talk.host.send(start_of(doing))
        await talk.next(Turn)
        if doing == "block":
            talk.host.send(result_for("0"))
        else:
            talk.host.send(result_for("0"))
            await talk.next(Turn)
            talk.host.send(Evict(rollout_id=RolloutId("rol_1")))  # its guarded close never ends
        stuck = await talk.next(Stuck)
        assert stuck.rollout_id == "rol_1"
        assert stuck.seconds >= 0.3
        assert stuck.where.startswith("programs.py:")
        assert stuck.where.endswith("in program")
        talk.host.kill()
        await talk.ended()
        assert await talk.host.wait() == -signal.SIGKILL

    run(talk_to, stuck_seconds=0.3)


def test_c6_a_program_that_holds_the_interpreter_is_found_by_its_silence(
    run: Callable[..., None],
) -> None:
    async def talk_to(talk: Talk) -> None:
        await talk.next(Loaded)
        talk.host.send(start_of("hold"))
        await talk.next(Turn)
        talk.host.send(result_for("0"))
        stuck = await talk.next(Stuck)
        assert stuck.rollout_id == "rol_1"
        assert stuck.where.startswith("programs.py:")
        assert talk.host.returncode is None, "ending it is the reader's decision"

    run(talk_to, stuck_seconds=0.2)


def test_a_host_that_was_stopped_is_found_by_its_silence(run: Callable[..., None]) -> None:
    async def talk_to(talk: Talk) -> None:
        await talk.next(Loaded)
        os.kill(talk.host.pid, signal.SIGSTOP)
        talk.host.send(start_of("nothing"))
        stuck = await talk.next(Stuck)
        assert stuck.rollout_id == "rol_1"
        os.kill(talk.host.pid, signal.SIGCONT)
        await talk.next(Turn)

    run(talk_to, stuck_seconds=0.2)


def test_evicting_is_silent_and_the_rollout_can_be_rebuilt(run: Callable[..., None]) -> None:
    async def talk_to(talk: Talk) -> None:
        await talk.next(Loaded)
        talk.host.send(start_of("nothing"))
        recorded = record_turn(await talk.next(Turn), None)
        talk.host.send(Evict(rollout_id=RolloutId("rol_1")))
        talk.host.send(Evict(rollout_id=RolloutId("rol_unknown")))
        talk.host.send(start_of("nothing", history=(recorded,)))
        assert (await talk.next(Turn)).calls == ()
        talk.host.send(result_for("0"))
        assert (await talk.next(Turn)).outcome is not None

    run(talk_to)


def test_a_program_that_ends_the_process_ends_the_messages(run: Callable[..., None]) -> None:
    async def talk_to(talk: Talk) -> None:
        await talk.next(Loaded)
        talk.host.send(start_of("die"))
        await talk.ended()
        assert await talk.host.wait() == 3

    run(talk_to)


def test_c6_sys_exit_in_a_program_is_its_outcome_and_the_host_lives(
    run: Callable[..., None],
) -> None:
    async def talk_to(talk: Talk) -> None:
        await talk.next(Loaded)
        talk.host.send(start_of("exit"))
        turn = await talk.next(Turn)
        assert turn.outcome is not None
        assert turn.outcome.fault is not None
        assert "SystemExit" in turn.outcome.fault.message
        talk.host.send(start_of("nothing", "rol_2"))
        await talk.next(Turn)

    run(talk_to)


def test_a_local_result_over_the_bound_is_a_fault_of_that_call(run: Callable[..., None]) -> None:
    async def talk_to(talk: Talk) -> None:
        await talk.next(Loaded)
        talk.host.send(start_of("big"))
        await talk.next(Turn)
        done = await talk.next(LocalDone)
        assert done.fault is not None
        assert done.fault.code == "local_raised"
        assert "40000005 bytes" in done.fault.message

    run(talk_to)


def test_a_host_inherits_no_unrelated_descriptor(run: Callable[..., None]) -> None:
    async def talk_to(talk: Talk) -> None:
        await talk.next(Loaded)
        targets = descriptors(talk.host.pid)
        assert not any("secret" in target for target in targets)
        assert sum(target.startswith("socket:") for target in targets) == 1

    with Path("/dev/shm/secret-of-the-test").open("w+b") as secret:
        os.unlink(secret.name)  # noqa: PTH108
        os.set_inheritable(secret.fileno(), True)
        run(talk_to)


def test_a_host_ends_with_its_coordinator(tmp_path: Path) -> None:
    """The parent is killed; the host, busy in a program, goes with it."""
    path = tmp_path / "programs.py"
    path.write_text(PROGRAM)
    code = f"""
import asyncio
from pathlib import Path
from stoker.rollout.hosts import HostProcess

async def main():
    host = await HostProcess.start(Path({str(path)!r}), log=Path({str(tmp_path / "log")!r}))
    async for message in host.messages():
        print(host.pid, flush=True)

asyncio.run(main())
"""

    async def whole() -> None:
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        pid = int(await asyncio.wait_for(parent.stdout.readline(), WAIT_SECONDS))
        pidfd = os.pidfd_open(pid)
        parent.kill()
        await parent.wait()
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, gone.set)
        await asyncio.wait_for(gone.wait(), WAIT_SECONDS)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)

    asyncio.run(whole())


# --- loading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import stoker\n\ndef f(:\n", "p.py:3"),
        ("import stoker\n\n\n1 / 0\n", "p.py:4: loading the program raised ZeroDivisionError"),
        ("x = 1\n", "no function is decorated"),
        ("import stoker\n@stoker.rollout\ndef f(ctx, task): ...\n", "async"),
        ("import stoker\n@stoker.rollout\nasync def f(ctx): ...\n", "takes (ctx, task)"),
        ("import stoker\n@stoker.rollout(timeout='soon')\nasync def f(c, t): ...\n", "soon"),
        (
            "import stoker\n\n"
            + "".join(f"@stoker.rollout\nasync def {name}(c, t): ...\n" for name in "fg"),
            "holds ['f', 'g']",
        ),
        ("import sys\nsys.exit(4)\n", "SystemExit"),
        ("import stoker\n@stoker.tool\ndef t(timeout): ...\n", "'timeout'"),
    ],
)
def test_a_program_that_cannot_be_loaded_says_file_and_line(
    tmp_path: Path, source: str, says: str
) -> None:
    path = tmp_path / "p.py"
    path.write_text(source)
    with pytest.raises(ProgramInvalid) as raised:
        load_program(path)
    assert says in raised.value.message
    assert "p.py" in raised.value.message


def test_a_missing_program_and_an_unknown_name_are_said(tmp_path: Path) -> None:
    with pytest.raises(ProgramInvalid, match="no such program file"):
        asyncio.run(inspect_program(tmp_path / "none.py", log=tmp_path / "log"))
    path = tmp_path / "p.py"
    path.write_text("import stoker\n@stoker.rollout(name='x')\nasync def f(ctx, task): ...\n")
    with pytest.raises(ProgramInvalid, match=r"no rollout is called 'f'; it holds \['x'\]"):
        asyncio.run(inspect_program(path, log=tmp_path / "log", name="f"))
    assert asyncio.run(inspect_program(path, log=tmp_path / "log")).name == "x"


def test_a_program_that_ends_its_process_while_loading_is_host_lost(tmp_path: Path) -> None:
    path = tmp_path / "p.py"
    path.write_text("import os\nprint('last words', flush=True)\nos._exit(9)\n")
    with pytest.raises(HostLost, match="last words"):
        asyncio.run(inspect_program(path, log=tmp_path / "log"))


def test_load_failed_comes_as_a_message_too(tmp_path: Path) -> None:
    path = tmp_path / "p.py"
    path.write_text("raise ValueError('no')\n")

    async def whole() -> None:
        async with await HostProcess.start(path, log=tmp_path / "log") as host:
            message = await Talk(host).next(LoadFailed)
            assert "p.py:1" in message.message

    asyncio.run(whole())
