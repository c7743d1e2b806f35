"""Segments: stretches of a history that only grew, found in a rollout's model calls.

A call goes on in its parent's segment when it is the first to continue the parent and its prompt
begins with exactly what the parent was asked and sampled. Everything else begins a segment: a new
chat, a second call continued from the same one (a fork), a prompt that was rendered anew. The ids
themselves are compared where a server gives them; a flag alone is not believed.

Invariant: every returned call is in exactly one segment, so every sampled token is too.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from stoker.coordinator.rebuild import Fetch, Standing, generations, returned
from stoker.model.generation import GenerateArguments, Generation
from stoker.model.ids import CallPath


class Beginning(StrEnum):
    """Why a segment begins where it does."""

    NEW = "new"
    """A new chat."""
    FORKED = "forked"
    """Continued from a call that another segment already went on from."""
    RERENDERED = "rerendered"
    """The prompt is not what its parent was asked and sampled, and a suffix."""


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One model call that returned."""

    path: CallPath
    step: int
    arguments: GenerateArguments
    generation: Generation
    latency_seconds: float
    shared: bool = False
    """Sampled by whoever this rollout was branched off: prompt here."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Calls whose histories are each the one before and more."""

    begins: Beginning
    calls: list[ModelCall]
    """At least one."""


def segments(calls: Iterable[ModelCall]) -> list[Segment]:
    """Return the segments of a rollout's calls, ordered by the step they begin with."""
    found: list[Segment] = []
    tails: dict[CallPath, Segment] = {}
    """The last call of each segment."""
    for call in calls:
        parent = call.arguments.parent
        grown = tails.get(parent) if parent is not None else None
        begins = Beginning.NEW
        if grown is not None and _continues(grown.calls[-1].generation, call.generation):
            del tails[grown.calls[-1].path]
            grown.calls.append(call)
            tails[call.path] = grown
            continue
        if parent is not None:
            begins = Beginning.FORKED if grown is None else Beginning.RERENDERED
        tails[call.path] = Segment(begins=begins, calls=[call])
        found.append(tails[call.path])
    return found


def model_calls(standing: Standing, fetch: Fetch) -> list[ModelCall]:
    """Return the model calls that returned, in order of issue: a parent stands before its child.

    Raises:
        ArtifactDamaged: a model call's record cannot be read.
    """
    answers = dict(returned(standing, fetch))
    shared = {one.path for one in standing.delivered[: standing.shared]}
    latencies = {one.path: one.latency_seconds for one in standing.delivered}
    return [
        ModelCall(
            path=path,
            step=step,
            arguments=arguments,
            generation=answers[path],
            latency_seconds=latencies[path],
            shared=path in shared,
        )
        for step, (path, arguments) in enumerate(generations(standing, fetch))
        if path in answers
    ]


def _continues(before: Generation, after: Generation) -> bool:
    if after.rerendered or bool(before.prompt_ids) != bool(after.prompt_ids):
        return False
    return after.prompt_ids.startswith(before.prompt_ids + before.token_ids)
