"""Reading a journal back: from events to where a rollout stands.

One pass gives the turns a host replays, the calls still outstanding, and everything the coordinator
itself keeps per rollout. Invariant: what is rebuilt here equals what the live coordinator held when
the last event was journalled (tested by rebuilding after every append).
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from stoker.errors import InternalError
from stoker.model.events import (
    Admitted,
    Branched,
    Delivered,
    Dropped,
    Finished,
    Issued,
    JournalEvent,
    Late,
    Recovered,
    Reissued,
    Restored,
    Tainted,
    Verb,
    Withdrawn,
)
from stoker.model.faults import FaultRecord
from stoker.model.generation import GenerateArguments, Generation
from stoker.model.ids import CallPath
from stoker.model.value import Value
from stoker.rollout.messages import Became, RecordedCall, RecordedResult, RecordedTurn, StartRollout

Fetch = Callable[[Value], bytes]
"""Gives the content of a value."""


class Standing(msgspec.Struct, kw_only=True):
    """Where a rollout stands."""

    admitted: Admitted
    seq: int = 0
    turns: list[RecordedTurn] = []
    outstanding: dict[CallPath, Issued] = {}
    issued: dict[CallPath, Issued] = {}
    """Every call, for environments and their logs."""
    delivered: list[Delivered] = []
    tainted: dict[str, FaultRecord] = {}
    """Unrecovered faults by code."""
    restored: dict[CallPath, Restored] = {}
    """Environment path → its latest restoration."""
    reissued: set[CallPath] = set()
    late: list[Late] = []
    issued_at: dict[CallPath, float] = {}
    """Wall time of the turn in which a call was issued."""
    ran_at: dict[CallPath, float] = {}
    """``ran`` of that turn."""
    at: float = 0.0
    """Wall time of the latest turn."""
    paused: float = 0.0
    """Seconds since its admission in which no coordinator had it."""
    actions: int = 0
    finished: Finished | None = None
    became: list[Became] = []
    """Of a branch: who it was at first, and from which turn on it was another."""
    shared: int = 0
    """How many results were delivered to whoever it was branched off."""

    @property
    def ran(self) -> float:
        """Seconds of its own clock up to the latest turn: pauses of its run do not count."""
        return max(0.0, self.at - self.admitted.at - self.paused)


def rebuild(events: Iterable[JournalEvent], fetch: Fetch) -> Standing:
    """Return where the rollout stands after ``events``."""
    iterator = iter(events)
    first = next(iterator, None)
    if not isinstance(first, Admitted):
        raise InternalError("a journal does not begin with its admission")
    standing = Standing(admitted=first, seq=1, at=first.at)
    if first.branched is not msgspec.UNSET:
        standing.became.append(Became(turn=0, identity=first.branched.root))
    for event in iterator:
        standing.seq += 1
        if isinstance(event, Branched):
            _branch(standing, event)
        else:
            _apply(standing, event, fetch)
    return standing


def check_of(standing: Standing, turns: Sequence[RecordedTurn]) -> StartRollout:
    """Return what makes a host replay ``turns`` of the rollout and carry nothing out."""
    admitted = standing.admitted
    return StartRollout(
        rollout_id=admitted.rollout_id,
        task=admitted.task,
        epoch=admitted.epoch,
        index=admitted.index,
        group_id=admitted.group_id,
        at=admitted.at,
        history=tuple(turns),
        became=tuple(standing.became),
        checking=True,
    )


def _apply(standing: Standing, event: JournalEvent, fetch: Fetch) -> None:
    match event:
        case Delivered():
            _deliver(standing, event, fetch)
        case Issued():
            standing.issued_at[event.path] = standing.at
            standing.ran_at[event.path] = standing.ran
            standing.outstanding[event.path] = event
            standing.issued[event.path] = event
            standing.actions += event.action_id is not None
            call = RecordedCall(
                path=event.path, verb=event.verb, digest=event.digest, arguments=event.arguments
            )
            turn = _current_turn(standing)
            standing.turns[-1] = msgspec.structs.replace(
                turn, calls=(*turn.calls, call), open=False
            )
        case Withdrawn():
            standing.outstanding.pop(event.path, None)
            turn = _current_turn(standing)
            standing.turns[-1] = msgspec.structs.replace(
                turn, withdrawn=(*turn.withdrawn, event.path), open=False
            )
        case Dropped():
            standing.outstanding.pop(event.path, None)
        case Tainted():
            standing.tainted[event.fault.code] = event.fault
        case Recovered():
            standing.tainted.pop(event.code, None)
        case Restored() | Reissued() | Late():
            _told(standing, event)
        case Finished():
            _finish(standing, event)
        case _:
            pass


def _told(standing: Standing, event: Restored | Reissued | Late) -> None:
    """Take in what the coordinator wrote down of itself, outside of turns."""
    match event:
        case Restored():
            standing.restored[event.path] = event
        case Reissued():
            standing.reissued.add(event.path)
        case Late():
            standing.late.append(event)


def _deliver(standing: Standing, event: Delivered, fetch: Fetch) -> None:
    standing.outstanding.pop(event.path, None)
    standing.delivered.append(event)
    if event.paused_seconds is not msgspec.UNSET and len(standing.delivered) > standing.shared:
        standing.paused += event.paused_seconds
    content = None if event.value is None else fetch(event.value)
    result = RecordedResult(path=event.path, value=content, fault=event.fault, at=event.at)
    is_open = len(standing.delivered) == standing.shared
    standing.turns.append(RecordedTurn(result=result, calls=(), open=is_open))
    standing.at = event.at


def _branch(standing: Standing, event: Branched) -> None:
    became = Became(turn=len(standing.turns), identity=event.identity)
    standing.became.append(became)
    standing.shared = len(standing.delivered) + 1  # the next one too
    standing.actions = 0
    standing.at = event.identity.at
    standing.paused = 0.0  # a clock of its own


def _finish(standing: Standing, event: Finished) -> None:
    standing.finished = event
    if standing.turns:
        standing.turns[-1] = msgspec.structs.replace(standing.turns[-1], open=False)


def _current_turn(standing: Standing) -> RecordedTurn:
    if not standing.turns:
        standing.turns.append(RecordedTurn(result=None, calls=()))
    return standing.turns[-1]


def generations(standing: Standing, fetch: Fetch) -> Iterable[tuple[CallPath, GenerateArguments]]:
    """Yield every model call issued so far, in order."""
    for path, issued in standing.issued.items():
        if issued.verb is Verb.GENERATE:
            yield path, msgspec.msgpack.decode(fetch(issued.arguments), type=GenerateArguments)


def returned(standing: Standing, fetch: Fetch) -> Iterable[tuple[CallPath, Generation]]:
    """Yield every model call that was delivered without a fault."""
    for delivered in standing.delivered:
        issued = standing.issued[delivered.path]
        if issued.verb is Verb.GENERATE and delivered.value is not None:
            yield delivered.path, msgspec.msgpack.decode(fetch(delivered.value), type=Generation)
