"""The attacks of ``test_actions`` with their defence off: each succeeds (CASES A1-A3, A5-A12, A20).

The programs are the same (``support.attacks``); they run as a plain child of the test, the way most
harnesses start tools. An attack that fails here would prove nothing in a box.
"""

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support import attacks, naive
from support.naive import started, until
from support.sandbox import MARK, PATIENCE, SMALL, marked_pids, needs_root

PIPE = subprocess.PIPE
NOT_YET_SECONDS = 0.5
"""How long something that hangs is watched hanging."""


def test_a1_waiting_for_end_of_file_waits_for_the_background_child() -> None:
    with started(*attacks.BACKGROUND_CHILD, stdout=PIPE) as process:
        assert process.stdout is not None
        assert process.wait(PATIENCE) == 0
        assert os.read(process.stdout.fileno(), 100) == b"now\n"
        until(marked_pids)
        readable, _, _ = select.select([process.stdout], [], [], NOT_YET_SECONDS)
        assert not readable, "the program is over, and who reads to the end still waits"
        naive.kill_marked()
        # Its shell lives on to say "late": only now is the end there.
        assert process.stdout.read() == b"late\n"


def test_a2_a_killed_process_group_leaves_the_twice_forked_alive() -> None:
    with started(*attacks.TWICE_FORKED, start_new_session=True) as process:
        assert process.wait(PATIENCE) == 0
        until(marked_pids)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        (survivor,) = marked_pids()
        assert naive.state(survivor) in (b"S", b"R")
        assert os.getpgid(survivor) != process.pid


def test_a3_asking_with_sigterm_does_not_end_who_ignores_it() -> None:
    with started(*attacks.IGNORES_TERM, start_new_session=True) as process:
        until(marked_pids)
        (sleeper,) = marked_pids()
        os.killpg(process.pid, signal.SIGTERM)
        assert naive.ignores(sleeper, signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(NOT_YET_SECONDS)
        assert marked_pids() == [sleeper]


def test_a3_asking_with_sigterm_does_not_end_who_is_stopped() -> None:
    with started(*attacks.STOPS_ITSELF, start_new_session=True) as process:
        until(lambda: naive.state(process.pid) == b"T")
        os.killpg(process.pid, signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(NOT_YET_SECONDS)
        assert naive.state(process.pid) == b"T"


@needs_root
@pytest.mark.root
def test_a3_killing_everything_kills_a_neighbour_of_the_same_uid() -> None:
    uid = naive.ATTACKER_UID
    who = {"user": uid, "group": uid, "extra_groups": []}
    with (
        started("sleep", "1000", **who) as neighbour,
        started(*attacks.KILLS_EVERYTHING, stdout=PIPE, **who) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"killed\n"
        assert neighbour.wait(PATIENCE) == -signal.SIGKILL
        assert process.poll() is None


def test_a5_a_hog_without_a_control_group_has_it_all() -> None:
    with started(*attacks.python(attacks.HOG), stdout=PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"had it all\n"
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert usage.ru_maxrss * 1024 > 2 * SMALL.memory_bytes


def test_a5_a_hog_in_a_child_does_not_show_in_the_exit_code() -> None:
    limit = 2 * SMALL.memory_bytes  # as a harness does that has rlimits and exit codes alone
    bounded = ("sh", "-c", 'ulimit -v "$0"; exec "$@"', str(limit // 1024), *attacks.HOG_IN_A_CHILD)
    with started(*bounded, stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert b"MemoryError" in err
    assert out == b""
    assert process.returncode == 0


@needs_root
@pytest.mark.root
@pytest.mark.parametrize(
    "command", [attacks.python(attacks.BOMB), attacks.SHELL_BOMB], ids=["python", "shell"]
)
def test_a6_a_fork_bomb_passes_the_limit_where_nobody_counts(command: attacks.Command) -> None:
    uid, ceiling = naive.ATTACKER_UID, SMALL.processes_max + 8

    def at_most() -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (ceiling, ceiling))  # the host's own safety
        os.nice(19)

    naive.kill_uid(uid)  # what ends the bomb must work before there is one
    try:
        with started(
            *command, user=uid, group=uid, extra_groups=[], preexec_fn=at_most,
            stderr=subprocess.DEVNULL,
        ):  # fmt: skip
            until(lambda: len(naive.pids_of(uid)) > SMALL.processes_max)
            naive.kill_uid(uid)
    finally:
        naive.kill_uid(uid)
    until(lambda: not naive.pids_of(uid))


@pytest.mark.parametrize("name", attacks.FLOODS)
def test_a8_a_reader_without_a_cap_keeps_whatever_comes(name: str) -> None:
    streams = {"stdout": PIPE, "stderr": subprocess.DEVNULL}
    if name == "stderr":
        streams = {"stdout": subprocess.DEVNULL, "stderr": PIPE}
    with started(*attacks.FLOODS[name], **streams) as process:
        flooded = process.stderr if name == "stderr" else process.stdout
        assert flooded is not None
        kept = flooded.read(naive.UNCAPPED_BYTES)
    assert len(kept) == naive.UNCAPPED_BYTES > 50 * SMALL.output_bytes


@pytest.mark.parametrize("size", [160_910, 1_048_577])
def test_a9_reading_one_stream_to_its_end_first_never_ends(size: int) -> None:
    with started(*attacks.both_streams(size), stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        got = [b""]
        reader = threading.Thread(target=lambda: got.append(process.stdout.read()))  # type: ignore[union-attr]
        reader.start()
        until(lambda: naive.waiting_bytes(process.stderr) == naive.PIPE_BYTES)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(NOT_YET_SECONDS)
        assert reader.is_alive(), "the program waits for us and we wait for the program"
        # Proof that nothing else kept them: reading the other stream lets both go.
        assert process.stderr.read() == attacks.whole_stream(b"e", size)
        reader.join(PATIENCE)
        assert got[-1] == attacks.whole_stream(b"o", size)


def test_a10_decoding_output_as_text_fails_or_loses_bytes() -> None:
    with (
        started(*attacks.EVERY_BYTE, stdout=PIPE, encoding="utf-8") as process,
        pytest.raises(UnicodeDecodeError),
    ):
        process.communicate(timeout=PATIENCE)
    with started(*attacks.EVERY_BYTE, stdout=PIPE, encoding="utf-8", errors="replace") as process:
        text, _ = process.communicate(timeout=PATIENCE)
    assert str(text).encode() != attacks.EVERY_BYTE_WRITES
    with started(*attacks.EVERY_BYTE, stdout=PIPE) as process:
        content, _ = process.communicate(timeout=PATIENCE)
    assert content == attacks.EVERY_BYTE_WRITES
    with pytest.raises(TypeError):
        json.dumps({"stdout": content})
    with pytest.raises(UnicodeEncodeError):
        content.decode(errors="surrogateescape").encode()


def test_a11_giving_up_on_communicate_loses_what_was_written() -> None:
    async def body() -> tuple[bytes, bytes]:
        process = await asyncio.create_subprocess_exec(
            *attacks.PARTIAL_OUTPUT, stdout=PIPE, stderr=PIPE
        )
        asking = asyncio.ensure_future(process.communicate())
        streams = [process._transport.get_pipe_transport(n) for n in (1, 2)]  # type: ignore[attr-defined]
        pipes = [stream.get_extra_info("pipe") for stream in streams]
        try:
            while not marked_pids() or any(map(naive.waiting_bytes, pipes)) or _unread(process):
                await asyncio.sleep(0.01)
            asking.cancel()  # as wait_for does when its time is up
            await asyncio.wait([asking])
        finally:
            process.kill()
            naive.kill_marked()
        return await process.communicate()

    assert asyncio.run(asyncio.wait_for(body(), PATIENCE)) == (b"", b"")


def _unread(process: asyncio.subprocess.Process) -> bool:
    """Whether output lies in the reader, not yet taken by ``communicate``."""
    assert process.stdout is not None
    assert process.stderr is not None
    return bool(process.stdout._buffer or process.stderr._buffer)  # type: ignore[attr-defined]


def test_a12_an_inherited_stdin_is_waited_for() -> None:
    ours, theirs = os.pipe()
    with started(*attacks.WANTS_STDIN, stdin=ours, stdout=PIPE, pass_fds=()) as process:
        os.close(ours)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(NOT_YET_SECONDS)
        os.close(theirs)
        assert process.wait(PATIENCE) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b"done\n"


def test_a12_writing_stdin_first_breaks_or_hangs_when_nobody_reads() -> None:
    content = bytes(5 << 20)
    with started(*attacks.NEVER_READS, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None
        with pytest.raises(BrokenPipeError):
            process.stdin.write(content)
    with started("sleep", MARK, stdin=PIPE) as process:
        assert process.stdin is not None
        descriptor = process.stdin.fileno()
        os.set_blocking(descriptor, False)
        assert os.write(descriptor, content) == naive.PIPE_BYTES
        with pytest.raises(BlockingIOError):  # here a blocking writer stands still for good
            os.write(descriptor, content)


NAIVE_WORKER = """
import subprocess, sys
for _ in range(5):
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep " + sys.argv[1]])
print("ready", flush=True)
sys.stdin.read()
"""


def test_a20_children_of_a_killed_worker_live_on_without_a_sweep() -> None:
    with started(sys.executable, "-c", NAIVE_WORKER, MARK, stdin=PIPE, stdout=PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        until(lambda: len(marked_pids()) == 5)
        worker.kill()
        worker.wait(PATIENCE)
        assert len(marked_pids()) == 5
        assert {Path(f"/proc/{pid}").exists() for pid in marked_pids()} == {True}
