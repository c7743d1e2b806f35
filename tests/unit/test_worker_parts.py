import ast
import asyncio
from pathlib import Path

import pytest

from stoker import worker
from stoker.errors import BoxFailed, LedgerUnavailable
from stoker.model.completion import CompletionStatus
from stoker.model.execution import Baseline
from stoker.model.ids import EnvironmentId
from stoker.model.tools import CallRequest, OpenRequest
from stoker.sandbox.base import Box
from stoker.testing.boxes import MemoryBackend
from stoker.testing.virtual_clock import run_virtual
from stoker.worker.batches import BATCH_MAX, Batcher
from stoker.worker.contact import Contact
from stoker.worker.figures import ClassMeter
from stoker.worker.jobs import Gate
from stoker.worker.log import EVENTS
from support.worker_boxes import TRUSTED, Bench, make_action, settle


def test_contact_is_lost_after_two_thirds_of_a_lease() -> None:
    contact = Contact(9.0, now=100.0)
    assert contact.trusted(105.9)
    assert not contact.trusted(106.1)
    contact.heard(sent_at=105.0)
    assert contact.trusted(110.9)
    contact.heard(sent_at=101.0)  # an old answer that comes late proves nothing new
    assert contact.silence(111.0) == pytest.approx(6.0)


def test_contact_sees_that_its_own_process_was_stopped() -> None:
    contact = Contact(9.0, now=100.0)
    assert contact.look(100.5) == pytest.approx(0.5)
    assert contact.look(120.5) == pytest.approx(20.0)
    assert contact.verdict_holds(sent_at=200.0, now=205.9)
    assert not contact.verdict_holds(sent_at=200.0, now=206.1)


def test_batches_gather_while_one_is_on_its_way() -> None:
    sent: list[list[int]] = []

    async def send(items: list[int]) -> list[int]:
        sent.append(items)
        await asyncio.sleep(1)
        return [item * 10 for item in items]

    async def scenario() -> None:
        batcher: Batcher[int, int] = Batcher(send)
        first = asyncio.create_task(batcher.ask(0))
        await settle()
        rest = [asyncio.create_task(batcher.ask(n)) for n in range(1, BATCH_MAX + 10)]
        assert await first == 0
        assert [await one for one in rest] == [n * 10 for n in range(1, BATCH_MAX + 10)]
        assert [len(batch) for batch in sent] == [1, BATCH_MAX, 9]

    run_virtual(scenario())


def test_a_batch_that_fails_fails_its_askers_and_no_later_one() -> None:
    fail = [True]

    async def send(items: list[int]) -> list[int]:
        await asyncio.sleep(1)
        if fail.pop() if fail else False:
            raise LedgerUnavailable("away")
        return items

    async def scenario() -> None:
        batcher: Batcher[int, int] = Batcher(send)
        gone = asyncio.create_task(batcher.ask(0))
        asked = asyncio.create_task(batcher.ask(1))
        await settle()
        gone.cancel()
        with pytest.raises(LedgerUnavailable):
            await asked
        assert await batcher.ask(2) == 2

    run_virtual(scenario())


def test_the_gate_lets_a_suspect_in_alone_and_nobody_past_it() -> None:
    async def scenario() -> None:
        gate, inside, log = Gate(), list[str](), list[tuple[str, tuple[str, ...]]]()

        async def job(name: str, *, alone: bool) -> None:
            async with gate.passing(alone=alone):
                inside.append(name)
                log.append((name, tuple(inside)))
                await asyncio.sleep(1)
                inside.remove(name)

        jobs = [asyncio.create_task(job(name, alone=False)) for name in ("a", "b")]
        await settle()
        jobs += [asyncio.create_task(job(name, alone=True)) for name in ("s", "t")]
        jobs += [asyncio.create_task(job("c", alone=False))]
        await asyncio.gather(*jobs)
        assert log == [
            ("a", ("a",)),
            ("b", ("a", "b")),
            ("s", ("s",)),
            ("t", ("t",)),
            ("c", ("c",)),
        ]
        assert not gate.closed

    run_virtual(scenario())


def test_the_gate_forgets_whoever_is_cancelled_at_it() -> None:
    async def scenario() -> None:
        gate = Gate()

        async def job(*, alone: bool) -> None:
            async with gate.passing(alone=alone):
                await asyncio.sleep(10)

        running = asyncio.create_task(job(alone=False))
        await settle()
        suspect = asyncio.create_task(job(alone=True))
        await settle()
        waiting = asyncio.create_task(job(alone=False))
        await settle()
        before = gate.closed
        assert before
        suspect.cancel()
        waiting.cancel()
        await asyncio.gather(suspect, waiting, return_exceptions=True)
        assert not gate.closed
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        alone = asyncio.create_task(job(alone=True))
        await alone

    run_virtual(scenario())


def test_busy_share_is_slot_seconds_over_slot_seconds() -> None:
    meter = ClassMeter(slots=2, now=0.0)
    meter.take(0.0)
    meter.take(5.0)
    meter.give(10.0)
    assert meter.figures(20.0).busy_share == pytest.approx((5 + 10 + 10) / 40)
    assert (meter.busy, meter.free) == (1, 1)


def test_work_is_not_taken_on_while_memory_is_short_unless_nothing_runs() -> None:
    async def scenario() -> None:
        bench = Bench()
        bench.boxes.reserve_memory_bytes = 512
        bench.boxes.memory_available = lambda: 511
        assert bench.boxes.has_room(), "one box is always allowed: work must not stand still"
        await bench.open()
        assert not bench.boxes.has_room()
        bench.boxes.memory_available = lambda: 512
        assert bench.boxes.has_room()

    asyncio.run(scenario())


def test_every_log_line_has_a_name_in_the_catalogue_and_every_name_is_used() -> None:
    used = set()
    for file in Path(worker.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("debug", "info", "warning", "error")
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                used.add(node.args[0].value)
    assert used == set(EVENTS)


@pytest.mark.parametrize("tool", ["call", "environment.open"])
def test_a_box_that_does_not_stand_in_time_is_no_timeout_of_the_tool(tool: str) -> None:
    class Slow(MemoryBackend):
        async def create(self, *_: object) -> Box:
            await asyncio.Event().wait()
            raise AssertionError

    async def scenario() -> None:
        bench = Bench(Slow())
        opening = OpenRequest(baseline=Baseline(), policy=TRUSTED)
        request = CallRequest(argv=("x",)) if tool == "call" else opening
        late = await bench.do(
            make_action(tool, request, environment_id=EnvironmentId("env_a")), limit=0.02
        )
        assert late.status is CompletionStatus.ERROR
        assert late.fault is not None
        assert late.fault.code == BoxFailed.code

    asyncio.run(scenario())
