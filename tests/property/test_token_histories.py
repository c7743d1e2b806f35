"""Whole rollouts over random templates, tools, cuts and ids: a trainer gets what was sampled.

Each rollout goes through the production pieces: history store, renderer, ``TokenCallable``,
journal, segments, rows. Every sampled token has a log-probability of its own, so that one that is
lost, doubled or shifted is seen.
"""

import asyncio
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.coordinator.history import HistoryStore
from stoker.export.rows import Row, read_rollout, rows_of
from stoker.export.segments import Beginning
from stoker.inference.token_callable import TokenAnswer, TokenCallable, TokenRequest
from stoker.inference.tokens.base import Renderer
from stoker.model.events import Delivered, Finished, JournalEvent, Verb
from stoker.model.generation import (
    GenerateArguments,
    GenerateRequest,
    Generation,
    Message,
    Role,
    Sampling,
    ToolSpec,
    VersionSpan,
    unpack_tokens,
)
from stoker.model.ids import CallPath, RolloutId
from support.exports import COMPLETED, FACTS, fetch
from support.inference import RUN_PYTHON
from support.journals import ADMITTED, issued, value
from support.token_templates import LLAMA_SPECIALS, QWEN_SPECIALS, llama, qwen
from support.tokens import model_folder, needs_tokens, tool, user

pytestmark = needs_tokens

SPECIALS = (*QWEN_SPECIALS, *LLAMA_SPECIALS)
ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>")
TEXTS = [
    "plain", " ", "\n", "\n\n", "hello", "é", "\ud800", '"', "{", "ROLE", "<think>", "</think>",
    '<tool_call>{"name": "run_python", "arguments": {"code": "1"}}</tool_call>',
    '<tool_call>{"name":"run_python","arguments":{}}</tool_call>', "<tool_call>",
    '{"name": "run_python", "parameters": {"code": "1"}}',
]  # fmt: skip

TEMPLATE = """\
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}{{ 'tools ' + (tools | tojson) + after }}{% endif %}
{%- if preset and messages[0].role != 'system' %}{{ preset + after }}{% endif %}
{%- for message in messages %}
{%- set shown = message.content %}
{%- if message.role == 'assistant' %}
{%- set answered = drops == 'answered' and loop.index0 < last.question %}
{%- if answered or (drops == 'earlier' and not loop.last) %}
{%- set shown = shown.split('</think>')[-1] %}
{%- else %}{% set shown = opens + shown %}
{%- endif %}
{%- endif %}
{%- if trims %}{% set shown = shown | trim %}{% endif %}
{{- before.replace('ROLE', message.role) + shown }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- after }}
{%- endfor %}
{%- if add_generation_prompt or always_opens %}
{{- before.replace('ROLE', 'assistant') + opens }}
{%- endif %}
"""

shapes = st.fixed_dictionaries(
    {
        "before": st.sampled_from(["<|im_start|>ROLE\n", "ROLE: ", "<|im_start|>ROLE<|im_end|>"]),
        "after": st.sampled_from(["<|im_end|>\n", "<|im_end|>", "\n", "<|endoftext|>\n\n"]),
        "opens": st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]),
        "drops": st.sampled_from(["never", "answered", "earlier"]),
        "trims": st.sampled_from(["", "yes"]),
        "preset": st.sampled_from(["", "Be kind."]),
        "always_opens": st.sampled_from(["", "", "yes"]),
    }
)
models = st.one_of(shapes, st.sampled_from(["qwen3", "llama-3"]))


class Turn(NamedTuple):
    """One model call of a plan."""

    back: int
    """Which call it continues, counted from the last: mostly 0; past the first: a new chat."""
    suffix: tuple[Message, ...]
    said: tuple[str | int, ...]
    """Texts and single ids, one after the other."""
    cut: int
    """Ids that are cut off at the end."""


suffixes = st.one_of(
    st.sampled_from([(user("go"),), (user("aé"), user("")), (tool("out"), tool("2", "call_1"))]),
    st.just((Message(role=Role.SYSTEM, content="Be brief."), user("go"))),
)
texts = st.lists(st.sampled_from(TEXTS), max_size=4).map(tuple)
anything = st.lists(
    st.one_of(st.sampled_from([*TEXTS, *SPECIALS]), st.integers(0, 300)), max_size=6
)


def turns(said: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Turn]]:
    back = st.sampled_from([0, 0, 0, 0, 1, 9])
    cut = st.sampled_from([0, 0, 1, 2, 5])
    return st.lists(st.builds(Turn, back, suffixes, said.map(tuple), cut), min_size=1, max_size=5)


@cache
def folder_of(kind: str) -> tuple[Any, Any]:
    """Return the tokenizer of every test and, for a known kind, its renderer's parts."""
    from stoker.inference.tokens.folder import load_folder  # noqa: PLC0415 - an extra
    from stoker.inference.tokens.packaged import fitting  # noqa: PLC0415 - an extra
    from stoker.inference.tokens.template import ChatTemplate  # noqa: PLC0415 - an extra

    source = {"qwen3": qwen, "llama-3": llama}.get(kind, lambda: TEMPLATE)()
    with TemporaryDirectory() as place:
        begins = SPECIALS[len(QWEN_SPECIALS)]
        tokenizer, files = load_folder(
            model_folder(Path(place), source, specials=SPECIALS, bos_token=begins)
        )
    if kind not in {"qwen3", "llama-3"}:
        return tokenizer, None
    template = ChatTemplate(files.templates, files.specials)
    packaged = fitting(tokenizer, template, ())
    assert packaged is not None
    assert packaged.name == kind
    return tokenizer, (template, packaged)


def renderer_of(model: str | dict[str, str], history: Any) -> Renderer:
    from stoker.inference.tokens.renderer import FolderRenderer  # noqa: PLC0415 - an extra
    from stoker.inference.tokens.template import ChatTemplate  # noqa: PLC0415 - an extra

    tokenizer, known = folder_of(model if isinstance(model, str) else "")
    if isinstance(model, str):
        template, packaged = known
    else:
        template, packaged = ChatTemplate({"default": TEMPLATE}, model), None
    ends = tuple(tokenizer.convert_tokens_to_ids(list(ENDS)))
    return FolderRenderer(tokenizer, template, stop_ids=ends, packaged=packaged, history=history)


class Engine:
    """Samples what a plan says; counts log-probabilities down from -1."""

    def __init__(self, plan: list[Turn], model: object) -> None:
        self._plan = iter(plan)
        self._tokenizer = folder_of(model if isinstance(model, str) else "")[0]
        self._end = {"llama-3": ENDS[1]}.get(str(model), ENDS[0])
        self.sampled: list[tuple[int, float]] = []

    async def generate_ids(self, asked: TokenRequest) -> TokenAnswer:
        turn = next(self._plan)
        ids: list[int] = []
        for one in (*turn.said, self._end):
            ids += [one] if isinstance(one, int) else self._tokenizer.encode(one)
        ids = ids[: len(ids) - turn.cut] if turn.cut else ids
        logprobs = [-1.0 - len(self.sampled) - place for place in range(len(ids))]
        self.sampled += zip(ids, logprobs, strict=True)
        half = len(ids) // 2
        changed = (VersionSpan(1, 0, half), VersionSpan(2, half, len(ids))) if half else ()
        return TokenAnswer(token_ids=ids, logprobs=logprobs, policy_version=1, spans=changed)


class Played(NamedTuple):
    """A rollout that was played."""

    calls: list[tuple[CallPath, GenerateArguments, GenerateRequest, Generation]]
    rows: list[Row]
    sampled: list[tuple[int, float]]


async def played(
    model: str | dict[str, str], history: Any, plan: list[Turn], tools: tuple[ToolSpec, ...]
) -> Played:
    """Play ``plan`` as the coordinator does, journal it and export it."""
    engine = Engine(plan, model)
    lane = TokenCallable(engine.generate_ids, renderer_of(model, history), window=1)
    store = HistoryStore()
    calls = []
    events: list[JournalEvent] = [ADMITTED]
    for step, turn in enumerate(plan):
        parent = CallPath(str(step - 1 - turn.back)) if turn.back < step else None
        arguments = GenerateArguments(
            parent=parent, suffix=turn.suffix, tools=tools if parent is None else ()
        )
        path = CallPath(str(step))
        store.issue(path, arguments)
        asked = GenerateRequest(
            request_id=path,
            rollout_id=RolloutId("rol_a"),
            task_id="t",
            step=step,
            messages=store.messages(path),
            tools=store.tools(path),
            sampling=Sampling(),
            seed=step,
            prompt_ids=store.known_ids(path),
            known_messages=store.known_messages(path),
        )
        generation = await lane.generate(0, asked)
        store.returned(path, generation)
        calls.append((path, arguments, asked, generation))
        events += [
            issued(path, Verb.GENERATE, arguments),
            Delivered(path=path, value=value(generation), at=ADMITTED.at, latency_seconds=0.5),
        ]
    events.append(Finished(outcome=COMPLETED, at=ADMITTED.at, steps=len(plan), actions=0))
    rows = list(rows_of(read_rollout(events, fetch), fetch, FACTS))
    return Played(calls, rows, engine.sampled)


@settings(max_examples=80, deadline=None)
@given(
    model=models,
    history=st.sampled_from(["append", "rerender"]),
    plan=turns(anything),
    tools=st.sampled_from([(), (RUN_PYTHON,)]),
)
def test_c4_every_sampled_token_is_in_one_segment_with_its_logprob(
    model: str | dict[str, str], history: str, plan: list[Turn], tools: tuple[ToolSpec, ...]
) -> None:
    done = asyncio.run(played(model, history, plan, tools))
    seen: list[tuple[int, float]] = []
    for row in done.rows:
        assert len(row.token_ids) == len(row.mask) == len(row.logprobs)
        spots = [place for place, one in enumerate(row.mask) if one]
        seen += [(row.token_ids[place], row.logprobs[place]) for place in spots]
        assert [place for span in row.spans for place in range(span.start, span.end)] == spots
        assert all(row.logprobs[at] == 0 for at in range(len(row.mask)) if not row.mask[at])
    assert sorted(seen, key=lambda one: -one[1]) == done.sampled
    # A segment begins with a new chat, a fork, or a prompt that is not the known ids and more.
    opening = renderer_of(model, history)._marks.opening  # type: ignore[attr-defined]
    continued: set[CallPath | None] = set()
    begun: list[Beginning] = []
    for _, arguments, asked, generation in done.calls:
        grown = generation.prompt_ids.startswith(asked.prompt_ids)
        assert generation.rerendered == (bool(asked.prompt_ids) and not grown)
        assert (
            not opening or tuple(unpack_tokens(generation.prompt_ids)[-len(opening) :]) == opening
        )
        if arguments.parent is None:
            begun.append(Beginning.NEW)
        elif arguments.parent in continued:
            begun.append(Beginning.FORKED)
        elif generation.rerendered:
            begun.append(Beginning.RERENDERED)
        if not generation.rerendered:
            continued.add(arguments.parent)
    assert [row.begins for row in done.rows] == begun


@settings(max_examples=50, deadline=None)
@given(shape=shapes, plan=turns(texts), tools=st.sampled_from([(), (RUN_PYTHON,)]))
def test_c4_a_template_that_only_grows_never_begins_a_segment(
    shape: dict[str, str], plan: list[Turn], tools: tuple[ToolSpec, ...]
) -> None:
    """However differently the template prints the turn (trimmed, calls spaced its own way)."""
    shape = {**shape, "drops": "never", "always_opens": ""}
    plan = [turn._replace(back=0) for turn in plan]
    done = asyncio.run(played(shape, "append", plan, tools))
    (row,) = done.rows
    assert not any(generation.rerendered for *_, generation in done.calls)
    assert [row.token_ids[place] for place, one in enumerate(row.mask) if one] == [
        one for one, _ in done.sampled
    ]
