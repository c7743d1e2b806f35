"""The durable journal of deliveries of one partition: the book on disk and in memory, in step.

It is owned like a partition of a run of its own, ``RUN:groups``, so that whoever takes the run over
fences the trainer before; listings of rollouts do not see it.
"""

import asyncio
from collections.abc import Callable
from typing import Self

from stoker.broker.base import (
    Append,
    AppendBatch,
    AppendDisposition,
    Attach,
    JournalRequest,
    Ledger,
)
from stoker.coordinator.delivery_book import DeliveryBook, read_book
from stoker.errors import LedgerRefused, StateRefused
from stoker.model.deliveries import DeliveryEvent, Rewound, decode_delivery, encode_delivery
from stoker.model.ids import Fence, RolloutId, RunId
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import declare, reach

DELIVERY_BEFORE = declare("trainer.delivery.before", "a hand-out or commit is not yet sent")
DELIVERY_AFTER = declare("trainer.delivery.after", "a hand-out or commit is on disk, untold")

_READ_MAX = 50_000
"""Events asked for at once."""


class DeliveryLog:
    """Appends events and keeps the book."""

    def __init__(self, ledger: Ledger, run_id: RunId, partition: str, fence: Fence) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._partition = partition
        self._fence = fence
        self._journal = RolloutId(f"dlv_{partition}")
        self._turn = asyncio.Lock()
        self._writing: set[asyncio.Task[None]] = set()
        self.book = DeliveryBook()

    @classmethod
    async def open(cls, ledger: Ledger, run_id: RunId, partition: str) -> Self:
        """Own the journal and read it; whoever owned it before can write no more."""
        name = RunId(f"{run_id}:groups")
        attached = await ledger.attach(
            Attach(run_id=name, partition=partition, incarnation=fresh_id("crd_"))
        )
        log = cls(ledger, name, partition, attached.fence)
        log.book = read_book(await log.events())
        return log

    async def events(self) -> list[DeliveryEvent]:
        """Return every event so far, from the ledger."""
        found: list[DeliveryEvent] = []
        while True:
            reply = await self._ledger.journal(
                JournalRequest(
                    run_id=self._run_id,
                    rollout_id=self._journal,
                    after=len(found),
                    limit=_READ_MAX,
                )
            )
            found += map(decode_delivery, reply.events)
            if len(reply.events) < _READ_MAX:
                return found

    async def require(self, position: int, digest: str) -> None:
        """Check that the first ``position`` events are those of ``digest``.

        Raises:
            StateRefused: this ledger has another past, perhaps from a backup.
        """
        events = await self.events()
        if position > len(events) or read_book(events[:position]).digest != digest:
            raise StateRefused(
                f"this state covers {position} events of {self._run_id}, and the ledger has "
                f"{len(events)} or others; nothing was changed; was the ledger restored from a "
                "backup? Use a state saved before that, or begin another run"
            )

    async def append(self, event: DeliveryEvent, ended: Callable[[], None] = lambda: None) -> None:
        """Write ``event`` and take it into the book; ``ended`` is called when that is over.

        However it ended, and also where whoever waits here was cancelled.

        Raises:
            LedgerFenced: another coordinator has taken the run over; nothing was written.
            LedgerUnavailable: the ledger cannot be reached.

        **Durability:** synced when this returns.
        **Cancellation:** it is written all the same.
        """
        writing = asyncio.create_task(self._append(event))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        writing.add_done_callback(lambda _: ended())
        await asyncio.shield(writing)

    async def _append(self, event: DeliveryEvent) -> None:
        async with self._turn:
            then = None
            if isinstance(event, Rewound):
                then = read_book((await self.events())[: event.position]).standing()
            one = Append(
                rollout_id=self._journal,
                expected_seq=self.book.position,
                events=(encode_delivery(event),),
            )
            reach(DELIVERY_BEFORE)
            reply = await self._ledger.append(
                AppendBatch(
                    run_id=self._run_id,
                    partition=self._partition,
                    fence=self._fence,
                    appends=(one,),
                    sync=True,
                )
            )
            if reply.replies[0].disposition is AppendDisposition.CONFLICT:
                raise LedgerRefused(
                    f"the journal of deliveries {self._run_id} has {reply.replies[0].seq} entries "
                    f"where this trainer knows {self.book.position}; nothing was written"
                )
            reach(DELIVERY_AFTER)
            self.book.apply(event, then)
