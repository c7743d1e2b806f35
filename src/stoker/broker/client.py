"""The ledger's client: one connection, requests pipelined in call order, owner respawned on need.

When the connection breaks, the client connects again (starting an owner where none lives) and sends
every unanswered request once more, in order: all verbs are idempotent. Leases whose reply was lost
are delivered again under the same fence; a lease that the caller has already seen is left out.
After ``RECONNECT_SECONDS`` without an owner every unanswered call fails with ``LedgerUnavailable``;
the next call tries anew.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from stoker.broker.base import (
    Durability,
    Held,
    LeaseReply,
    LeaseRequest,
    LedgerLimits,
    Poll,
    ReleaseRequest,
    Request,
)
from stoker.broker.envelope import (
    CONNECTION,
    Answer,
    Call,
    Forget,
    encode,
)
from stoker.broker.link import Link
from stoker.broker.network import Address, Remote, notice_silence
from stoker.broker.place import DATABASE, check_directory, owner_pid
from stoker.broker.schema import check_version
from stoker.broker.service import Reply
from stoker.broker.spawn import (
    Database,
    OwnerSettings,
    known_database,
    published_socket,
    spawn_owner,
)
from stoker.broker.verbs import LedgerVerbs
from stoker.errors import ConfigInvalid, LedgerUnavailable, StokerError, WireViolation, from_record
from stoker.model.ids import Fence
from stoker.wire.frames import PROTOCOL_VERSION, Hello, frame

__all__ = ["RECONNECT_SECONDS", "LedgerClient", "OwnerSettings", "connect", "owner_pid"]

RECONNECT_SECONDS = 30.0
"""How long unanswered calls wait for an owner."""

_RETRY_SECONDS = 0.02
_GOODBYE_SECONDS = 1.0
_GREETING_SECONDS = 5.0
"""How long one of several gateways has to greet; its database may be away, another's not."""
_FENCES_KEPT = 4096


async def connect(
    directory: Path | tuple[Path, ...],
    *,
    role: str,
    limits: LedgerLimits | None = None,
    durability: Durability = Durability.POWER_SAFE,
    idle_exit_seconds: float = 60.0,
    spawn: bool = True,
    elsewhere: Database | Remote | None = None,
) -> "LedgerClient":
    """Return a client of ``directory``'s ledger; starts its owner when none lives.

    An owner that already lives keeps the limits and durability it was started with; ask
    ``capabilities``. ``spawn`` false: only use an owner that somebody else starts. Several
    directories: gateways to one ledger; when one does not answer, the next is asked. ``elsewhere``:
    a database that holds the ledger, so that what is started is a gateway to it; or gateways on
    other machines, asked instead of ``directory``: then nothing is started.

    Raises:
        ConfigInvalid: the key of ``elsewhere`` cannot be used, or its gateways have another.
        RunDirectoryUnusable: the directory cannot hold a ledger.
        LedgerTooNew: a newer Stoker made it.
        LedgerUnavailable: no owner answered within ``RECONNECT_SECONDS``.
    **Cancellation:** nothing is left behind but perhaps an idle owner, which ends by itself.
    """
    directories = directory if isinstance(directory, tuple) else (directory,)
    if isinstance(elsewhere, Remote):
        return await _opened(LedgerClient(elsewhere.addresses, role, None, elsewhere.context()))
    for one in directories if spawn else ():
        check_directory(one)
        check_version(one / DATABASE)
    settings = OwnerSettings(
        limits=limits or LedgerLimits(),
        durability=durability,
        idle_exit_seconds=idle_exit_seconds,
        database=elsewhere or known_database(directories[0]),
    )
    return await _opened(LedgerClient(directories, role, settings if spawn else None))


async def _opened(client: "LedgerClient") -> "LedgerClient":
    try:
        await client.capabilities()
    except BaseException:
        await client.close()
        raise
    return client


class _Sent:
    """One call that waits for its answer."""

    __slots__ = ("abandoned", "future", "request", "resent")

    def __init__(self, request: Request, future: "asyncio.Future[Reply]") -> None:
        self.request = request
        self.future = future
        self.resent = False
        """Was written once; writing it again is a repetition."""
        self.abandoned = False
        """Its caller was cancelled; leases that still come are given back."""


class LedgerClient(LedgerVerbs):
    """One peer of a ledger's owner. Use from one event loop."""

    def __init__(
        self,
        places: Sequence[Path | Address],
        role: str,
        settings: OwnerSettings | None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._places = deque(
            place.absolute() if isinstance(place, Path) else place for place in places
        )
        """Where to connect; the first is asked first."""
        self._context = context
        self._role = role
        self._settings = settings
        self._calls: dict[int, _Sent] = {}
        self._last_id = CONNECTION
        self._link: Link | None = None
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._lineage = ""
        self._fences: dict[Fence, None] = {}
        """Under which leases came, oldest first."""

    @property
    def connected(self) -> bool:
        """Whether an owner is on the other end now."""
        return self._link is not None

    async def ask(self, request: Request) -> Reply:
        """Send ``request`` and return its reply.

        **Cancellation:** a poll is withdrawn and leases that cross with it are given back; any
        other request may still be carried out.
        """
        if self._closed:
            raise LedgerUnavailable("this client was closed; nothing was sent")
        sent = _Sent(request, asyncio.get_running_loop().create_future())
        call_id = self._send(sent)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="ledger-client")
        try:
            return await sent.future
        except asyncio.CancelledError:
            self._withdraw(call_id, sent)
            raise

    def _send(self, sent: _Sent) -> int:
        self._last_id += 1
        document = frame(encode(Call(self._last_id, sent.request)))  # raises before registering
        self._calls[self._last_id] = sent
        self._wanted.set()
        if self._link is not None:
            self._link.write(document)
            sent.resent = True
        return self._last_id

    def _withdraw(self, call_id: int, sent: _Sent) -> None:
        if not isinstance(sent.request, Poll):
            return
        if call_id in self._calls:
            sent.abandoned = True
            if self._link is not None:
                self._link.write(frame(encode(Forget(call_id))))
        elif sent.future.done() and not sent.future.cancelled() and not sent.future.exception():
            self._give_back(sent.request, sent.future.result())

    def _give_back(self, request: Request, reply: Reply) -> None:
        if isinstance(request, LeaseRequest) and isinstance(reply, LeaseReply) and reply.leases:
            held = tuple(Held(one.action.action_id, one.fence) for one in reply.leases)
            future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            future.add_done_callback(_look_away)
            self._send(_Sent(ReleaseRequest(worker_id=request.worker_id, held=held), future))

    # --- the connection

    async def _run(self) -> None:
        while not self._closed:
            try:
                async with asyncio.timeout(RECONNECT_SECONDS):
                    link = await self._connect()
            except (StokerError, TimeoutError) as error:
                self._fail_all(error)
                self._wanted.clear()
                await self._wanted.wait()
                continue
            await asyncio.wait({link.over})  # a wait, so that our cancellation leaves it be
            wrong = link.over.result()
            if wrong is not None:
                self._fail_all(wrong)
            self._link = None

    async def _connect(self) -> Link:
        while True:
            place = self._places[0]
            greeted: asyncio.Future[Hello | Answer] = asyncio.get_running_loop().create_future()
            try:
                link = await self._reach(place, greeted)
            except ssl.SSLCertVerificationError:
                raise ConfigInvalid(
                    f"what listens on {place} does not hold the key of ledger.gateway_key; nothing "
                    "was sent; copy the key that the gateway was started with"
                ) from None
            except OSError:
                if self._settings is not None and isinstance(place, Path):
                    await asyncio.to_thread(spawn_owner, place, self._settings)
                self._places.rotate(-1)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            try:
                if await self._greet(link, greeted):
                    return link
            except BaseException:
                link.close()
                raise
            link.close()
            self._places.rotate(-1)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _reach(
        self, place: Path | Address, greeted: "asyncio.Future[Hello | Answer]"
    ) -> Link:
        def make() -> Link:
            return Link(heard)

        def heard(message: Hello | Answer) -> None:
            if not greeted.done():
                greeted.set_result(message)
            elif isinstance(message, Answer):
                self._answered(message)

        loop = asyncio.get_running_loop()
        if isinstance(place, Address):
            transport, link = await loop.create_connection(
                make,
                place.host,
                place.port,
                ssl=self._context,
                ssl_shutdown_timeout=_GOODBYE_SECONDS,
            )
            notice_silence(transport.get_extra_info("socket"))
            return link
        path = published_socket(place)
        if path is None:
            raise FileNotFoundError
        _, link = await loop.create_unix_connection(make, str(path))
        return link

    async def _greet(self, link: Link, greeted: "asyncio.Future[Hello | Answer]") -> bool:
        """Exchange hellos and send what waits; ``False``: ask another."""
        hello = Hello(protocol=PROTOCOL_VERSION, role=self._role, lineage=self._lineage)
        link.write(frame(encode(hello)))
        either: set[asyncio.Future[Any]] = {greeted, link.over}
        patience = _GREETING_SECONDS if len(self._places) > 1 else None
        await asyncio.wait(either, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if not greeted.done():
            wrong = link.over.result() if link.over.done() else None
            if wrong is not None:
                raise wrong
            return False
        message = greeted.result()
        if isinstance(message, Answer) and message.fault is not None:
            raise from_record(message.fault)
        if not isinstance(message, Hello) or message.protocol != PROTOCOL_VERSION:
            raise WireViolation(
                f"what listens for {self._places[0]} is not a ledger of this version; the "
                "connection was closed; use one version of stoker for a run"
            )
        self._lineage = message.lineage
        self._link = link
        self._resend()
        return True

    def _resend(self) -> None:
        assert self._link is not None, "resending needs a connection"
        for call_id, sent in list(self._calls.items()):
            if sent.abandoned:
                del self._calls[call_id]
                continue
            self._link.write(frame(encode(Call(call_id, sent.request, resent=sent.resent))))
            sent.resent = True

    def _answered(self, answer: Answer) -> None:
        if answer.call_id == CONNECTION:
            assert answer.fault is not None, "the connection itself has only faults to tell"
            self._fail_all(from_record(answer.fault))
            return
        sent = self._calls.pop(answer.call_id, None)
        if sent is None:
            return
        reply = answer.reply
        if isinstance(reply, LeaseReply) and reply.leases:
            reply = self._unseen(reply)
        if sent.abandoned or sent.future.done():
            if reply is not None:
                self._give_back(sent.request, reply)
        elif answer.fault is not None:
            sent.future.set_exception(from_record(answer.fault))
        else:
            assert reply is not None, "an answer is a reply or a fault"
            sent.future.set_result(reply)

    def _unseen(self, reply: LeaseReply) -> LeaseReply:
        """Leave out leases that were delivered before the connection broke."""
        known = self._fences
        fresh = tuple(one for one in reply.leases if one.fence not in known)
        known.update((one.fence, None) for one in fresh)
        for fence in list(islice(known, max(0, len(known) - _FENCES_KEPT))):
            del known[fence]
        return reply if len(fresh) == len(reply.leases) else replace(reply, leases=fresh)

    def _fail_all(self, error: Exception) -> None:
        if not isinstance(error, StokerError):
            error = LedgerUnavailable(
                f"no ledger answered for {self._places[0]} within {RECONNECT_SECONDS:.0f} s; "
                "unanswered requests may or may not have been carried out; look at its ledger.log"
            )
        calls, self._calls = self._calls, {}
        for sent in calls.values():
            if not sent.future.done():
                sent.future.set_exception(error)

    async def close(self) -> None:
        """Hang up; the ledger lives on. Unanswered calls fail."""
        if self._closed:
            return
        self._closed = True
        self._fail_all(LedgerUnavailable("this client was closed before an answer came"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        link, self._link = self._link, None
        if link is not None:
            link.close()
            await asyncio.wait({link.over})


def _look_away(future: "asyncio.Future[Reply]") -> None:
    """Take a result nobody waits for, so that its error is not reported as forgotten."""
    if not future.cancelled():
        future.exception()
