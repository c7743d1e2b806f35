"""What lies between the parts of a simulated run: order, codecs, and groups that share a sync."""

import asyncio

import msgspec
import pytest

from stoker.broker.base import Attach, Enroll, EventsRequest, LeaseRequest, LedgerLimits
from stoker.errors import LedgerFenced, WireViolation
from stoker.model.ids import CallPath, Fence, RolloutId, RunId, WorkerId
from stoker.rollout.messages import Evict, FromHost, LocalDone
from stoker.testing.simulator.links import LedgerLink, Owner, Pipe
from stoker.testing.simulator.whereabouts import Whereabouts
from stoker.testing.virtual_clock import VirtualClock, run_virtual
from stoker.wire.frames import FRAME_BYTES_MAX


def _evict(name: str) -> Evict:
    return Evict(rollout_id=RolloutId(name))


def test_a_pipe_takes_its_time_keeps_order_and_hands_on_what_was_decoded() -> None:
    seen: list[tuple[float, Evict]] = []
    sent = [_evict("rol_a"), _evict("rol_b"), _evict("rol_c")]

    async def main() -> None:
        clock = VirtualClock()
        pipe: Pipe[Evict] = Pipe(
            1.0,
            msgspec.msgpack.Decoder(Evict).decode,
            lambda one: seen.append((clock.monotonic(), one)),
        )
        pipe.send(sent[0])
        pipe.send(sent[1])
        await asyncio.sleep(0.5)
        pipe.send(sent[2])
        await asyncio.sleep(2.0)

    run_virtual(main())
    assert seen == list(zip((1.0, 1.0, 1.5), sent, strict=True))
    assert not any(one is other for (_, one), other in zip(seen, sent, strict=True))


def test_what_a_frame_cannot_hold_is_refused_as_on_the_wire() -> None:
    async def main() -> None:
        pipe: Pipe[FromHost] = Pipe(0.0, msgspec.msgpack.Decoder(FromHost).decode, lambda _: None)
        with pytest.raises(WireViolation, match="over the limit"):
            pipe.send(
                LocalDone(
                    rollout_id=RolloutId("rol_a"),
                    path=CallPath("0"),
                    value=bytes(FRAME_BYTES_MAX),
                    fault=None,
                )
            )

    run_virtual(main())


def test_requests_that_come_while_a_group_syncs_share_the_next_sync() -> None:
    async def main() -> tuple[list[float], int]:
        clock = VirtualClock()
        owner = Owner(LedgerLimits(), clock, sync_seconds=1.0)
        link = LedgerLink(owner, 0.0, Whereabouts(1, 0))
        at = clock.monotonic()
        before = (await link.stats()).commits_total

        async def attach(number: int) -> float:
            await asyncio.sleep(number / 10)
            await link.attach(Attach(run_id=RunId(f"run_{number}"), incarnation="crd_a"))
            return clock.monotonic() - at

        ended = await asyncio.gather(*map(attach, range(4)))
        commits = (await link.stats()).commits_total - before
        await owner.close()
        return ended, commits

    ended, commits = run_virtual(main())
    assert ended == pytest.approx([1.0, 2.0, 2.0, 2.0])
    assert commits == 3, "one for each group, and one for the question"


def test_a_poll_waits_its_time_out_and_a_refusal_comes_back_typed() -> None:
    async def main() -> float:
        clock = VirtualClock()
        owner = Owner(LedgerLimits(), clock, sync_seconds=0.01)
        link = LedgerLink(owner, 0.5, Whereabouts(1, 0))
        worker = WorkerId("wrk_a")
        nobodys = EventsRequest(run_id=RunId("run_0"), fence=Fence(1), after=0, wait_seconds=9.0)
        with pytest.raises(LedgerFenced):
            await link.events(nobodys)
        await link.enroll(Enroll(worker_id=worker, name="w0", slots={"fast": 1}))
        began = clock.monotonic()
        reply = await link.lease(
            LeaseRequest(worker_id=worker, slots={"fast": 1}, wait_seconds=3.0)
        )
        assert not reply.leases
        ended = clock.monotonic()
        await owner.close()
        return ended - began

    assert run_virtual(main()) == pytest.approx(0.5 + 3.0 + 0.5, abs=0.02)
