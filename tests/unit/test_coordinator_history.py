"""Histories are stored once and read whole."""

import tracemalloc

import pytest

from stoker.coordinator.history import HistoryStore
from stoker.errors import InternalError
from stoker.model.generation import (
    GenerateArguments,
    Generation,
    Message,
    Role,
    ToolSpec,
    pack_tokens,
    unpack_tokens,
)
from stoker.model.ids import CallPath


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def ask(parent: str | None, *texts: str, tools: tuple[ToolSpec, ...] = ()) -> GenerateArguments:
    return GenerateArguments(
        parent=None if parent is None else CallPath(parent),
        suffix=tuple(user(text) for text in texts),
        tools=tools,
    )


def test_a_continued_history_is_its_parents_plus_the_answer_plus_the_suffix() -> None:
    store = HistoryStore()
    store.issue(CallPath("0"), ask(None, "hello"))
    store.returned(CallPath("0"), Generation(text="hi"))
    store.issue(CallPath("1"), ask("0", "more"))
    contents = [(m.role, m.content) for m in store.messages(CallPath("1"))]
    assert contents == [(Role.USER, "hello"), (Role.ASSISTANT, "hi"), (Role.USER, "more")]


def test_two_branches_of_one_history_share_its_start_and_nothing_else() -> None:
    store = HistoryStore()
    store.issue(CallPath("0"), ask(None, "root"))
    store.returned(CallPath("0"), Generation(text="a"))
    store.issue(CallPath("1"), ask("0", "left"))
    store.issue(CallPath("2"), ask("0", "right"))
    left = [m.content for m in store.messages(CallPath("1"))]
    right = [m.content for m in store.messages(CallPath("2"))]
    assert left == ["root", "a", "left"]
    assert right == ["root", "a", "right"]


def test_tools_are_those_of_the_first_call() -> None:
    store = HistoryStore()
    tool = ToolSpec(name="run")
    store.issue(CallPath("0"), ask(None, "x", tools=(tool,)))
    store.returned(CallPath("0"), Generation(text="y"))
    store.issue(CallPath("1"), ask("0", "z"))
    assert store.tools(CallPath("1")) == (tool,)


def test_known_ids_are_what_was_asked_plus_what_was_sampled() -> None:
    store = HistoryStore()
    store.issue(CallPath("0"), ask(None, "x"))
    assert store.known_ids(CallPath("0")) == b""
    store.returned(
        CallPath("0"),
        Generation(text="y", prompt_ids=pack_tokens([1, 2]), token_ids=pack_tokens([3])),
    )
    store.issue(CallPath("1"), ask("0", "z"))
    assert unpack_tokens(store.known_ids(CallPath("1"))) == [1, 2, 3]


def test_steps_count_in_order_of_issue() -> None:
    store = HistoryStore()
    assert [store.issue(CallPath(str(i)), ask(None, "x")) for i in range(3)] == [0, 1, 2]
    assert store.step(CallPath("2")) == 2


def test_continuing_a_call_that_has_not_returned_is_our_bug_and_named() -> None:
    store = HistoryStore()
    store.issue(CallPath("0"), ask(None, "x"))
    store.issue(CallPath("1"), ask("0", "y"))
    with pytest.raises(InternalError, match="model call 0 is continued"):
        store.messages(CallPath("1"))


def test_how_many_messages_the_known_ids_cover_is_said() -> None:
    store = HistoryStore()
    store.issue(CallPath("0"), ask(None, "a", "b"))
    assert store.known_messages(CallPath("0")) == 0
    store.returned(
        CallPath("0"),
        Generation(text="x", prompt_ids=pack_tokens([1, 2]), token_ids=pack_tokens([3])),
    )
    store.issue(CallPath("1"), ask("0", "c", "d"))
    assert store.known_messages(CallPath("1")) == 3  # a, b and the answer
    store.returned(CallPath("1"), Generation(text="y"))  # a server that gives no ids
    store.issue(CallPath("2"), ask("1", "e"))
    assert store.known_messages(CallPath("2")) == 0


def test_c14_each_token_is_kept_once_and_a_prompt_that_was_rendered_anew_whole() -> None:
    turns, turn = 40, 500
    store = HistoryStore()
    known: list[int] = []
    tracemalloc.start()
    for number in range(turns):
        path, parent = CallPath(str(number)), str(number - 1) if number else None
        store.issue(path, ask(parent, "go on"))
        prompt = [*known, *range(turn)] if number != turns // 2 else [7, *known]
        known = [*prompt, *range(turn)]
        answer = Generation(
            text="", prompt_ids=pack_tokens(prompt), token_ids=pack_tokens(known[-turn:])
        )
        store.returned(path, answer)
    store.issue(CallPath("end"), ask(str(turns - 1), "the end"))
    assert unpack_tokens(store.known_ids(CallPath("end"))) == known
    del prompt, answer, known
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 4 * turn * turns * 4, "a tenth of what all the prompts together take"
