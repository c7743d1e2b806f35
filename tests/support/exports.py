"""Journals of rollouts that only talked to their model, for tests that export them."""

from collections.abc import Sequence
from typing import NamedTuple

from stoker.export.rows import Row, RunFacts, read_rollout, rows_of
from stoker.model.events import Delivered, Finished, JournalEvent, Verb
from stoker.model.faults import FaultRecord
from stoker.model.generation import (
    GenerateArguments,
    Generation,
    LogprobKind,
    Message,
    Role,
    VersionSpan,
    pack_logprobs,
    pack_tokens,
)
from stoker.model.ids import CallPath
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.value import Value
from support.journals import ADMITTED, issued, value

FACTS = RunFacts(
    run_id="run_1", model="scripted:m", model_digest="m", settings_digest="s", stoker_version="0"
)
COMPLETED = Outcome(kind=OutcomeKind.COMPLETED, reward=1.0)


class Asked(NamedTuple):
    """One model call and what became of it."""

    path: str
    parent: str | None
    got: Generation | FaultRecord
    said: str = "go on"


def fetch(stored: Value) -> bytes:
    """Return the content of a value that is inline."""
    assert stored.inline is not None
    return stored.inline


def sampled(
    prompt: Sequence[int],
    ids: Sequence[int],
    *,
    version: int = 1,
    kind: LogprobKind = LogprobKind.SAMPLED,
    text: str = "well",
    rerendered: bool = False,
) -> Generation:
    """Return a generation whose log-probabilities are minus its ids."""
    return Generation(
        text=text,
        prompt_ids=pack_tokens(list(prompt)),
        token_ids=pack_tokens(list(ids)),
        logprobs=b"" if kind is LogprobKind.NONE else pack_logprobs([-float(one) for one in ids]),
        logprob_kind=kind,
        spans=(VersionSpan(version, 0, len(ids)),) if ids else (),
        rerendered=rerendered,
    )


def journal(calls: Sequence[Asked], outcome: Outcome | None = COMPLETED) -> list[JournalEvent]:
    """Return the journal of a rollout that made ``calls`` one after the other."""
    events: list[JournalEvent] = [ADMITTED]
    for number, call in enumerate(calls):
        parent = CallPath(call.parent) if call.parent is not None else None
        suffix = (Message(role=Role.USER, content=call.said),)
        arguments = GenerateArguments(parent=parent, suffix=suffix)
        failed = isinstance(call.got, FaultRecord)
        events += [
            issued(call.path, Verb.GENERATE, arguments),
            Delivered(
                path=CallPath(call.path),
                value=None if failed else value(call.got),
                fault=call.got if isinstance(call.got, FaultRecord) else None,
                at=ADMITTED.at + number,
                latency_seconds=0.5,
            ),
        ]
    if outcome is not None:
        events.append(Finished(outcome=outcome, at=ADMITTED.at + 60, steps=len(calls), actions=0))
    return events


def rows(calls: Sequence[Asked], outcome: Outcome = COMPLETED) -> list[Row]:
    """Return the rows of such a rollout."""
    return list(rows_of(read_rollout(journal(calls, outcome), fetch), fetch, FACTS))
