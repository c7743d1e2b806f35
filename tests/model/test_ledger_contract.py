"""One suite for every engine of the ledger: see ``stoker.testing.ledger_contract``."""

from pathlib import Path

import pytest

from stoker.testing.ledger_contract import CASES, Case
from support.ledger import ENGINES, with_ledger


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(engine: str, case: Case, tmp_path: Path) -> None:
    with_ledger(engine, tmp_path, case.scenario, case.limits)


def test_every_invariant_has_a_case() -> None:
    assert {case.invariant for case in CASES} == {*(f"I{n}" for n in range(1, 14)), "tickets"}
    assert len({case.name for case in CASES}) == len(CASES)
