"""Power cuts of a ledger: a seeded workload, what its replies promised, and what images must hold.

An image is judged twice. Its whole content must be one of the states that some commit left, so
nothing is half there; and it must hold everything that replies had promised by then.
"""

import random
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from stoker.broker.base import (
    Append,
    AppendBatch,
    AppendBatchReply,
    AppendDisposition,
    AppendReply,
    Attach,
    Attached,
    Cancel,
    CancelDisposition,
    CancelReply,
    CompleteDisposition,
    CompleteReply,
    CompleteRequest,
    Durability,
    Enroll,
    EventsReply,
    EventsRequest,
    HeartbeatRequest,
    HoldReply,
    HoldVerdict,
    Lease,
    LeaseReply,
    LeaseRequest,
    LedgerEventKind,
    LedgerLimits,
    ReleaseRequest,
    Request,
    StartRequest,
    SubmitDisposition,
)
from stoker.broker.books import COUNTER_BITS
from stoker.broker.envelope import Answer, Call, decode_answer, decode_incoming, encode
from stoker.broker.place import DATABASE
from stoker.broker.rows import Row
from stoker.broker.service import LedgerService, Reply
from stoker.broker.store_sqlite import SqliteStore
from stoker.model.action import Action, ActionState, Effect
from stoker.model.completion import Completion, CompletionStatus
from stoker.model.ids import ActionId, Fence
from stoker.model.value import inline_value
from stoker.seams.clock import Instant
from stoker.wire.frames import FrameDecoder, Hello
from support.disk_trace import Receive, Send
from support.ledger import ROLLOUT, RUN, WORKER, act, action, held
from support.ledger_model import Model
from support.ledger_process import RawPeer

LIMITS = LedgerLimits(lease_seconds=300.0, grace_seconds=300.0)
WAL = f"{DATABASE}-wal"
CANCELLED = CancelDisposition.CANCELLED


class Workload:
    """One coordinator and one worker, which ask for anything a few calls at a time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.fence = Fence(0)
        self.seq = 0
        self.numbers = 0
        self.leases: list[Lease] = []
        self.told: list[ActionId] = []

    def enter(self, peer: RawPeer, incarnation: str) -> None:
        attached = peer.ask(Attach(run_id=RUN, incarnation=incarnation)).reply
        assert isinstance(attached, Attached)
        self.fence = attached.fence
        peer.ask(Enroll(worker_id=WORKER, name="w", slots={"fast": 64}))

    def round(self, peer: RawPeer) -> None:
        """Send a few calls at once, so that one commit carries them; hear their answers."""
        requests = [self._one() for _ in range(self.chance.randint(1, 3))]
        for number, request in enumerate(requests, start=1):
            peer.send(encode(Call(number, request)))
        for _ in requests:
            answer = peer.receive()
            assert isinstance(answer, Answer)
            assert answer.fault is None, answer.fault
            self._hear(requests[answer.call_id - 1], answer.reply)

    def rest(self, peer: RawPeer) -> None:
        """End a life with work in the queue."""
        request = self._append(*self._actions())
        self._hear(request, peer.ask(request).reply)

    def wake(self, peer: RawPeer) -> None:
        """Begin a life by what needs no sync: a fence under the new epoch."""
        before = len(self.leases)
        request = LeaseRequest(worker_id=WORKER, slots={"fast": 1})
        self._hear(request, peer.ask(request).reply)
        assert len(self.leases) == before + 1

    def _one(self) -> Request:
        kinds: dict[str, Callable[[], Request]] = {
            "submit": lambda: self._append(*self._actions()),
            "lease": self._lease,
            "acknowledge": lambda: self._append(acknowledges=tuple(self.told[:4])),
            "events": lambda: EventsRequest(run_id=RUN, fence=self.fence, after=0),
        }
        if self.numbers:
            kinds["cancel"] = self._cancel
        if self.leases:
            some = self.leases[:4]
            kinds |= {
                "start": lambda: StartRequest(worker_id=WORKER, held=held(*some)),
                "beat": lambda: HeartbeatRequest(worker_id=WORKER, held=held(*self.leases)),
                "complete": lambda: CompleteRequest(
                    worker_id=WORKER, completions=self._results(some[:2])
                ),
                "release": lambda: ReleaseRequest(worker_id=WORKER, held=held(some[-1])),
            }
        often = {"submit": 3, "lease": 4, "start": 3, "complete": 4}
        weights = [often.get(kind, 1) for kind in kinds]
        return self.chance.choices(list(kinds.values()), weights)[0]()

    def _lease(self) -> Request:
        return LeaseRequest(worker_id=WORKER, slots={"fast": self.chance.randint(1, 3)})

    def _cancel(self) -> Request:
        ids = (act(self.chance.randrange(self.numbers)),)
        return Cancel(run_id=RUN, fence=self.fence, action_ids=ids, reason="a whim")

    def _append(self, *submits: Action, acknowledges: tuple[ActionId, ...] = ()) -> AppendBatch:
        entries = tuple(
            self.chance.randbytes(self.chance.choice((20, 900)))
            for _ in range(self.chance.randint(1, 2))
        )
        one = Append(
            rollout_id=ROLLOUT,
            expected_seq=self.seq,
            events=entries,
            submits=submits,
            acknowledges=acknowledges,
        )
        self.seq += len(entries)
        return AppendBatch(run_id=RUN, fence=self.fence, appends=(one,))

    def _actions(self) -> Iterator[Action]:
        for _ in range(self.chance.randint(1, 2)):
            said = self.chance.randbytes(self.chance.choice((10, 10, 6_000)))
            effect = self.chance.choice((Effect.PURE, Effect.EXTERNAL))
            yield action(self.numbers, said, effect=effect)
            self.numbers += 1

    def _results(self, leases: list[Lease]) -> tuple[Completion, ...]:
        return tuple(
            Completion(
                action_id=lease.action.action_id,
                fence=lease.fence,
                status=CompletionStatus.OK,
                worker_id=WORKER,
                observation=inline_value(self.chance.randbytes(self.chance.choice((10, 3_000)))),
            )
            for lease in leases
        )

    def _hear(self, request: Request, reply: Reply | None) -> None:
        if isinstance(reply, LeaseReply):
            self.leases += reply.leases
        elif isinstance(request, CompleteRequest | ReleaseRequest):
            ids = (
                {one.action_id for one in request.completions}
                if isinstance(request, CompleteRequest)
                else {one.action_id for one in request.held}
            )
            self.leases = [one for one in self.leases if one.action.action_id not in ids]
        elif isinstance(reply, EventsReply):
            self.told = [e.action_id for e in reply.events if e.kind is LedgerEventKind.COMPLETED]


class Conversation:
    """Requests and replies, cut out of the recorded bytes of the sockets."""

    def __init__(self) -> None:
        self._frames: dict[tuple[int, bool], FrameDecoder] = {}
        self._calls: dict[tuple[int, int], Request] = {}
        self.asked: list[Request] = []
        """What came by the event that was heard last."""

    def hear(self, event: Receive | Send) -> Iterator[tuple[Request, Reply]]:
        """Yield each reply that this event carries, with its request."""
        key = (event.connection, isinstance(event, Send))
        self.asked = []
        for document in self._frames.setdefault(key, FrameDecoder()).feed(event.data):
            if isinstance(event, Receive):
                self._ask(event.connection, document)
                continue
            answer = decode_answer(document)
            if isinstance(answer, Hello) or answer.reply is None:
                continue
            yield self._calls[event.connection, answer.call_id], answer.reply

    def _ask(self, connection: int, document: bytes) -> None:
        try:
            call = decode_incoming(document)
        except msgspec.MsgspecError:
            return  # the hello
        assert isinstance(call, Call)
        self._calls[connection, call.call_id] = call.request
        self.asked.append(call.request)


def must_be_synced(request: Request, reply: Reply) -> bool:
    """Whether DESIGN §4 has this reply follow a sync."""
    if isinstance(request, AppendBatch):
        return request.sync or any(one.submits or one.finished for one in request.appends)
    if isinstance(request, StartRequest):
        return False  # by effect: judged by the images
    if isinstance(reply, EventsReply):
        return any(event.completion is not None for event in reply.events)
    return isinstance(request, CompleteRequest | Cancel | Attach)


class State(msgspec.Struct):
    """What an image holds, read by the production code."""

    epoch: int
    rows: dict[ActionId, Row]
    journal: list[bytes]
    owner: Fence


class Promises:
    """What the replies so far have promised about the disk."""

    def __init__(self) -> None:
        self.journal: dict[int, bytes] = {}
        self.digests: dict[ActionId, str] = {}
        self.results: dict[ActionId, tuple[CompletionStatus, Fence]] = {}
        self.cancelled: set[ActionId] = set()
        self.begun: dict[ActionId, Fence] = {}
        self.owner = Fence(0)
        self.number = 0
        """The highest number ever told: fence, order or event."""
        self._external: set[ActionId] = set()

    def add(self, request: Request, reply: Reply) -> None:  # noqa: C901, PLR0912 - a case a verb
        match request, reply:
            case AppendBatch(appends=appends), AppendBatchReply(replies=said):
                for one, answer in zip(appends, said, strict=True):
                    self._appended(one, answer)
            case CompleteRequest(completions=results), CompleteReply(dispositions=said):
                for result, disposition in zip(results, said, strict=True):
                    if disposition is not CompleteDisposition.STALE:
                        self.results[result.action_id] = (result.status, result.fence)
            case Cancel(), CancelReply(dispositions=ended):
                self.cancelled |= {i for i, how in ended.items() if how is CANCELLED}
            case StartRequest(held=asked), HoldReply(verdicts=verdicts):
                for begun, verdict in zip(asked, verdicts, strict=True):
                    if verdict is HoldVerdict.OK and begun.action_id in self._external:
                        self.begun[begun.action_id] = begun.fence
            case Attach(), Attached(fence=fence):
                self.owner = fence
                self._tell(fence)
            case LeaseRequest(), LeaseReply(leases=leases):
                self._tell(*(lease.fence for lease in leases))
            case EventsRequest(), EventsReply(events=events):
                self._tell(*(event.event_id for event in events))
                for event in events:
                    if event.completion is not None:
                        settled = (event.completion.status, event.completion.fence)
                        self.results[event.action_id] = settled

    def _tell(self, *numbers: int) -> None:
        self.number = max(self.number, *numbers, 0)

    def _appended(self, one: Append, answer: AppendReply) -> None:
        assert answer.disposition is AppendDisposition.APPLIED
        if one.submits:
            self.journal.update(enumerate(one.events, start=one.expected_seq))
        for submitted, said in zip(one.submits, answer.submits, strict=True):
            assert said is SubmitDisposition.ACCEPTED
            self.digests[submitted.action_id] = submitted.digest()
            if submitted.effect is Effect.EXTERNAL:
                self._external.add(submitted.action_id)

    def broken(self, state: State) -> Iterator[str]:  # noqa: C901 - one check a promise
        """Yield every promise that ``state`` does not keep."""
        rows = state.rows
        for seq, entry in self.journal.items():
            if seq >= len(state.journal) or state.journal[seq] != entry:
                yield f"journal entry {seq} was promised and is gone"
        for action_id, digest in self.digests.items():
            if action_id not in rows or rows[action_id].digest != digest:
                yield f"{action_id} was accepted and is gone (I1)"
                return
        for action_id, settled in self.results.items():
            if (rows[action_id].settled_status, rows[action_id].settled_fence) != settled:
                yield f"the result of {action_id} was told and is gone (I2, I13)"
        for action_id in self.cancelled:
            if rows[action_id].settled_status is not CompletionStatus.CANCELLED:
                yield f"{action_id} was cancelled and is not (I10)"
        for action_id, fence in self.begun.items():
            if not _still_begun(rows[action_id], fence):
                yield f"external {action_id} was begun and could begin again (I12)"
        if state.owner < self.owner:
            yield "an earlier coordinator owns the partition again (B7)"
        if self.number >> COUNTER_BITS > state.epoch:
            yield f"epoch {self.number >> COUNTER_BITS} comes back: {self.number} again (I3)"


def _still_begun(row: Row, fence: Fence) -> bool:
    started = row.state is ActionState.STARTED and row.fence == fence
    return started or row.terminal or fence in row.lost_fences


class Reader:
    """Opens images with the production code; an image seen before is not opened again."""

    def __init__(self, limits: LedgerLimits = LIMITS) -> None:
        self._limits = limits
        self._states: dict[bytes, State] = {}
        self.opened = 0

    def read(self, place: Path) -> tuple[bytes, State]:
        """Return a digest of the image's content, and what it holds."""
        self.opened += 1
        store = SqliteStore(place / DATABASE)
        try:
            checked = store._db.execute("PRAGMA integrity_check").fetchall()
            assert checked == [("ok",)], checked
            digest = _dump(store)
            if digest not in self._states:
                self._states[digest] = self._judged(store)
        finally:
            store.close()
        return digest, self._states[digest]

    def _judged(self, store: SqliteStore) -> State:
        meta = store.meta()
        if meta is None:
            return State(0, {}, [], Fence(0))
        rows = {row.action_id: row for row in store.rollout_rows(ROLLOUT)}
        head = store.head(RUN, ROLLOUT)
        journal = store.entries(head.key, after=0, limit=1_000_000) if head else []
        assert head is None or head.seq == len(journal), "the journal has holes"
        owner = store.owner(RUN, "0")
        state = State(meta.epoch, rows, journal, owner.fence if owner else Fence(0))
        self._reopened(store, state)
        return state

    def _reopened(self, store: SqliteStore, state: State) -> None:
        """Open the ledger on it: rows as the model wants them, a fence above all in the file."""
        service = LedgerService(store, self._limits, Durability.POWER_SAFE)
        now = Instant(10.0, 1_700_000_000.0)
        service.open(now, boot_id="another", lineage="lin_other")
        service.begin()
        attached = service.handle(Attach(run_id=RUN, incarnation="after the cut"), now)
        assert isinstance(attached, Attached)
        events = service.handle(EventsRequest(run_id=RUN, fence=attached.fence, after=0), now)
        assert isinstance(events, EventsReply)
        model = Model(self._limits)
        for row in state.rows.values():
            assert row.action.effect is not Effect.EXTERNAL or row.attempts <= 1, (
                "begun twice (I12)"
            )
            model.effects[row.action_id] = {Fence(n + 1) for n in range(row.attempts)}
        model.check(list(state.rows.values()), list(events.events), power_lost=True)
        numbers = [e.event_id for e in events.events] + [state.owner]
        numbers += [n for r in state.rows.values() for n in (r.order, r.fence, *r.lost_fences)]
        assert attached.fence > max(numbers), "a fence came back (I3)"
        service.settle(now)
        service.commit()


def _dump(store: SqliteStore) -> bytes:
    whole = blake2b(digest_size=16)
    tables = store._db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY 1")
    for (table,) in list(tables):
        for columns in sorted(map(repr, store._db.execute(f'SELECT * FROM "{table}"'))):
            whole.update(f"{table} {columns}\n".encode())
    return whole.digest()
