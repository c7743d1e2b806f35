"""One rollout's journal as a timeline: steps, calls, attempts, waits, faults, outcome.

A line stands where a result was delivered, since that order is the journal's meaning; calls that
nobody answered yet come last. Arguments and results are summed up by ``summaries``.
"""

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stoker.cli.output import counted, duration, plain, table
from stoker.cli.summaries import Read, arguments_text, inline_only, result_text
from stoker.cli.text import cell, excerpt
from stoker.model.events import (
    BRANCHED,
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
from stoker.model.ids import CallPath
from stoker.model.value import Value

DETAIL_MAX = 2000
DETAIL_LINES_MAX = 12
ITEMS_MAX = 100
_OWN_BOX = "a box of this branch's own, brought to where its parent's stood"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the timeline."""

    at: float | None
    """Seconds since admission; ``None`` where the journal keeps no time."""
    path: str
    what: str
    detail: str
    """May hold anything an agent wrote; cleaned when shown."""
    took: float | None = None
    """Seconds from asking to receiving."""
    queue: float | None = None
    """Of those, waiting for a worker."""
    run: float | None = None
    """Of those, the work itself."""
    style: str = ""


def timeline(events: Sequence[JournalEvent], read: Read = inline_only) -> RenderableType:
    """Return the whole story of a rollout."""
    made = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    made.add_column("at", justify="right", no_wrap=True)
    made.add_column("call", no_wrap=True)
    made.add_column("what", no_wrap=True)
    made.add_column("detail", ratio=1, overflow="fold")
    for column in ("took", "queue", "run"):
        made.add_column(column, justify="right", no_wrap=True)
    for line in lines(events, read):
        made.add_row(
            "" if line.at is None else f"{line.at:.3f}",
            cell(line.path, "dim"),
            cell(line.what, line.style),
            Text(excerpt(line.detail, length=DETAIL_MAX, lines_max=DETAIL_LINES_MAX), line.style),
            *(Text(_shown(seconds), "dim") for seconds in (line.took, line.queue, line.run)),
        )
    return Group(heading(events), made)


def heading(events: Sequence[JournalEvent]) -> RenderableType:
    """Return what fixes the rollout's behaviour."""
    first = events[0] if events else None
    if not isinstance(first, Admitted):
        return Text("its first entry does not admit it", "red")
    facts = table("", "")
    facts.show_header = False
    for name, value in (
        ("rollout", f"{first.rollout_id} ({first.index} of {first.group_id})"),
        ("task", first.task.task_id),
        ("program", f"{first.program} {first.program_version} ({first.program_digest[:12]})"),
        ("python", f"{first.python}, hash seed {first.hash_seed}"),
        ("epoch", first.epoch),
    ):
        facts.add_row(Text(name, "dim"), cell(value))
    return Group(facts, "")


def lines(events: Sequence[JournalEvent], read: Read = inline_only) -> Iterator[Line]:
    """Yield the lines of the timeline."""
    issued: dict[CallPath, Issued] = {}
    began = next((event.at for event in events if isinstance(event, Admitted)), 0.0)
    step = -1
    for event in events:
        if isinstance(event, Issued):
            issued[event.path] = event
            continue
        if isinstance(event, Delivered):
            call = issued.get(event.path)
            if call is not None and call.verb is Verb.GENERATE:
                step += 1
                yield Line(at=None, path="", what=f"step {step}", detail="", style="bold")
            yield _delivered(event, call, began, read)
        else:
            yield _other(event, issued, began, read)
    yield from _outstanding(events, issued, read)


def document(events: Sequence[JournalEvent], read: Read = inline_only) -> object:
    """Return the journal as JSON values, arguments and results decoded.

    What the journal holds itself is shown whole; what lies in the artifact store may be megabytes
    long and is shown with its long texts and lists cut.
    """
    return {
        "events": [_opened(msgspec.to_builtins(e, builtin_types=(bytes,)), read) for e in events]
    }


def _delivered(event: Delivered, call: Issued | None, began: float, read: Read) -> Line:
    asked = arguments_text(call.verb, call.arguments, read) if call is not None else ""
    if event.fault is not None:
        got = f"fault {event.fault.code}: {event.fault.message}"
    else:
        got = result_text(call.verb if call is not None else None, event.value, read)
    return Line(
        at=event.at - began if event.at else None,
        path=event.path,
        what=str(call.verb) if call is not None else "?",
        detail=_notes(event) + (f"{asked} → {got}" if asked and got else asked or got),
        took=event.latency_seconds or None,
        queue=event.queue_seconds if event.action_id is not None else None,
        run=event.run_seconds if event.action_id is not None else None,
        style="red" if event.fault is not None else "",
    )


def _notes(event: Delivered) -> str:
    """Say what is not ordinary about a result: another attempt, an ending that is not ok."""
    notes = [f"attempt {event.attempt}"] if event.attempt > 1 else []
    notes += [event.status] if event.status not in {"", "ok"} else []
    return f"[{', '.join(notes)}] " if notes else ""


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _other(event: JournalEvent, issued: dict[CallPath, Issued], began: float, read: Read) -> Line:
    what = type(event).__name__.lower()
    match event:
        case Finished():
            return _finished(event, began)
        case Withdrawn(path=path) | Dropped(path=path) | Reissued(path=path):
            return Line(
                at=None, path=path, what=what, detail=_asked(issued, path, read), style="dim"
            )
        case Late():
            detail = f"{event.action_id} {event.status}: {event.disposition}"
        case Restored():
            why = _OWN_BOX if event.reason == BRANCHED else event.reason
            detail = f"environment {event.path}, generation {event.generation}: {why}"
        case Branched():
            detail = f"until here it was its parent; now it is {event.identity.rollout_id}"
        case Tainted():
            detail = f"{event.path} met {event.fault.code}: {event.fault.message}"
        case Recovered():
            detail = event.code
        case _:
            return Line(at=0.0, path="", what=what, detail="", style="bold")
    return Line(at=None, path="", what=what, detail=detail, style="yellow")


def _finished(event: Finished, began: float) -> Line:
    outcome = event.outcome
    reward = "" if outcome.reward is None else f"reward {outcome.reward:g}"
    fault = f"{outcome.fault.code}: {outcome.fault.message}" if outcome.fault else ""
    counts = f"{counted(event.steps, 'step')}, {counted(event.actions, 'action')}"
    return Line(
        at=event.at - began,
        path="",
        what=str(outcome.kind),
        detail=" · ".join(part for part in (reward, outcome.reason, fault, counts) if part),
        style="bold red" if outcome.reward is None else "bold green",
    )


def _asked(issued: dict[CallPath, Issued], path: CallPath, read: Read) -> str:
    call = issued.get(path)
    if call is None:
        return ""
    return f"{call.verb} {arguments_text(call.verb, call.arguments, read)}"


def _outstanding(
    events: Sequence[JournalEvent], issued: dict[CallPath, Issued], read: Read
) -> Iterator[Line]:
    if events and isinstance(events[-1], Finished):
        return
    answered = {e.path for e in events if isinstance(e, Delivered | Dropped | Withdrawn)}
    for path, call in issued.items():
        if path not in answered:
            asked = arguments_text(call.verb, call.arguments, read)
            yield Line(at=None, path=path, what=str(call.verb), detail=f"[outstanding] {asked}")


def _opened(value: object, read: Read) -> object:
    """Replace stored values by what they hold."""
    if isinstance(value, dict):
        if value.keys() == set(Value.__struct_fields__):
            return _content(Value(**value), read)
        return {key: _opened(inner, read) for key, inner in value.items()}
    return [_opened(item, read) for item in value] if isinstance(value, list) else plain(value)


def _content(value: Value, read: Read) -> object:
    content = read(value)
    address = {"digest": value.digest, "size_bytes": value.size_bytes}
    if content is None:
        return plain(address)
    try:
        decoded = msgspec.msgpack.decode(content)
    except msgspec.MsgspecError:
        decoded = content
    return plain(decoded if value.inline is not None else {**address, "shortened": _cut(decoded)})


def _cut(value: object) -> object:
    """Return ``value`` with long texts and lists cut to their beginning."""
    if isinstance(value, dict):
        return {key: _cut(inner) for key, inner in value.items()}
    if isinstance(value, list):
        rest = [f"… {len(value) - ITEMS_MAX} more"] if len(value) > ITEMS_MAX else []
        return [_cut(item) for item in value[:ITEMS_MAX]] + rest
    if isinstance(value, str) and len(value) > DETAIL_MAX:
        return f"{value[:DETAIL_MAX]}… {len(value) - DETAIL_MAX} more characters"
    if isinstance(value, bytes) and len(value) > DETAIL_MAX:
        beginning = value[:DETAIL_MAX].decode(errors="replace")
        return f"{beginning}… {len(value) - DETAIL_MAX} more bytes"
    return value
