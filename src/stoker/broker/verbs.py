"""The ``Ledger`` protocol over one asynchronous ``ask``: what memory engine and client share."""

from typing import TypeVar

from msgspec.structs import replace

from stoker.broker.base import (
    ActionsReply,
    ActionsRequest,
    AppendBatch,
    AppendBatchReply,
    Attach,
    Attached,
    Cancel,
    CancelReply,
    Capabilities,
    CapabilitiesRequest,
    ClaimReply,
    ClaimRequest,
    CompleteReply,
    CompleteRequest,
    DeadLettersRequest,
    Enroll,
    Enrolled,
    EventsReply,
    EventsRequest,
    HeartbeatRequest,
    HoldReply,
    JournalReply,
    JournalRequest,
    LeaseReply,
    LeaseRequest,
    ReleaseRequest,
    Request,
    RolloutsReply,
    RolloutsRequest,
    StartRequest,
    StatsReply,
    StatsRequest,
    TicketsReply,
    TicketsRequest,
)
from stoker.broker.operating import (
    AuditReply,
    AuditRequest,
    CompactReply,
    CompactRequest,
    CopyReply,
    CopyRequest,
    SettledDead,
    SettleDead,
)
from stoker.broker.service import Reply
from stoker.errors import WireViolation

R = TypeVar("R")


class LedgerVerbs:
    """Every verb of ``Ledger``, each as one request and one reply."""

    async def ask(self, request: Request) -> Reply:
        """Carry ``request`` to the ledger and its reply back."""
        raise NotImplementedError

    async def _verb(self, request: Request, expected: type[R]) -> R:
        reply = await self.ask(request)
        if not isinstance(reply, expected):
            raise WireViolation(
                f"the ledger answered {type(request).__name__} with {type(reply).__name__}; "
                "the answer was dropped; check that both sides are of one version"
            )
        return reply

    async def attach(self, request: Attach) -> Attached:
        """Own a partition."""
        return await self._verb(request, Attached)

    async def append(self, request: AppendBatch) -> AppendBatchReply:
        """Write journal entries, submit and acknowledge, in one transaction."""
        return await self._verb(request, AppendBatchReply)

    async def events(self, request: EventsRequest) -> EventsReply:
        """Wait for what happened to my actions."""
        return await self._verb(request, EventsReply)

    async def cancel(self, request: Cancel) -> CancelReply:
        """End actions."""
        return await self._verb(request, CancelReply)

    async def enroll(self, request: Enroll) -> Enrolled:
        """Introduce a worker incarnation."""
        return await self._verb(request, Enrolled)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Wait for work. **Cancellation:** leases granted meanwhile are given back."""
        return await self._verb(request, LeaseReply)

    async def tickets(self, request: TicketsRequest) -> TicketsReply:
        """Wait for what a queue of the team's own should carry."""
        return await self._verb(request, TicketsReply)

    async def start(self, request: StartRequest) -> HoldReply:
        """Ask to begin work."""
        return await self._verb(request, HoldReply)

    async def heartbeat(self, request: HeartbeatRequest) -> HoldReply:
        """Keep leases alive."""
        return await self._verb(request, HoldReply)

    async def complete(self, request: CompleteRequest) -> CompleteReply:
        """Hand in results."""
        return await self._verb(request, CompleteReply)

    async def release(self, request: ReleaseRequest) -> HoldReply:
        """Give back leases."""
        return await self._verb(request, HoldReply)

    async def journal(self, request: JournalRequest) -> JournalReply:
        """Read a rollout's journal, however long it is."""
        reply = await self._verb(request, JournalReply)
        found = list(reply.events)
        while reply.more:
            after, limit = request.after + len(found), request.limit - len(found)
            reply = await self._verb(replace(request, after=after, limit=limit), JournalReply)
            found += reply.events
        return JournalReply(events=tuple(found))

    async def rollouts(self, request: RolloutsRequest) -> RolloutsReply:
        """List rollouts, however many frames that takes."""
        reply = await self._verb(request, RolloutsReply)
        found = list(reply.rollouts)
        while reply.more:
            after, limit = found[-1].rollout_id, request.limit - len(found)
            reply = await self._verb(replace(request, after=after, limit=limit), RolloutsReply)
            found += reply.rollouts
        return RolloutsReply(rollouts=tuple(found))

    async def actions(self, request: ActionsRequest) -> ActionsReply:
        """Look at actions."""
        return await self._verb(request, ActionsReply)

    async def dead_letters(self, request: DeadLettersRequest) -> ActionsReply:
        """List dead letters, with every cause."""
        return await self._verb(request, ActionsReply)

    async def copy_some(self, request: CopyRequest) -> CopyReply:
        """Copy some more of the database."""
        return await self._verb(request, CopyReply)

    async def compact(self) -> CompactReply:
        """Give unused pages back to the disk."""
        return await self._verb(CompactRequest(), CompactReply)

    async def settle_dead(self, request: SettleDead) -> SettledDead:
        """Requeue or drop dead letters."""
        return await self._verb(request, SettledDead)

    async def audit(self, request: AuditRequest) -> AuditReply:
        """Ask what operators did."""
        return await self._verb(request, AuditReply)

    async def stats(self) -> StatsReply:
        """Count."""
        return await self._verb(StatsRequest(), StatsReply)

    async def claim(self, request: ClaimRequest) -> ClaimReply:
        """Say what one uses of model servers, and hear what others do."""
        return await self._verb(request, ClaimReply)

    async def capabilities(self) -> Capabilities:
        """Say what is promised."""
        return await self._verb(CapabilitiesRequest(), Capabilities)
