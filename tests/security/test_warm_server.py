"""The server of a warm box: it dies alone, misses no ending and is out of its programs' reach."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from security.test_warm import in_warm_box, result_of
from stoker.errors import BoxFailed
from stoker.sandbox.cgroups import live_pids
from stoker.sandbox.local import LocalBox
from support import sandbox
from support.sandbox import MARK, PATIENCE, needs_root


@needs_root
@pytest.mark.root
def test_a_server_that_dies_fails_its_action_and_is_made_anew(tmp_path: Path) -> None:
    async def body(box: LocalBox) -> None:
        assert (await result_of(box, ("python", "-c", "pass"))).ok
        assert box.server is not None
        running = asyncio.ensure_future(
            result_of(box, ("python", "-c", f"import os; os.execvp('sleep', ['sleep', '{MARK}'])"))
        )
        while not sandbox.marked_pids():
            assert not running.done()
            await asyncio.sleep(0.01)
        for pid in box.server.own_pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(BoxFailed, match="may have run in part"):
            await running
        assert sandbox.marked_pids() == []
        assert (await result_of(box, ("python", "-c", "pass"))).ok

    in_warm_box(tmp_path, body)


@needs_root
@pytest.mark.root
def test_a_program_that_ends_before_its_server_hears_of_it_is_told_as_it_ended(
    tmp_path: Path,
) -> None:
    """What waits is given its program by the worker itself, and may be done first."""

    async def waits(box: LocalBox) -> None:
        assert box.server is not None
        async with asyncio.timeout(PATIENCE):
            while not box.server.has_waiting:
                await asyncio.sleep(0.01)

    async def body(box: LocalBox) -> None:
        assert (await result_of(box, ("python", "-c", "pass"))).ok
        for program, code in (("open('done', 'w'); raise SystemExit(7)", 7), ("open('done')", 0)):
            await waits(box)
            assert box.server is not None
            pids = box.server.own_pids()
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            running = asyncio.ensure_future(result_of(box, ("python", "-c", program)))
            async with asyncio.timeout(PATIENCE):
                while len(live_pids(box.group.directories)) > len(pids) + 1:  # type: ignore[union-attr]
                    await asyncio.sleep(0.01)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            assert (await running).exit_code == code

    in_warm_box(tmp_path, body)


@needs_root
@pytest.mark.root
def test_an_action_cannot_reach_the_server(tmp_path: Path) -> None:
    script = """
import ctypes, errno, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def refused(what):
    try:
        what()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "possible"
def call(*args):
    if libc.syscall(*args) < 0:
        raise OSError(ctypes.get_errno(), "")
print([refused(w) for w in (
    lambda: os.kill(1, signal.SIGKILL),
    lambda: open("/proc/1/environ").read(),
    lambda: open("/proc/1/mem", "rb"),
    lambda: os.listdir("/proc/1/fd"),
    lambda: os.readlink("/proc/1/root"),
    lambda: os.setuid(0),
    lambda: open("/proc/sys/user/max_user_namespaces", "w"),
    lambda: call(272, 0x10000000),
    lambda: call(272, 0x20000),
    lambda: call(308, 0, 0),
    lambda: call(166, b"/proc", 2),
    lambda: os.mount if hasattr(os, "mount") else call(165, b"x", b"/tmp", b"tmpfs", 0, None),
)])
print(sorted(os.listdir("/proc/self/fd")), os.getpid(), os.getppid())
os.kill(-1, signal.SIGKILL)
"""

    async def body(box: LocalBox) -> None:
        seen = await result_of(box, ("python", "-c", script))
        lines = seen.stdout.kept.decode().splitlines()
        assert "possible" not in lines[0], lines
        assert lines[1] == "['0', '1', '2', '3'] 2 0"
        assert (await result_of(box, ("python", "-c", "pass"))).ok
        assert box.server is not None
        assert not box.server.dead

    in_warm_box(tmp_path, body)
