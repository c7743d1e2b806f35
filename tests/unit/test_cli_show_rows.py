"""The list of a run's rollouts, and how one of them is named."""

import msgspec
import pytest

from stoker.cli.show import RolloutRow, _print_rows, chosen
from stoker.errors import BadInput
from stoker.model.faults import FaultRecord, FaultSide
from stoker.model.outcome import Outcome, OutcomeKind


def row(number: int) -> RolloutRow:
    fault = FaultRecord(
        code="program_raised", side=FaultSide.ENVIRONMENT, message="x", retryable=False
    )
    return RolloutRow(
        rollout_id=f"rol_{number:020}", task="HumanEval/7", index=number, branch_of=None,
        outcome=Outcome(kind=OutcomeKind.FAILED, fault=fault), steps=12, actions=34,
        seconds=56.0, entries=9,
    )  # fmt: skip


def test_an_id_stays_in_one_piece_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _print_rows([row(1), row(2)])
    shown = capsys.readouterr().out
    assert row(1).rollout_id in shown
    assert row(2).rollout_id in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_branch_is_told_from_the_rollout_of_its_task(capsys: pytest.CaptureFixture[str]) -> None:
    first = row(0)
    branch = msgspec.structs.replace(row(1), index=0, branch_of=first.rollout_id)
    _print_rows([first, branch])
    lines = capsys.readouterr().out.splitlines()
    marked = [line for line in lines if "branch" in line]
    assert len(marked) == 1
    assert branch.rollout_id in marked[0]


@pytest.mark.parametrize(("count", "more"), [(2, False), (4, True)])
def test_a_name_of_several_lists_ids_and_says_what_to_do(count: int, *, more: bool) -> None:
    with pytest.raises(BadInput) as refused:
        chosen([row(number) for number in range(count)], "HumanEval/7")
    assert refused.value.message.startswith(f"'HumanEval/7' may be any of {count} rollouts: rol_0")
    assert refused.value.message.endswith("; name one by its id")
    assert ("…" in refused.value.message) is more
