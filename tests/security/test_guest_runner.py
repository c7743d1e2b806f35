"""The guest runner, tried without a guest (CASES A1-A4, A8-A12, A14, A26, and channels)."""

import asyncio
import os
import socket
from pathlib import Path
from typing import NoReturn

import pytest

from stoker.sandbox.guest.action import Action, Bounds
from stoker.sandbox.guest.counters import Counters, Descendants
from stoker.sandbox.vm.link import GuestLink, GuestRun
from stoker.seams.clock import SystemClock
from support import attacks, sandbox
from support.guests import PATIENCE, order, runner

CAP = 64 * 1024


def ran(workspace: Path, *argv: str, stdin: bytes = b"", **bounds: float) -> GuestRun:
    async def body() -> GuestRun:
        async with runner(workspace) as link:
            return await link.run(order(*argv, **bounds), stdin)  # type: ignore[arg-type]

    return sandbox.run(body)


def test_an_ending_and_both_streams_are_told(tmp_path: Path) -> None:
    run = ran(tmp_path, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (run.stdout, run.stderr) == (b"out\n", b"err\n")
    assert os.waitstatus_to_exitcode(run.ended.status) == 3
    assert (run.ended.stdout, run.ended.stderr, run.ended.reason) == (4, 4, "")


@pytest.mark.parametrize(
    "argv", [attacks.BACKGROUND_CHILD, attacks.TWICE_FORKED], ids=["background", "twice forked"]
)
def test_a1_a2_what_a_program_leaves_is_dead_and_holds_nothing(
    tmp_path: Path, argv: attacks.Command
) -> None:
    run = ran(tmp_path, *argv)
    assert os.waitstatus_to_exitcode(run.ended.status) == 0
    assert b"late" not in run.stdout
    assert sandbox.marked_pids() == []


@pytest.mark.parametrize(
    "argv", [attacks.IGNORES_TERM, attacks.STOPS_ITSELF], ids=["ignores SIGTERM", "stops itself"]
)
def test_a3_the_wall_deadline_holds(tmp_path: Path, argv: attacks.Command) -> None:
    run = ran(tmp_path, *argv, timeout=0.3)
    assert (run.ended.reason, run.ended.stopped) == ("timeout", True)
    assert sandbox.marked_pids() == []


@pytest.mark.parametrize("script", [attacks.SPIN, attacks.REFORK], ids=["spin", "refork"])
def test_a4_the_cpu_budget_counts_all_processes(tmp_path: Path, script: str) -> None:
    run = ran(tmp_path, "python", "-c", script, cpu=0.5)
    assert run.ended.reason == "cpu"
    assert run.ended.cpu_seconds >= 0.5


@pytest.mark.parametrize("name", attacks.FLOODS)
def test_a8_a_flood_is_stopped_with_its_true_count(tmp_path: Path, name: str) -> None:
    run = ran(tmp_path, *attacks.FLOODS[name], output=CAP)
    kept, total = (
        (run.stderr, run.ended.stderr) if name == "stderr" else (run.stdout, run.ended.stdout)
    )
    assert run.ended.reason == "output"
    assert len(kept) == CAP
    assert total > 2 * CAP


def test_quiet_waits_for_what_runs_and_holds_what_comes(tmp_path: Path) -> None:
    async def body() -> None:
        async with runner(tmp_path) as link:
            command = order("sh", "-c", "until [ -e go ]; do sleep 0.01; done; echo ran")
            running = asyncio.ensure_future(link.run(command, b""))
            quiet = asyncio.ensure_future(link.quiet().__aenter__())
            await link.write("before", b"1")
            assert not quiet.done()
            await link.write("go", b"")
            await quiet
            assert (await running).stdout == b"ran\n"
            late = asyncio.ensure_future(link.write("late", b"1"))
            await asyncio.sleep(0)
            assert not late.done()
            assert not (tmp_path / "late").exists()
            late.cancel()

    sandbox.run(body)


def test_a9_both_streams_at_once_come_whole_and_in_order(tmp_path: Path) -> None:
    run = ran(tmp_path, *attacks.both_streams(1_048_577))
    for kept, total, letter in (
        (run.stdout, run.ended.stdout, b"o"),
        (run.stderr, run.ended.stderr, b"e"),
    ):
        assert kept == attacks.whole_stream(letter, 1_048_577)[: 1 << 20]
        assert total == 1_048_577


def test_a10_every_byte_is_exact(tmp_path: Path) -> None:
    assert ran(tmp_path, *attacks.EVERY_BYTE).stdout == attacks.EVERY_BYTE_WRITES


def test_a11_output_before_a_timeout_is_kept(tmp_path: Path) -> None:
    run = ran(tmp_path, *attacks.PARTIAL_OUTPUT, timeout=0.5)
    assert (run.stdout, run.stderr, run.ended.reason) == (b"first\n", b"second\n", "timeout")


def test_a12_input_is_whole_or_not_waited_for(tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    read = ran(tmp_path, "cat", stdin=content, output=4_000_000)
    assert read.stdout == content
    assert ran(tmp_path, *attacks.NEVER_READS, stdin=content).stdout == b"done\n"
    assert ran(tmp_path, *attacks.WANTS_STDIN).stdout == b"done\n"


def test_a_missing_program_is_told_by_its_error(tmp_path: Path) -> None:
    run = ran(tmp_path, "no-such-program")
    assert run.ended.errno == 2
    assert "no-such-program" in run.ended.error


def test_a_cancelled_action_is_stopped_and_the_next_one_runs(tmp_path: Path) -> None:
    async def body() -> bytes:
        async with runner(tmp_path) as link:
            sleeping = asyncio.ensure_future(
                link.run(order("sh", "-c", f"echo x > begun; sleep {sandbox.MARK}"), b"")
            )
            while not (await link.read("begun", bytes_max=9)).content:
                await asyncio.sleep(0.01)
            sleeping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sleeping
            assert sandbox.marked_pids() == []
            return (await link.run(order("echo", "on"), b"")).stdout

    assert sandbox.run(body) == b"on\n"


def test_files_are_reached_without_following_anything(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    workspace = tmp_path / "workspace"
    workspace.mkdir()

    async def body() -> None:
        async with runner(workspace) as link:
            await _tried_links(link, secret)

    sandbox.run(body)
    assert secret.read_text() == "of the host"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["secret", "workspace"]


async def _tried_links(link: GuestLink, secret: Path) -> None:
    content = os.urandom(700_000)
    assert await link.write("deep/er/file", content) is None
    assert await link.write("empty", b"") is None
    script = f"ln -s {secret} link; ln -s {secret.parent} folder; mkfifo pipe; ln empty hard"
    await link.run(order("sh", "-c", script), b"")
    for path in ("link", "folder/secret", "../secret", str(secret), "pipe", "hard"):
        assert await link.write(path, b"x") is not None
        assert (await link.read(path, bytes_max=100)).refused
    read = await link.read("deep/er/file", bytes_max=1000)
    assert (read.content, read.total_bytes) == (content[:1000], 700_000)
    out = await link.export(["."], bytes_max=1 << 20)
    assert out.files == {"deep/er/file": content}
    assert set(out.refused) == {"link", "folder", "pipe", "hard", "empty"}
    small = await link.export(["."], bytes_max=10)
    assert "byte limit" in small.refused["deep/er/file"]


def test_a_channel_carries_more_than_its_window_both_ways_and_its_end(tmp_path: Path) -> None:
    script = (
        "import socket\n"
        "s = socket.socket(fileno=3)\n"
        "total = 0\n"
        "while (data := s.recv(1 << 16)): total += len(data)\n"
        "s.sendall(b'%d ' % total + bytes(3_000_000))\n"
    )

    async def body() -> bytes:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        async with runner(tmp_path) as link:
            running = asyncio.ensure_future(
                link.run(order("python", "-c", script), b"", (theirs.detach(),))
            )
            await loop.sock_sendall(ours, bytes(2_000_000))
            ours.shutdown(socket.SHUT_WR)
            said = b""
            while data := await loop.sock_recv(ours, 1 << 20):
                said += data
            await running
            ours.close()
            return said

    count, _, rest = sandbox.run(body).partition(b" ")
    assert (int(count), len(rest)) == (2_000_000, 3_000_000)


def test_a_runner_whose_host_goes_takes_its_programs_along(tmp_path: Path) -> None:
    clock = SystemClock()

    async def body() -> None:
        async with runner(tmp_path) as link:
            script = f"echo x > begun; sleep {sandbox.MARK}"
            running = asyncio.ensure_future(link.run(order("sh", "-c", script), b""))
            while not (await link.read("begun", bytes_max=9)).content:
                await asyncio.sleep(0.01)
            link.close()
            with pytest.raises(Exception, match="removed"):
                await running

    sandbox.run(body)
    give_up = clock.monotonic() + PATIENCE
    while sandbox.marked_pids() and clock.monotonic() < give_up:
        os.sched_yield()
    assert sandbox.marked_pids() == []


class Nobody:
    """A loop in which nothing happens."""

    def reads(self, descriptor: int, ready: object) -> None: ...

    def writes(self, descriptor: int, ready: object) -> None: ...

    def forget(self, descriptor: int) -> None: ...

    def send(self, kind: str, body: bytes = b"", **fields: object) -> None: ...


class Counted(Descendants):
    """Counts how often it is looked at."""

    looks = 0

    def counters(self) -> Counters:
        self.looks += 1
        return Counters(0.0, 0, 0, 0)


def test_however_many_bytes_pass_limits_are_looked_at_when_it_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("stoker.sandbox.guest.action.time.monotonic", lambda: now)
    group = Counted()

    def start(_descriptors: list[int], _errors: int) -> NoReturn:
        os._exit(0)

    bounds = Bounds(timeout_seconds=50.0, cpu_seconds=50.0, output_bytes=1)
    tried = Action(Nobody(), group, start, bounds, channels=0, full=lambda: False)
    before = group.looks
    longest = max(tried.tick() for _ in range(1000))
    assert group.looks == before + 1
    now += 2 * longest
    tried.tick()
    assert group.looks == before + 2
    os.waitpid(tried.pid, 0)
    tried.finish(0, lambda: None)
