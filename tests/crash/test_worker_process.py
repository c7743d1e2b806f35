"""Workers as processes: lost, stopped, poisoned, drained, idle; counted at the tool."""

import asyncio
import os
import signal
import socket
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from stoker.broker.base import LedgerEventKind
from stoker.broker.client import owner_pid
from stoker.model.action import Effect
from stoker.model.completion import CompletionStatus
from stoker.model.faults import FaultRecord
from stoker.model.tools import LimitKind
from stoker.seams.clock import SystemClock
from stoker.seams.locks import take_lock
from support.worker_process import BOUND, Run, until


def play(directory: Path, scenario: Callable[[Run], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        async with Run(directory, **options) as run:
            await scenario(run)

    asyncio.run(whole())


def processes_with(token: str) -> list[int]:
    """Return living processes that have ``token`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if token.encode() in command and state != "Z":
            found.append(int(entry.name))
    return found


def test_a_call_and_an_environment_through_real_processes(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        process = run.start()
        figures = await run.working(process)
        isolation = figures.classes["fast"].isolation
        assert isolation is not None
        assert isolation.rung == "process"
        call, opening = run.append(), run.opening()
        await run.submit(call, opening)
        done = await run.completion(call)
        assert done.status is CompletionStatus.OK, done
        assert run.called(done).value == "x"
        assert run.count(call) == 1
        holder = (await run.completion(opening)).worker_id
        assert holder is not None
        cat = run.running(holder, "cat", "given", path="cat")
        await run.submit(cat)
        assert run.ran(await run.completion(cat)).stdout.kept == b"there\n"
        process.terminate()
        assert await run.ended(process) == 0
        last = run.figures()
        assert last is not None
        assert (last.state, last.boxes_alive, last.boxes_leaked) == ("ended", 0, 0)

    play(tmp_path, scenario)


def test_a20_boxes_of_a_killed_worker_are_gone_when_the_next_one_serves(tmp_path: Path) -> None:
    token = f"7{id(tmp_path) % 100_000:05d}.125"  # a duration nobody else sleeps for

    async def scenario(run: Run) -> None:
        process = run.start()
        await run.working(process)
        jobs = [
            run.program_call(
                "sh", "-c", f"sleep {token} & setsid sleep {token} & wait", path=f"j{n}"
            )
            for n in range(10)
        ]
        await run.submit(*jobs)
        await until(lambda: len(processes_with(f"sleep\0{token}")) == 20)
        process.kill()
        await run.ended(process)
        figures = await run.working(run.start("w0"))
        survivors = [p for p in processes_with(f"sleep\0{token}") if p not in redone(run, token)]
        assert not survivors
        assert figures.boxes_swept >= 10
        assert figures.boxes_leaked == 0
        await run.cancel(*jobs)

    play(tmp_path, scenario, slots={"fast": 10})
    assert not processes_with(f"sleep\0{token}")


def redone(run: Run, token: str) -> set[int]:
    """Return processes the *new* worker has begun meanwhile (the jobs are pure: they run again)."""
    living = run.processes[-1].pid
    mine = set()
    for pid in processes_with(f"sleep\0{token}"):
        at = pid
        while at > 1 and at != living:
            try:
                fields = (Path("/proc") / str(at) / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                break
            at = int(fields[1])
        if at == living:
            mine.add(pid)
    return mine


def test_b2_a_stopped_worker_comes_back_to_a_stale_result_and_a_clean_state(
    tmp_path: Path,
) -> None:
    async def scenario(run: Run) -> None:
        stopped = run.start("w0")
        await run.working(stopped, "w0")
        opening = run.opening()
        await run.submit(opening)
        await run.completion(opening)
        # The tool begins, the worker is stopped, the tool ends, the lease ends.
        action = run.call(
            "slow_append",
            arguments={"path": str(run.counted), "seconds": 0.5},
            effect=Effect.EXTERNAL,
        )
        await run.submit(action)
        await until(lambda: run.count(action) == 1)
        stopped.send_signal(signal.SIGSTOP)
        done = await run.completion(action)
        assert done.status is CompletionStatus.AMBIGUOUS
        stopped.send_signal(signal.SIGCONT)
        late = await run.event(lambda e: e.kind is LedgerEventKind.LATE)
        assert late.action_id == action.action_id
        assert "discarded" in late.detail
        await until(lambda: (f := run.figures()) is not None and f.fenced == 1 and f.stale == 1)
        after = run.append("after", effect=Effect.EXTERNAL)
        await run.submit(after)
        ended = await run.completion(after)
        assert ended.status is CompletionStatus.OK
        assert ended.worker_id != done.worker_id, "another incarnation goes on"
        figures = run.figures()
        assert figures is not None
        assert figures.environments == 0
        assert (run.count(action), run.count(after)) == (1, 1)

    play(tmp_path, scenario)


def test_b6_the_owner_is_killed_while_external_work_runs_and_every_result_counts_once(
    tmp_path: Path,
) -> None:
    async def scenario(run: Run) -> None:
        await run.working(run.start())
        actions = [
            run.call(
                "slow_append",
                f"a{n}",
                arguments={"path": str(run.counted), "seconds": 0.5},
                effect=Effect.EXTERNAL,
            )
            for n in range(8)
        ]
        await run.submit(*actions)
        for seen in (1, 3, 5):
            await until(lambda seen=seen: run.count() >= seen)  # type: ignore[misc]
            if (owner := owner_pid(run.directory / "ledger")) is not None:
                os.kill(owner, signal.SIGKILL)
        for action in actions:
            done = await run.completion(action)
            assert (done.status, done.attempt) == (CompletionStatus.OK, 1)
            assert run.count(action) == 1
        figures = run.figures()
        assert figures is not None
        assert figures.fenced == 0

    # Long leases: the owner must be able to come back within two thirds of one, however busy
    # the machine is.
    play(tmp_path, scenario, lease=20.0)


def test_b3_work_that_holds_the_interpreter_for_ten_leases_keeps_its_lease(
    tmp_path: Path,
) -> None:
    async def scenario(run: Run) -> None:
        process = run.start()
        await run.working(process)
        action = run.call("spin", arguments={"seconds": 10.0}, effect=Effect.EXTERNAL)
        await run.submit(action)
        done = await run.completion(action)
        assert (done.status, done.attempt) == (CompletionStatus.OK, 1)
        assert (await run.view(action)).deliveries == 1

    play(tmp_path, scenario, lease=1.0)


def test_b10_a_poison_action_ends_as_a_dead_letter_and_workers_recover(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        poison = run.call(
            "poison",
            arguments={"pids": str(run.counted)},
            effect=Effect.PURE,
            attempts_max=3,
        )
        await run.submit(poison)
        done = await keep_serving(run, lambda: run.completion(poison))
        assert done.status is CompletionStatus.DEAD
        assert done.fault is not None
        assert run.count(poison) == 3, "attempted as often as allowed"
        assert len((await run.view(poison)).causes) == 3
        after = run.append("after")
        await run.submit(after)
        ended = await keep_serving(run, lambda: run.completion(after))
        assert ended.status is CompletionStatus.OK

    play(tmp_path, scenario)


def test_b18_innocents_beside_a_poison_lose_no_attempt(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        innocents = [
            run.call(
                "slow_append",
                f"i{n}",
                arguments={"path": str(run.counted), "seconds": 0.3},
                effect=Effect.PURE,
                attempts_max=1,
            )
            for n in range(8)
        ]
        poison = run.call(
            "poison", arguments={"pids": str(run.counted)}, effect=Effect.PURE, attempts_max=2
        )
        await run.submit(*innocents[:4], poison, *innocents[4:])
        ends = await keep_serving(
            run, lambda: gathered([run.completion(a) for a in (*innocents, poison)])
        )
        assert [end.status for end in ends[:-1]] == [CompletionStatus.OK] * 8
        assert ends[-1].status is CompletionStatus.DEAD

    play(tmp_path, scenario, slots={"fast": 9})


async def gathered(waiting: list[Any]) -> list[Any]:
    """Wait one after the other: they share one reader of events."""
    return [await one for one in waiting]


async def keep_serving(run: Run, wait: Callable[[], Awaitable[Any]]) -> Any:
    """Start the worker again whenever it is gone, until ``wait`` is over; tell tools its pid."""

    async def keep() -> None:
        while True:
            if not run.living():
                process = run.start()
                run.tell_tools(process.pid)
                await asyncio.to_thread(process.wait)
            await asyncio.sleep(0.02)

    keeper = asyncio.create_task(keep())
    try:
        async with asyncio.timeout(2 * BOUND):
            return await wait()
    finally:
        if run.processes[-1].poll() is None:
            run.processes[-1].terminate()
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


def test_a25_monstrous_results_are_typed_and_the_worker_lives(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        process = run.start()
        await run.working(process)
        big = run.call("big", arguments={"megabytes": 300})
        nan, odd = run.call("nan"), run.call("unserialisable")
        await run.submit(big, nan, odd)
        over = await run.completion(big)
        answer = run.called(over)
        if over.status is CompletionStatus.LIMIT:
            assert answer.run is not None
            assert answer.run.limit is LimitKind.MEMORY
        else:
            assert answer.error is not None
        for action in (nan, odd):
            error = run.called(await run.completion(action)).error
            assert error is not None
            assert "not JSON" in error
        after = run.append()
        await run.submit(after)
        assert (await run.completion(after)).status is CompletionStatus.OK
        assert process.poll() is None

    play(tmp_path, scenario)


def test_a24_a_class_that_hangs_takes_no_slot_of_another_in_real_boxes(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.working(run.start())
        hanging = [
            run.program_call("sleep", "600", path=f"h{n}", worker_class="slow", timeout_seconds=900)
            for n in range(6)
        ]
        await run.submit(*hanging)
        await until(lambda: (f := run.figures()) is not None and f.classes["slow"].busy == 2)
        quick = [run.append(f"q{n}") for n in range(10)]
        await run.submit(*quick)
        for action in quick:
            assert (await run.completion(action)).status is CompletionStatus.OK
        await run.cancel(*hanging)

    play(tmp_path, scenario, slots={"fast": 2, "slow": 2})


def test_a_term_drains_and_a_second_one_kills(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        process = run.start()
        await run.working(process)
        action = run.call(
            "slow_append", arguments={"path": str(run.counted), "seconds": 600},
            timeout_seconds=900, effect=Effect.PURE,
        )  # fmt: skip
        await run.submit(action)
        await until(lambda: run.count(action) == 1)
        process.terminate()
        await until(lambda: (f := run.figures()) is not None and f.state == "draining")
        assert process.poll() is None, "what runs may finish"
        process.terminate()
        assert await run.ended(process) == 0
        last = run.figures()
        assert last is not None
        assert (last.state, last.boxes_alive) == ("ended", 0)

    play(tmp_path, scenario)


def test_a_worker_nobody_needs_ends_by_itself(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        lock = take_lock(run.directory / "coordinator.lock")
        assert lock is not None
        process = run.start()
        await run.working(process)
        clock = SystemClock()
        until_then = clock.monotonic() + 3.0
        while clock.monotonic() < until_then:
            assert process.poll() is None, "a coordinator lives: the worker stays"
            await asyncio.sleep(0.1)
        os.close(lock)
        assert await run.ended(process) == 0

    play(tmp_path, scenario, idle_exit=1.0)


def test_a22_isolation_the_host_cannot_give_is_said_and_ends_with_2(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        assert await run.ended(run.start()) == 2
        failed = run.directory / "workers" / "w0" / "failed.json"
        fault = msgspec.json.decode(failed.read_bytes(), type=FaultRecord)
        assert fault.code == "isolation_unavailable"
        assert "microvm" in fault.message
        assert fault.message in (run.directory / "w0.out").read_text()

    play(tmp_path, scenario, isolation="microvm")


def test_a_second_worker_of_one_name_is_refused(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        first = run.start()
        await run.working(first)
        assert await run.ended(run.start()) == 2
        assert "w0" in (run.directory / "w0.out").read_text()
        assert first.poll() is None
        assert not (run.directory / "workers" / "w0" / "failed.json").exists()

    play(tmp_path, scenario)


def test_metrics_are_served_on_loopback(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        port = free_port()
        process = run.start(extra=["--metrics-port", str(port)])
        await run.working(process)
        action = run.append()
        await run.submit(action)
        await run.completion(action)

        def page() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
                text: str = reply.read().decode()
                return text

        wanted = 'stoker_actions_total{status="ok",worker_class="fast"} 1.0'
        async with asyncio.timeout(BOUND):
            while wanted not in (text := await asyncio.to_thread(page)):
                await asyncio.sleep(0.1)
        assert "stoker_boxes_leaked 0.0" in text
        assert 'stoker_worker_slots{worker_class="fast"} 2.0' in text

    play(tmp_path, scenario)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
