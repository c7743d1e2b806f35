"""Attackers against one action: time, memory, processes, output, stdin (CASES A1-A6, A8-A12)."""

import os
import resource
import signal
from pathlib import Path

import msgspec
import pytest

from stoker.model.execution import MEBIBYTE, Limits, Rung
from stoker.model.tools import LimitKind
from support import attacks, sandbox
from support.attacks import BOMB, HOG, REFORK, SPIN
from support.sandbox import BOXED, EVERY, MARK, SMALL, attacked


def small(**changes: object) -> Limits:
    return msgspec.structs.replace(SMALL, **changes)


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", EVERY)
def test_a1_background_child_does_not_hold_the_result(tmp_path: Path, rung: Rung) -> None:
    seen = attacked(tmp_path, rung, *attacks.BACKGROUND_CHILD)
    assert seen.run.result.ok
    assert seen.run.result.stdout.kept == b"now\n"
    assert seen.survivors == []


@pytest.mark.parametrize("rung", EVERY)
def test_a2_twice_forked_session_leader_does_not_survive(tmp_path: Path, rung: Rung) -> None:
    seen = attacked(tmp_path, rung, *attacks.TWICE_FORKED)
    assert seen.run.result.exit_code == 0
    assert seen.survivors == []


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", EVERY)
@pytest.mark.parametrize(
    "attack",
    [attacks.IGNORES_TERM, attacks.STOPS_ITSELF],
    ids=["ignores SIGTERM", "stops itself"],
)
def test_a3_wall_deadline_holds(tmp_path: Path, rung: Rung, attack: attacks.Command) -> None:
    seen = attacked(tmp_path, rung, *attack, timeout_seconds=0.5)
    assert seen.run.result.timed_out
    assert seen.run.result.limit is None
    assert seen.survivors == []


@pytest.mark.parametrize("rung", BOXED)
def test_a3_killing_everything_harms_nobody_else(tmp_path: Path, rung: Rung) -> None:
    seen = attacked(
        tmp_path, rung, *attacks.KILLS_EVERYTHING, timeout_seconds=1.0, then=("echo", "on")
    )
    # Inside, -1 spares the caller and cannot reach the launcher; we are still here to ask.
    assert seen.run.result.timed_out
    assert seen.then is not None
    assert seen.then.result.stdout.kept == b"on\n"


@pytest.mark.parametrize("rung", EVERY)
@pytest.mark.parametrize("script", [SPIN, REFORK], ids=["spin", "refork"])
def test_a4_cpu_budget_counts_the_box_not_the_process(
    tmp_path: Path, rung: Rung, script: str
) -> None:
    seen = attacked(
        tmp_path, rung, "python", "-c", script,
        limits=small(cpu_seconds=0.6), timeout_seconds=sandbox.PATIENCE,
    )  # fmt: skip
    assert seen.run.result.limit is LimitKind.CPU
    assert seen.run.usage.cpu_seconds is not None
    assert seen.run.usage.cpu_seconds >= 0.5


def test_a4_refork_evades_a_process_limit_alone() -> None:
    # The attack works where only RLIMIT_CPU stands: 2 s of work under a limit of 1 s.
    script = REFORK.replace("while True:\n    child", "for _ in range(10):\n    child")
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
        os.execvp("python3", ["python3", "-c", script])
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("rung", EVERY)
def test_a5_memory_hog_is_a_memory_limit(tmp_path: Path, rung: Rung) -> None:
    seen = attacked(tmp_path, rung, "python", "-c", HOG)
    if rung is Rung.USER_NAMESPACE and seen.run.result.limit is None:
        # Best effort: RLIMIT_AS may be met before the watcher looks; then it is a MemoryError.
        assert b"MemoryError" in seen.run.result.stderr.kept
        return
    assert seen.run.result.limit is LimitKind.MEMORY


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", sandbox.COUNTED)
def test_a5_hog_in_a_child_counts_though_the_parent_exits_0(tmp_path: Path, rung: Rung) -> None:
    seen = attacked(tmp_path, rung, *attacks.HOG_IN_A_CHILD)
    assert seen.run.result.limit is LimitKind.MEMORY  # its exit code may be 0 all the same


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", sandbox.COUNTED)
@pytest.mark.parametrize(
    "argv", [attacks.python(BOMB), attacks.SHELL_BOMB], ids=["python", "shell"]
)
def test_a6_fork_bomb_is_held_and_the_next_action_runs(
    tmp_path: Path, rung: Rung, argv: tuple[str, ...]
) -> None:
    seen = attacked(tmp_path, rung, *argv, then=("echo", "still here"))
    assert seen.run.result.limit is LimitKind.PROCESSES
    assert seen.then is not None
    assert seen.then.result.stdout.kept == b"still here\n"
    assert seen.then.result.interrupted_before


def test_a6_fork_bomb_of_an_ordinary_user_ends_with_the_action(tmp_path: Path) -> None:
    seen = attacked(
        tmp_path, Rung.USER_NAMESPACE, *attacks.SHELL_BOMB,
        timeout_seconds=2.0, then=("echo", "still here"),
    )  # fmt: skip
    assert seen.run.result.timed_out or seen.run.result.limit is LimitKind.PROCESSES
    assert seen.then is not None
    assert seen.then.result.stdout.kept == b"still here\n"


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", EVERY)
@pytest.mark.parametrize(
    "script",
    [
        "head -c 50000000 /dev/zero > file",
        "i=0; while [ $i -lt 3000 ]; do : > f$i; i=$((i+1)); done; sleep 1",
    ],
    ids=["bytes", "files"],
)
def test_a7_filled_disk_is_a_disk_limit(tmp_path: Path, rung: Rung, script: str) -> None:
    seen = attacked(tmp_path, rung, "sh", "-c", script)
    assert seen.run.result.limit is LimitKind.DISK
    assert not seen.run.result.ok
    assert seen.leaked == 0


@pytest.mark.parametrize("rung", sandbox.OWN)
@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/workspace"])
def test_a7_every_writable_place_is_sized(tmp_path: Path, rung: Rung, place: str) -> None:
    script = f"""
import os
written = 0
try:
    for number in range(64):
        with open(f"{place}/{{number}}", "wb") as file:
            written += file.write(bytes(1 << 20))
except OSError as error:
    print(error.errno, written)
"""
    seen = attacked(tmp_path, rung, "python", "-c", script)
    code, written = map(int, seen.run.result.stdout.kept.split())
    assert code == 28
    assert written <= SMALL.disk_bytes
    assert seen.run.result.limit is LimitKind.DISK


@pytest.mark.parametrize("rung", BOXED)
def test_a7_system_and_devices_cannot_be_filled(tmp_path: Path, rung: Rung) -> None:
    script = "for f in /x /dev/x /usr/x /etc/x /opt/python/x /proc/x; do echo x > $f; done; exit 0"
    seen = attacked(tmp_path, rung, "sh", "-c", script, then=("sh", "-c", "ls -d /x /dev/x /usr/x"))
    assert seen.then is not None
    assert seen.then.result.exit_code != 0
    assert seen.then.result.stdout.kept == b""


@pytest.mark.parametrize("rung", EVERY)
@pytest.mark.parametrize("name", attacks.FLOODS)
def test_a8_flood_is_stopped_with_its_true_count(tmp_path: Path, rung: Rung, name: str) -> None:
    seen = attacked(tmp_path, rung, *attacks.FLOODS[name])
    result = seen.run.result
    flooded = result.stderr if name == "stderr" else result.stdout
    assert result.limit is LimitKind.OUTPUT
    assert flooded.truncated
    assert len(flooded.kept) == SMALL.output_bytes
    assert flooded.total_bytes > 2 * SMALL.output_bytes
    assert seen.run.usage.output_bytes == result.stdout.total_bytes + result.stderr.total_bytes


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", EVERY)
@pytest.mark.parametrize("size", [50_000, 160_910, 1_048_577])
def test_a9_both_streams_at_once_come_whole_and_in_order(
    tmp_path: Path, rung: Rung, size: int
) -> None:
    limits = small(output_bytes=1_048_576)
    result = attacked(tmp_path, rung, *attacks.both_streams(size), limits=limits).run.result
    for stream, letter in ((result.stdout, b"o"), (result.stderr, b"e")):
        whole = attacks.whole_stream(letter, size)
        assert stream.kept == whole[: limits.output_bytes]
        assert stream.total_bytes == size
        assert stream.truncated == (size > limits.output_bytes)
    assert result.exit_code == 0


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", EVERY)
def test_a10_every_byte_value_survives(tmp_path: Path, rung: Rung) -> None:
    result = attacked(tmp_path, rung, *attacks.EVERY_BYTE).run.result
    assert result.stdout.kept == attacks.EVERY_BYTE_WRITES
    assert "not UTF-8" in result.text
    result.text.encode()


@pytest.mark.parametrize("rung", EVERY)
def test_a11_partial_output_before_a_timeout_is_kept(tmp_path: Path, rung: Rung) -> None:
    seen = attacked(tmp_path, rung, *attacks.PARTIAL_OUTPUT, timeout_seconds=1.5)
    assert seen.run.result.timed_out
    assert seen.run.result.stdout.kept == b"first\n"
    assert seen.run.result.stderr.kept == b"second\n"


@pytest.mark.parametrize("rung", EVERY)
def test_a12_no_stdin_is_end_of_file(tmp_path: Path, rung: Rung) -> None:
    result = attacked(tmp_path, rung, *attacks.WANTS_STDIN).run.result
    assert result.stdout.kept == b"done\n"


@pytest.mark.parametrize("rung", EVERY)
def test_a12_unread_stdin_does_not_hang(tmp_path: Path, rung: Rung) -> None:
    result = attacked(tmp_path, rung, *attacks.NEVER_READS, stdin=bytes(5 * MEBIBYTE)).run.result
    assert result.ok
    assert result.stdout.kept == b"done\n"


@pytest.mark.parametrize("rung", EVERY)
def test_a12_large_stdin_arrives_whole(tmp_path: Path, rung: Rung) -> None:
    result = attacked(tmp_path, rung, "wc", "-c", stdin=bytes(3 * MEBIBYTE + 1)).run.result
    assert result.stdout.kept.strip() == str(3 * MEBIBYTE + 1).encode()


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", EVERY)
def test_missing_program_is_an_observation(tmp_path: Path, rung: Rung) -> None:
    result = attacked(tmp_path, rung, "no-such-program-here").run.result
    assert result.exit_code == 127
    assert b"no-such-program-here" in result.stderr.kept


@pytest.mark.parametrize("rung", EVERY)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the reporter is x86_64's")
def test_a_signal_is_told_from_an_exit(tmp_path: Path, rung: Rung) -> None:
    assert attacked(tmp_path, rung, "sh", "-c", "kill -ABRT $$").run.result.signal == signal.SIGABRT
    for code in (7, 137, 255):
        assert attacked(tmp_path, rung, "sh", "-c", f"exit {code}").run.result.exit_code == code


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", EVERY)
def test_a31_timeout_keeps_the_files_and_says_interrupted(tmp_path: Path, rung: Rung) -> None:
    seen = attacked(
        tmp_path, rung, "sh", "-c", f"echo kept > note; sleep {MARK}",
        timeout_seconds=1.5, then=("cat", "note"),
    )  # fmt: skip
    assert seen.run.result.timed_out
    assert not seen.run.result.interrupted_before
    assert seen.then is not None
    assert seen.then.result.stdout.kept == b"kept\n"
    assert seen.then.result.interrupted_before
