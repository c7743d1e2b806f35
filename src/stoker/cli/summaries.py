"""What a call asked and what it got, each in a few words. Never raises for what was recorded.

``Read`` gives the content of a value wherever it lies; one that cannot be read is told by size and
digest.
"""

import json
from collections.abc import Callable
from typing import Any

import msgspec

from stoker.cli.output import counted
from stoker.model import tools
from stoker.model.checkpoint import Checkpoint
from stoker.model.events import Verb
from stoker.model.generation import GenerateArguments, Generation, ToolCall
from stoker.model.value import Value
from stoker.rollout import arguments as call_arguments

_REQUESTS: dict[Verb, Any] = {
    Verb.RUN: tools.RunRequest,
    Verb.WRITE: tools.WriteRequest,
    Verb.READ: tools.ReadRequest,
    Verb.EXPORT: tools.ExportRequest,
    Verb.SCORE: tools.ScoreRequest,
    Verb.CHECKPOINT: tools.CheckpointRequest,
}
_ARGUMENTS: dict[Verb, Any] = {
    Verb.GENERATE: GenerateArguments,
    Verb.ENVIRONMENT: call_arguments.EnvironmentArguments,
    Verb.CALL: call_arguments.CallArguments,
    Verb.LOCAL: call_arguments.LocalArguments,
    Verb.SLEEP: call_arguments.TimerArguments,
    Verb.TIMER: call_arguments.TimerArguments,
    Verb.BRANCH: call_arguments.BranchArguments,
}
_RESULTS: dict[Verb, Any] = {
    Verb.GENERATE: Generation,
    Verb.ENVIRONMENT: tools.OpenResult,
    Verb.RUN: tools.RunResult,
    Verb.READ: tools.ReadResult,
    Verb.EXPORT: tools.ExportResult,
    Verb.SCORE: tools.Verdict,
    Verb.CHECKPOINT: Checkpoint,
    Verb.CALL: tools.CallResult,
}


Read = Callable[[Value], bytes | None]
"""Gives the content of a value; ``None``: it cannot be read."""


def inline_only(value: Value) -> bytes | None:
    """Read what the journal itself holds."""
    return value.inline


def arguments_text(verb: Verb, value: Value, read: Read = inline_only) -> str:
    """Return what a call asked for."""
    content = read(value)
    if content is None:
        return _elsewhere(value)
    try:
        if verb in _REQUESTS:
            box = msgspec.msgpack.decode(content, type=call_arguments.BoxArguments)
            return _words(msgspec.msgpack.decode(box.request, type=_REQUESTS[verb]))
        return _words(msgspec.msgpack.decode(content, type=_ARGUMENTS.get(verb, Any)))
    except msgspec.MsgspecError:
        return _elsewhere(value)


def result_text(verb: Verb | None, value: Value | None, read: Read = inline_only) -> str:
    """Return what a call got."""
    content = read(value) if value is not None else None
    if value is None or content is None:
        return _elsewhere(value) if value is not None else ""
    try:
        kind = _RESULTS.get(verb, Any) if verb is not None else Any
        return _words(msgspec.msgpack.decode(content, type=kind))
    except msgspec.MsgspecError:
        return _elsewhere(value)


def _generate_asked(request: GenerateArguments) -> str:
    last = request.suffix[-1].content if request.suffix else ""
    return f"{counted(len(request.suffix), 'message')}: {last}"


def _environment_asked(arguments: call_arguments.EnvironmentArguments) -> str:
    begins = arguments.begins
    if begins is msgspec.UNSET:
        return f"{arguments.baseline}, {counted(len(arguments.files), 'file')}"
    return f"branch of {begins.environment}, from {begins.checkpoint.digest[:16]}"


def _call_asked(arguments: call_arguments.CallArguments) -> str:
    called = arguments.request.function or " ".join(arguments.request.argv)
    return f"{called}({arguments.request.arguments}) [{arguments.effect}]"


def _asked(call: ToolCall) -> str:
    # What was sampled of a call holds its name too where the model wrote a block of text.
    return call.raw if call.error else json.dumps(call.arguments, ensure_ascii=False)


def _generate_got(result: Generation) -> str:
    calls = "".join(f" {call.name}({_asked(call)})" for call in result.tool_calls)
    versions = ", ".join(str(span.policy_version) for span in result.spans)
    facts = (
        f"{counted(result.token_count, 'token')}, {result.finish_reason}, policy {versions or '?'}"
    )
    return f"[{facts}]{calls} {result.text}".rstrip()


def _call_got(result: tools.CallResult) -> str:
    if result.error is not None:
        return result.error
    return result.run.text if result.value is None and result.run is not None else str(result.value)


_WORDS: dict[type, Callable[[Any], str]] = {
    GenerateArguments: _generate_asked,
    call_arguments.EnvironmentArguments: _environment_asked,
    tools.RunRequest: lambda r: " ".join(r.argv),
    tools.WriteRequest: lambda r: ", ".join(r.files),
    tools.ReadRequest: lambda r: str(r.path),
    tools.ExportRequest: lambda r: ", ".join(r.paths),
    tools.ScoreRequest: lambda r: f"{r.tests.entry_point} of {r.tests.solution}",
    tools.CheckpointRequest: lambda _: "",
    call_arguments.CallArguments: _call_asked,
    call_arguments.LocalArguments: lambda r: str(r.function),
    call_arguments.TimerArguments: lambda r: f"{r.seconds:g} s",
    call_arguments.BranchArguments: lambda r: f"{r.count} go on",
    Generation: _generate_got,
    tools.OpenResult: lambda r: (
        f"{r.isolation} (rung {r.rung}), baseline {r.baseline_digest[:12]}"
        if r.baseline_digest
        else f"{r.isolation} (rung {r.rung})"
    ),
    tools.RunResult: lambda r: r.text or "[no output]",
    tools.ReadResult: lambda r: r.refused or counted(r.total_bytes, "byte"),
    tools.ExportResult: lambda r: f"{counted(len(r.files), 'file')}, {len(r.refused)} refused",
    tools.Verdict: lambda r: "passed" if r.passed else f"not passed: {r.detail}",
    Checkpoint: lambda r: f"{r.digest[:16]}, {r.size_bytes} bytes, generation {r.generation}",
    tools.CallResult: _call_got,
    type(None): lambda _: "",
}
"""Record type → its words."""


def _words(record: Any) -> str:  # noqa: ANN401 - any record
    return _WORDS.get(type(record), str)(record)


def _elsewhere(value: Value) -> str:
    return f"[{value.size_bytes} bytes, {value.digest[:12]}]"
