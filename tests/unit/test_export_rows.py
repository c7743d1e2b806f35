from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.export.rows import Row, as_json, read_rollout, rows_of
from stoker.export.segments import Beginning
from stoker.model.generation import Generation, LogprobKind, VersionSpan
from stoker.model.outcome import Outcome, OutcomeKind
from support.exports import FACTS, Asked, fetch, journal, rows, sampled
from support.journals import LOST, WHOLE


def places(row: Row) -> list[int]:
    return [place for place, one in enumerate(row.mask) if one]


def test_a_history_that_only_grew_is_one_row() -> None:
    (row,) = rows(
        [
            Asked("0", None, sampled([1, 2], [3, 4], version=7)),
            Asked("1", "0", sampled([1, 2, 3, 4, 5], [6], version=8)),
        ]
    )
    assert list(row.token_ids) == [1, 2, 3, 4, 5, 6]
    assert list(row.mask) == [0, 0, 1, 1, 0, 1]
    assert list(row.logprobs) == [0, 0, -3, -4, 0, -6]
    assert row.spans == (VersionSpan(7, 2, 4), VersionSpan(8, 5, 6))
    assert (row.prompt_tokens, row.sampled_tokens) == (2, 3)
    assert (row.begins, row.steps, row.segments) == (Beginning.NEW, (0, 1), 1)
    assert [message.content for message in row.messages] == ["go on", "well", "go on", "well"]
    assert row.inference_seconds == 1.0


def test_a_chat_started_anew_begins_a_segment() -> None:
    first, second = rows(
        [Asked("0", None, sampled([1], [2])), Asked("1", None, sampled([9], [8, 7]))]
    )
    assert list(first.token_ids) == [1, 2]
    assert list(second.token_ids) == [9, 8, 7]
    assert (second.begins, second.segment, second.steps) == (Beginning.NEW, 1, (1,))
    assert [message.content for message in second.messages] == ["go on", "well"]


def test_a_fork_begins_a_segment_and_trains_on_nothing_twice() -> None:
    trunk, fork = rows(
        [
            Asked("0", None, sampled([1], [2, 3])),
            Asked("1", "0", sampled([1, 2, 3, 4], [5])),
            Asked("2", "0", sampled([1, 2, 3, 6], [7]), said="other"),
        ]
    )
    assert list(trunk.mask) == [0, 1, 1, 0, 1]
    assert fork.begins is Beginning.FORKED
    assert list(fork.token_ids) == [1, 2, 3, 6, 7]
    assert list(fork.mask) == [0, 0, 0, 0, 1], "what the trunk sampled is prompt here"
    assert fork.prompt_tokens == 4
    assert [message.content for message in fork.messages] == ["go on", "well", "other", "well"]


@pytest.mark.parametrize("flag", [True, False])
def test_c4_a_prompt_rendered_anew_begins_a_segment_flag_or_not(*, flag: bool) -> None:
    """A server that re-tokenises what was sampled is found by its ids; the flag alone is enough."""
    continued = [1, 2, 3, 4] if flag else [1, 99, 3, 4]
    first, second = rows(
        [
            Asked("0", None, sampled([1], [2, 3])),
            Asked("1", "0", sampled(continued, [5], rerendered=flag)),
        ]
    )
    assert list(first.token_ids) == [1, 2, 3]
    assert list(second.token_ids) == [*continued, 5]
    assert list(second.mask) == [0, 0, 0, 0, 1]
    assert second.begins is Beginning.RERENDERED


def test_calls_after_a_rerender_go_on_in_its_segment() -> None:
    first, second = rows(
        [
            Asked("0", None, sampled([1], [2])),
            Asked("1", "0", sampled([7], [8])),
            Asked("2", "1", sampled([7, 8, 9], [10])),
        ]
    )
    assert first.steps == (0,)
    assert second.steps == (1, 2)
    assert list(second.token_ids) == [7, 8, 9, 10]


def test_a_server_without_ids_gives_texts_and_no_tokens() -> None:
    (row,) = rows([Asked("0", None, Generation(text="a")), Asked("1", "0", Generation(text="b"))])
    assert (len(row.token_ids), row.mask, len(row.logprobs)) == (0, b"", 0)
    assert row.logprob_kind is LogprobKind.NONE
    assert [message.content for message in row.messages] == ["go on", "a", "go on", "b"]


def test_ids_that_come_later_begin_a_segment() -> None:
    """What the first call sampled has no place among ids that nobody can compare it with."""
    first, second = rows(
        [Asked("0", None, Generation(text="a")), Asked("1", "0", sampled([1, 2], [3]))]
    )
    assert len(first.token_ids) == 0
    assert list(second.token_ids) == [1, 2, 3]


def test_two_kinds_of_logprobs_are_never_in_one_row() -> None:
    (row,) = rows(
        [
            Asked("0", None, sampled([1], [2], kind=LogprobKind.RAW)),
            Asked("1", "0", sampled([1, 2], [3], kind=LogprobKind.SAMPLED)),
        ]
    )
    assert row.logprob_kind is LogprobKind.NONE
    assert list(row.logprobs) == [0, 0, 0]


def test_logprobs_that_do_not_cover_the_tokens_are_not_used() -> None:
    short = Generation(
        text="", prompt_ids=b"\1\0\0\0", token_ids=b"\2\0\0\0" * 2, logprobs=b"\0\0\0\0",
        logprob_kind=LogprobKind.SAMPLED,
    )  # fmt: skip
    (row,) = rows([Asked("0", None, short)])
    assert row.logprob_kind is LogprobKind.NONE
    assert list(row.logprobs) == [0, 0, 0]


def test_a_call_that_failed_is_in_no_row_and_its_retry_goes_on() -> None:
    (row,) = rows(
        [
            Asked("0", None, sampled([1], [2])),
            Asked("1", "0", LOST),
            Asked("2", "0", sampled([1, 2, 3], [4])),
        ]
    )
    assert row.steps == (0, 2)
    assert list(row.token_ids) == [1, 2, 3, 4]


def test_a_rollout_without_an_answer_has_no_row() -> None:
    failed = Outcome(kind=OutcomeKind.FAILED, fault=LOST)
    assert rows([Asked("0", None, LOST)], failed) == []


@pytest.mark.parametrize("kind", [one for one in OutcomeKind if one is not OutcomeKind.COMPLETED])
def test_only_completed_carries_a_reward(kind: OutcomeKind) -> None:
    outcome = Outcome(kind=kind, reason="because", fault=LOST)
    (row,) = rows([Asked("0", None, sampled([1], [2]))], outcome)
    assert row.reward is None
    assert as_json(row)["reward"] is None
    assert (row.outcome, row.reason, row.fault_code) == (kind.value, "because", "worker_lost")


def test_a_reward_of_zero_is_a_reward() -> None:
    (row,) = rows(
        [Asked("0", None, sampled([1], [2]))], Outcome(kind=OutcomeKind.COMPLETED, reward=0.0)
    )
    assert row.reward == 0.0


def test_a_row_says_where_it_came_from_and_what_it_cost() -> None:
    (row,) = rows_of(read_rollout(WHOLE, fetch), fetch, FACTS)
    assert (row.task_id, row.program, row.program_digest) == ("HumanEval/7", "repair", "ab" * 32)
    assert row.baseline_digests == {"python": "b"}
    assert row.isolation == ("namespace (rung a)",)
    assert row.recovered == ("worker_lost",)
    assert row.attempts == 1 + 2 + 1 + 1
    assert row.seconds == 5.5
    assert row.queue_seconds == pytest.approx(0.51)
    assert row.run_seconds == pytest.approx(1.7)
    assert (row.rollout_steps, row.actions) == (1, 4)
    assert row.messages[-1].tool_calls[0].name == "run_python"


tokens = st.lists(st.integers(0, 300), max_size=6)


@st.composite
def conversations(draw: st.DrawFn) -> list[Asked]:
    """Draw model calls with any parents, templates that keep or rewrite history, any truncation."""
    calls: list[Asked] = []
    for number in range(draw(st.integers(1, 9))):
        parent = draw(st.sampled_from([None, *calls]))
        prompt = draw(st.lists(st.integers(0, 300), min_size=1, max_size=6))
        if parent is not None and draw(st.booleans()):
            assert isinstance(parent.got, Generation)
            before = array("i", parent.got.prompt_ids + parent.got.token_ids)
            prompt = [*before, *draw(tokens)]  # else: rendered anew
        answer = sampled(
            prompt,
            draw(tokens),
            version=draw(st.integers(0, 3)),
            kind=draw(st.sampled_from(LogprobKind)),
            rerendered=draw(st.integers(0, 4)) == 0,
        )
        calls.append(Asked(str(number), parent.path if parent is not None else None, answer))
    return calls


@settings(max_examples=150, deadline=None)
@given(conversations())
def test_c4_mask_ids_and_logprobs_have_equal_length_and_every_sample_counts_once(
    calls: list[Asked],
) -> None:
    made = rows(calls)
    steps = sorted(step for row in made for step in row.steps)
    assert steps == list(range(len(calls))), "every call is in exactly one segment"
    for row in made:
        assert len(row.token_ids) == len(row.mask) == len(row.logprobs)
        answers = [calls[step].got for step in row.steps]
        expected = [id_ for one in answers if isinstance(one, Generation)
                    for id_ in array("i", one.token_ids)]  # fmt: skip
        assert [row.token_ids[place] for place in places(row)] == expected
        covered = [place for span in row.spans for place in range(span.start, span.end)]
        assert covered == places(row), "every sampled token has its policy version"
        unsampled = set(range(len(row.mask))) - set(places(row))
        assert all(row.logprobs[place] == 0 for place in unsampled)
        if row.logprob_kind is not LogprobKind.NONE:
            assert [row.logprobs[place] for place in places(row)] == [-float(x) for x in expected]
        assert row.sampled_tokens == len(expected)


def test_the_journal_helper_is_what_a_coordinator_would_write() -> None:
    events = journal([Asked("0", None, sampled([1], [2]))])
    assert read_rollout(events, fetch).finished.outcome.reward == 1.0
