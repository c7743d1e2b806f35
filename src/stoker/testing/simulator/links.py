"""What lies between the processes of a run, in one process: every message through its codec.

A message leaves encoded and framed, takes its time, and is decoded where it arrives; order is kept.
The program host is the production one (``rollout.host.Host``) without its process, its socket, its
watchdog's thread and its threads for ``ctx.local``: a program that spins here holds the simulation.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

import msgspec

from stoker.broker.base import Durability, LedgerLimits, Request
from stoker.broker.envelope import Answer, Call, Forget, decode_answer, decode_incoming
from stoker.broker.exchange import Answer as Outcome
from stoker.broker.exchange import Pending
from stoker.broker.memory import MemoryLedger
from stoker.broker.service import LedgerService, Reply
from stoker.broker.store_memory import MemoryStore
from stoker.broker.verbs import LedgerVerbs
from stoker.errors import StokerError, from_record
from stoker.rollout.host import Host
from stoker.rollout.messages import FromHost, ToHost
from stoker.rollout.program import Rollout
from stoker.seams.clock import Clock
from stoker.testing.simulator.whereabouts import Whereabouts
from stoker.wire.frames import FrameDecoder, Hello, frame

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_to_host: Callable[[bytes], ToHost] = msgspec.msgpack.Decoder(ToHost).decode
_from_host: Callable[[bytes], FromHost] = msgspec.msgpack.Decoder(FromHost).decode


class Pipe(Generic[M]):
    """One direction of a connection: what is sent arrives ``seconds`` later, in order."""

    def __init__(
        self, seconds: float, decode: Callable[[bytes], M], deliver: Callable[[M], None]
    ) -> None:
        self._seconds = seconds
        self._decode = decode
        self._deliver = deliver
        self._under_way: deque[bytes] = deque()
        self._frames = FrameDecoder()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message.

        Raises:
            WireViolation: it is too large; nothing was sent.
        """
        self._under_way.append(frame(_encoder.encode(message)))
        asyncio.get_running_loop().call_later(self._seconds, self._arrive)

    def _arrive(self) -> None:
        for document in self._frames.feed(self._under_way.popleft()):
            self._deliver(self._decode(document))


class Owner(MemoryLedger):
    """The ledger's owner: the production service and exchange on the store in memory.

    As the owner process does it, requests gather while a group is synced and make the next one, and
    replies leave when their group's sync has ended.
    """

    def __init__(self, limits: LedgerLimits, clock: Clock, sync_seconds: float) -> None:
        self._store = MemoryStore()
        self._sync_seconds = sync_seconds
        self._gathering: list[Pending] = []
        self._leaving: list[Callable[[], None]] | None = None
        self._busy = self._again = False
        service = LedgerService(self._store, limits, Durability.POWER_SAFE)
        super().__init__(limits, clock, service=service)

    def _run(self, group: list[Pending]) -> None:
        for pending in group:
            pending.answer = self._after_sync(pending.answer)
        self._gathering += group
        self._again = self._busy  # also without requests: time may have something to do
        if not self._busy:
            self._busy = True
            asyncio.get_running_loop().call_soon(self._carry_out)

    def _after_sync(self, tell: Callable[[Outcome], None]) -> Callable[[Outcome], None]:
        def told(outcome: Outcome) -> None:
            if self._leaving is None:
                tell(outcome)
            else:
                self._leaving.append(lambda: tell(outcome))

        return told

    def _carry_out(self) -> None:
        group, self._gathering, self._again = self._gathering, [], False
        syncs, self._leaving = self._store.syncs, []
        super()._run(group)
        leaving, self._leaving = self._leaving, None
        seconds = self._sync_seconds * (self._store.syncs - syncs)
        asyncio.get_running_loop().call_later(seconds, self._synced, leaving)

    def _synced(self, leaving: list[Callable[[], None]]) -> None:
        for leave in leaving:
            leave()
        self._busy = self._again
        if self._busy:
            asyncio.get_running_loop().call_soon(self._carry_out)


class LedgerLink(LedgerVerbs):
    """A client of the owner at the other end of a connection."""

    def __init__(self, owner: Owner, seconds: float, where: Whereabouts) -> None:
        self._owner = owner
        self._where = where
        self._there = Pipe(seconds, decode_incoming, self._come)
        self._back = Pipe(seconds, decode_answer, self._heard)
        self._calls = 0
        self._asked: dict[int, tuple[Request, asyncio.Future[Reply]]] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}

    async def ask(self, request: Request) -> Reply:
        """Carry ``request`` to the owner and its reply back.

        **Cancellation:** the owner is told that nobody waits.
        """
        self._calls += 1
        number = self._calls
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked[number] = request, future
        self._where.asked(request)
        self._there.send(Call(number, request))
        try:
            return await future
        except asyncio.CancelledError:
            self._there.send(Forget(number))
            raise
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        """Hang up: the owner is told that nobody waits."""
        for task in list(self._serving.values()):
            task.cancel()

    def _come(self, message: Call | Forget) -> None:
        if isinstance(message, Call):
            task = asyncio.create_task(self._serve(message), name=f"call {message.call_id}")
            self._serving[message.call_id] = task
        elif (task_left := self._serving.get(message.call_id)) is not None:
            task_left.cancel()

    async def _serve(self, call: Call) -> None:
        try:
            reply = await self._owner.ask(call.request)
        except StokerError as error:
            self._back.send(Answer(call.call_id, fault=error.record()))
        else:
            self._where.decided(call.request, reply)
            self._back.send(Answer(call.call_id, reply=reply))
        finally:
            del self._serving[call.call_id]

    def _heard(self, answer: Hello | Answer) -> None:
        assert isinstance(answer, Answer), "nobody greets here"
        request, future = self._asked.get(answer.call_id, (None, None))
        if request is None or future is None or future.done():
            return
        if answer.fault is not None:
            future.set_exception(from_record(answer.fault))
        elif answer.reply is not None:
            self._where.answered(request, answer.reply)
            future.set_result(answer.reply)


class HostInProcess:
    """A program host and the channel to it (``coordinator.hosts.HostLink``)."""

    pid = 0

    def __init__(
        self, program: Rollout, digest: str, seconds: float, clock: Clock, where: Whereabouts
    ) -> None:
        self._where = where
        self._said: asyncio.Queue[FromHost | None] = asyncio.Queue()
        self._back = Pipe(seconds, _from_host, self._heard)
        self._host = Host(self._back, stuck_seconds=0.0, clock=clock, threads=_AtOnce())
        self._there = Pipe(seconds, _to_host, self._host.handle)
        self._host.take(program, digest, hash_seed=0, pid=self.pid)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message (``ToHost``)."""
        self._there.send(message)
        self._where.to_host(message)

    async def messages(self) -> AsyncIterator[FromHost]:
        """Yield what it says until it ends."""
        while (message := await self._said.get()) is not None:
            yield message

    async def end(self) -> None:
        """Throw its rollouts away."""
        self._host.close()
        self._said.put_nowait(None)

    def _heard(self, message: FromHost) -> None:
        self._where.from_host(message)
        self._said.put_nowait(message)


class _AtOnce(Executor):
    """Runs what ``ctx.local`` is given here and now."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":  # noqa: ANN401 - any function
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done
