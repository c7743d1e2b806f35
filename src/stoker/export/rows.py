"""One row per segment of a finished rollout: what a trainer needs, and where it came from.

Invariants:

- ``token_ids``, ``mask`` and ``logprobs`` have equal length;
- a sampled token has mask 1 in exactly one row; what another segment sampled is prompt here;
- only a completed rollout carries a reward; every other has none, never 0.

Reads a journal through ``coordinator.rebuild``; writes nothing.
"""

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from stoker.coordinator.history import HistoryStore
from stoker.coordinator.rebuild import Fetch, Standing, rebuild
from stoker.export.segments import Beginning, ModelCall, Segment, model_calls, segments
from stoker.model.events import Finished, JournalEvent, Recovered, Verb
from stoker.model.generation import LogprobKind, Message, Role, ToolCall, VersionSpan
from stoker.model.tools import OpenResult
from stoker.model.value import Value
from stoker.rollout.arguments import EnvironmentArguments

_TOKEN_BYTES = 4


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for every row of a run."""

    run_id: str
    model: str
    model_digest: str
    settings_digest: str
    stoker_version: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One segment."""

    run_id: str
    group_id: str
    rollout_id: str
    index: int
    """Which rollout of its group, from 0; a branch of a program has its parent's."""
    sample: str
    """The rollout that it counts with in its group: itself, unless a program branched it off."""
    parent: str | None
    """Whom it was branched off, by its program or a person; ``None``: the run itself began it."""
    parent_steps: int | None
    """How many model calls of its parent it shares: prompt here, or in no row of it."""
    segment: int
    """Which segment of its rollout, from 0."""
    segments: int
    """How many its rollout has."""
    begins: Beginning
    task_id: str
    token_ids: "array[int]"
    """int32: prompt and sampled tokens in one list; empty where the server gave no ids."""
    mask: bytes
    """One byte a token: 1 where the policy sampled it in this segment."""
    logprobs: "array[float]"
    """float32: 0 where not sampled; not a number where the server gave none for that token."""
    logprob_kind: LogprobKind
    """``none`` unless every call of the segment has the same kind."""
    spans: tuple[VersionSpan, ...]
    """Which policy version sampled which tokens, as places in ``token_ids``."""
    messages: tuple[Message, ...]
    """The whole history, the last answer included."""
    finish_reason: str
    """Of the last call."""
    prompt_tokens: int
    """Before the first sampled token."""
    sampled_tokens: int
    reward: float | None
    """Only with ``completed``."""
    outcome: str
    reason: str
    fault_code: str | None
    metrics: dict[str, float]
    recovered: tuple[str, ...]
    """Codes of faults the program met and vouched for."""
    steps: tuple[int, ...]
    """Model turns of this segment."""
    rollout_steps: int
    actions: int
    attempts: int
    """Executions of the rollout's actions, retries included."""
    admitted_at: float
    """Wall seconds since 1970."""
    finished_at: float
    seconds: float
    """Admission to outcome."""
    inference_seconds: float
    """Asked to answered, of this segment's calls together."""
    queue_seconds: float
    """Of the rollout's actions: waiting for a worker."""
    run_seconds: float
    """Of the rollout's actions: the work."""
    program: str
    program_version: str
    program_digest: str
    python: str
    epoch: str
    policy_digests: dict[str, str]
    """Worker class → execution policy; empty where the journal does not say."""
    baseline_digests: dict[str, str]
    """Baseline → digest, of the environments it opened."""
    isolation: tuple[str, ...]
    """Boundaries of its boxes (``namespace (rung a)``)."""
    model: str
    model_digest: str
    settings_digest: str
    stoker_version: str


class FinishedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout with its outcome, as far as rows need it."""

    standing: Standing
    """Without the content of what its calls returned: that may be large and is not exported."""
    finished: Finished
    recovered: tuple[str, ...]
    baselines: dict[str, str]
    """Baseline → digest, of the environments it opened."""
    isolation: tuple[str, ...]


def read_rollout(events: Sequence[JournalEvent], fetch: Fetch) -> FinishedRollout:
    """Return a finished rollout from its journal.

    Raises:
        ArtifactDamaged: the record of an opened environment cannot be read.
    """
    standing = rebuild(events, _unread)
    assert standing.finished is not None, "only finished rollouts have rows"
    baselines, isolation = _environments(standing, fetch)
    return FinishedRollout(
        standing=standing,
        finished=standing.finished,
        recovered=tuple(sorted({one.code for one in events if isinstance(one, Recovered)})),
        baselines=baselines,
        isolation=isolation,
    )


def rows_of(rollout: FinishedRollout, fetch: Fetch, facts: RunFacts) -> Iterator[Row]:
    """Yield the rows of a rollout; none when no model call of it returned.

    Raises:
        ArtifactDamaged: a model call's record cannot be read.
    """
    common = {
        **msgspec.structs.asdict(facts),
        **_whose(rollout.standing),
        **_ending(rollout.finished),
        **_costs(rollout.standing, rollout.finished),
        "recovered": rollout.recovered,
        "baseline_digests": rollout.baselines,
        "isolation": rollout.isolation,
    }
    calls = model_calls(rollout.standing, fetch)
    history = _history(calls)
    found = [one for one in segments(calls) if not all(call.shared for call in one.calls)]
    for number, segment in enumerate(found):
        place: dict[str, Any] = {"segment": number, "segments": len(found)}
        yield Row(**common, **place, **_texts(segment, history), **token_columns(segment))


def token_columns(segment: Segment) -> dict[str, Any]:
    """Return ids, mask, logprobs and spans of a segment; all empty where ids are not known."""
    last = segment.calls[-1].generation
    known = bool(last.prompt_ids)  # all of a segment's calls have ids, or none has
    ids = last.prompt_ids + last.token_ids if known else b""
    count = len(ids) // _TOKEN_BYTES
    mask = bytearray(count)
    kind = _kind(segment)
    logprobs = bytearray(len(ids))
    spans: list[VersionSpan] = []
    own = [call for call in segment.calls if not call.shared]
    for call in own if known else ():
        generation = call.generation
        start = len(generation.prompt_ids) // _TOKEN_BYTES
        mask[start : start + generation.token_count] = b"\1" * generation.token_count
        if kind is not LogprobKind.NONE:
            at = len(generation.prompt_ids)
            logprobs[at : at + len(generation.logprobs)] = generation.logprobs
        spans += [
            VersionSpan(span.policy_version, start + span.start, start + span.end)
            for span in generation.spans
        ]
    first = own[0].generation
    return {
        "token_ids": array("i", ids),
        "mask": bytes(mask),
        "logprobs": array("f", bytes(logprobs)),
        "logprob_kind": kind if known else LogprobKind.NONE,
        "spans": tuple(spans),
        "prompt_tokens": len(first.prompt_ids) // _TOKEN_BYTES,
        "sampled_tokens": sum(mask),
    }


def as_json(row: Row) -> dict[str, Any]:
    """Return ``row`` as JSON values: lists for arrays, ``None`` for what is not a number."""
    values = msgspec.structs.asdict(row)
    logprobs: list[float | None] = [*row.logprobs]
    if not all(map(math.isfinite, row.logprobs)):
        logprobs = [value if math.isfinite(value) else None for value in row.logprobs]
    return values | {
        "token_ids": row.token_ids.tolist(),
        "mask": list(row.mask),
        "logprobs": logprobs,
        "spans": [span_fields(span) for span in row.spans],
        "messages": [message_fields(message) for message in row.messages],
    }


def span_fields(span: VersionSpan) -> dict[str, int]:
    """Return a span as both formats hold it."""
    return {"policy_version": span.policy_version, "start": span.start, "end": span.end}


def message_fields(message: Message) -> dict[str, Any]:
    """Return a message as both formats hold it; a call's arguments are JSON text."""
    return {
        "role": message.role.value,
        "content": message.content,
        "tool_calls": [
            {
                "call_id": call.call_id,
                "name": call.name,
                "arguments": _arguments_text(call),
                "error": call.error,
                "raw": call.raw,
            }
            for call in message.tool_calls
        ],
        "tool_call_id": message.tool_call_id,
    }


def _arguments_text(call: ToolCall) -> str:
    try:
        return json.dumps(call.arguments, allow_nan=False)
    except (TypeError, ValueError):  # nothing a strict reader would take; what was sampled stays
        return call.raw


def _environments(standing: Standing, fetch: Fetch) -> tuple[dict[str, str], tuple[str, ...]]:
    baselines: dict[str, str] = {}
    isolation: set[str] = set()
    for delivered in standing.delivered:
        issued = standing.issued[delivered.path]
        if issued.verb is not Verb.ENVIRONMENT or delivered.value is None:
            continue
        asked = msgspec.msgpack.decode(fetch(issued.arguments), type=EnvironmentArguments)
        opened = msgspec.msgpack.decode(fetch(delivered.value), type=OpenResult)
        baselines[asked.baseline] = opened.baseline_digest
        isolation.add(f"{opened.isolation} (rung {opened.rung})")
    return baselines, tuple(sorted(isolation))


def _unread(value: Value) -> bytes:
    del value
    return b""


def _kind(segment: Segment) -> LogprobKind:
    """Return the kind all calls agree on; two kinds in one list would train on a lie."""
    kinds = {_kind_of(call) for call in segment.calls if call.generation.token_count}
    return kinds.pop() if len(kinds) == 1 else LogprobKind.NONE


def _kind_of(call: ModelCall) -> LogprobKind:
    generation = call.generation
    complete = len(generation.logprobs) == len(generation.token_ids)
    return generation.logprob_kind if complete else LogprobKind.NONE


def _history(calls: list[ModelCall]) -> HistoryStore:
    history = HistoryStore()
    for call in calls:
        history.issue(call.path, call.arguments)
        history.returned(call.path, call.generation)
    return history


def _texts(segment: Segment, history: HistoryStore) -> dict[str, Any]:
    last = segment.calls[-1]
    answer = Message(
        role=Role.ASSISTANT,
        content=last.generation.text,
        tool_calls=last.generation.tool_calls,
    )
    return {
        "begins": segment.begins,
        "messages": (*history.messages(last.path), answer),
        "finish_reason": last.generation.finish_reason.value,
        "steps": tuple(call.step for call in segment.calls),
        "inference_seconds": sum(call.latency_seconds for call in segment.calls),
    }


def _whose(standing: Standing) -> dict[str, Any]:
    admitted = standing.admitted
    same = (
        "group_id", "rollout_id", "index", "program", "program_version", "program_digest",
        "python", "epoch", "policy_digests",
    )  # fmt: skip
    branched = None if admitted.branched is msgspec.UNSET else admitted.branched
    return {name: getattr(admitted, name) for name in same} | {
        "sample": admitted.sample,
        "parent": branched and branched.parent,
        "parent_steps": branched and branched.step,
        "task_id": admitted.task.task_id,
        "admitted_at": admitted.at,
    }


def _ending(finished: Finished) -> dict[str, Any]:
    outcome = finished.outcome
    return {
        "reward": outcome.reward,
        "outcome": outcome.kind.value,
        "reason": outcome.reason,
        "fault_code": outcome.fault.code if outcome.fault else None,
        "metrics": outcome.metrics,
        "rollout_steps": finished.steps,
        "actions": finished.actions,
        "finished_at": finished.at,
    }


def _costs(standing: Standing, finished: Finished) -> dict[str, Any]:
    ran = [one for one in standing.delivered if one.action_id is not None]
    return {
        "attempts": sum(one.attempt for one in ran),
        "seconds": finished.at - standing.admitted.at,
        "queue_seconds": sum(one.queue_seconds for one in ran),
        "run_seconds": sum(one.run_seconds for one in ran),
    }
