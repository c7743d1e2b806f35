from stoker.cli.ledger_check import judge
from stoker.model.events import JournalEvent, encode_event
from support.journals import ADMITTED, ENDING, OPEN, OPENING, OUTSTANDING, WHOLE, summary


def judged(events: list[JournalEvent]) -> tuple[set[str], list[str]]:
    waiting, problems = judge(summary(events), [encode_event(event) for event in events])
    return {str(action) for action in waiting}, problems


def test_a_sound_journal_has_no_problem() -> None:
    assert judged(WHOLE) == (set(), [])


def test_an_open_journal_names_the_actions_it_waits_for() -> None:
    assert judged(OPEN) == ({"act_6"}, [])


def test_what_was_withdrawn_is_not_waited_for() -> None:
    waiting, problems = judged(WHOLE[: -len(ENDING)])
    assert (waiting, problems) == (set(), [])


def test_each_kind_of_damage_is_named() -> None:
    assert "does not admit it" in judged(OPENING[1:])[1][0]
    assert "1 entry behind its outcome" in judged([*WHOLE, OUTSTANDING])[1]
    assert "call 6 was issued twice" in judged([*OPEN, OUTSTANDING])[1]
    assert "call 0 was answered twice" in judged([*OPENING, OPENING[-1]])[1]
    assert (
        "a result was delivered to 0, which was never issued" in judged([ADMITTED, OPENING[-1]])[1]
    )


def test_entries_that_are_missing_or_unreadable_are_named() -> None:
    stored = [encode_event(event) for event in OPEN]
    assert "should have 10 entries and has 9" in judge(summary(OPEN), stored[:-1])[1][0]
    assert (
        "entry 1 does not decode" in judge(summary(OPEN), [stored[0], b"\xc1", *stored[2:]])[1][0]
    )
