"""Damaged solutions: the canonical answer with one realistic slip, the same on every machine.

A slip is a small edit of the text at a place the syntax tree names, so comments and layout stay and
no Python version rewrites anything else: a wrong comparison, a wrong operator, a number off by one,
a flipped truth value, a dropped line, a misspelt name, one name for another. The slips of a problem
are tried in a seeded order, one of each kind first; the one used is the first that makes its tests
fail with a traceback within a second. Finding it means running tests, so the choice is kept in
``damage.json`` (``python damage.py`` writes it anew) and a unit test holds all 164 of them to it.
"""

import ast
import builtins
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from problems import Problem, read_problems

SEED = 7
_CHOICES = Path(__file__).with_name("damage.json")
_TRY_SECONDS = 1.0
_LONG = 3
_LAST_RESORT = "lost result"
"""Taken only where nothing else fails: it is the least like a slip."""
_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}


@dataclass(frozen=True)
class Slip:
    """One edit of a solution file."""

    kind: str
    line: int
    start: int
    """Offset in the text."""
    end: int
    replacement: str

    def applied(self, text: str) -> str:
        """Return ``text`` with the slip in it."""
        return text[: self.start] + self.replacement + text[self.end :]


def slips(problem: Problem) -> list[Slip]:
    """Return every slip that can be made in the problem's answer, in the order they are tried."""
    places = _Places(problem.solution)
    function = next(
        node
        for node in ast.parse(problem.solution).body
        if isinstance(node, ast.FunctionDef) and node.name == problem.entry_point
    )
    by_kind: dict[str, list[Slip]] = {}
    for slip in _found(places, function):
        by_kind.setdefault(slip.kind, []).append(slip)
    kinds = sorted(by_kind)
    drawn = random.Random(f"{SEED} {problem.task_id}")
    drawn.shuffle(kinds)
    for found in by_kind.values():
        drawn.shuffle(found)
    # One of each kind first, so that the 164 show all of them.
    longest = max(map(len, by_kind.values()), default=0)
    ordered = [by_kind[kind][i] for i in range(longest) for kind in kinds if i < len(by_kind[kind])]
    return sorted(ordered, key=lambda slip: slip.kind == _LAST_RESORT)


@lru_cache(maxsize=256)
def damaged(task_id: str) -> str:
    """Return the problem's solution file with its slip."""
    problem = read_problems()[task_id]
    return slips(problem)[_choices()[task_id]].applied(problem.solution)


def check_program(problem: Problem, solution: str) -> str:
    """Return a program that tests ``solution`` in its own process."""
    return f"{solution}\n\n{problem.check}\n\ncheck({problem.entry_point})\n"


def _found(places: "_Places", function: ast.FunctionDef) -> Iterator[Slip]:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    for statement in body:
        for node in _walk(statement):
            yield from _slips_of(places, node)
    if len(body) > 1:
        for statement in body[:-1]:
            yield places.slip("dropped line", statement, "pass")


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node but what is inside f-strings, whose places older Pythons get wrong."""
    if isinstance(node, ast.JoinedStr):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def _slips_of(places: "_Places", node: ast.AST) -> Iterator[Slip]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            yield from places.between("wrong comparison", left, right, _COMPARISONS[type(op)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            yield from places.between("wrong operator", left, right, _OPERATORS[type(op)])
        case ast.Constant(value=bool() as value):
            yield places.slip("flipped truth value", node, str(not value))
        case ast.Constant(value=int() as number):
            yield places.slip("off by one", node, str(number + 1))
        case ast.Call(args=[ast.Name(id=first) as one, ast.Name(id=second), *_]) if first != second:
            yield places.slip("one name for another", one, second)
        case ast.Name(id=name, ctx=ast.Load()) if len(name) > 1 and not hasattr(builtins, name):
            yield places.slip("misspelt name", node, name[:-1] if len(name) > _LONG else name + "s")
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield places.slip(_LAST_RESORT, value, "None")
        case _:
            pass


class _Places:
    """Finds the text of syntax nodes; columns of the tree count bytes of UTF-8."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def slip(self, kind: str, node: ast.stmt | ast.expr, replacement: str) -> Slip:
        start = self._offset(node.lineno, node.col_offset)
        end = self._offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        return Slip(kind, node.lineno, start, end, replacement)

    def between(
        self, kind: str, left: ast.expr, right: ast.expr, change: tuple[str, str]
    ) -> Iterator[Slip]:
        """Yield the slip that changes the sign between two operands, where it stands alone."""
        begin = self._offset(left.end_lineno or left.lineno, left.end_col_offset or 0)
        gap = self._text[begin : self._offset(right.lineno, right.col_offset)]
        old, new = change
        if gap.count(old) == 1 and "#" not in gap:
            start = begin + gap.index(old)
            yield Slip(kind, left.lineno, start, start + len(old), new)

    def _offset(self, line: int, column: int) -> int:
        content = self._lines[line - 1].encode()
        return self._starts[line - 1] + len(content[:column].decode())


@lru_cache(maxsize=1)
def _choices() -> dict[str, int]:
    return {task: int(index) for task, index in json.loads(_CHOICES.read_text("utf-8")).items()}


def _fails(problem: Problem, solution: str) -> bool:
    """Say whether the tests fail with a traceback, soon."""
    try:
        compile(solution, "solution.py", "exec")
        with tempfile.TemporaryDirectory() as folder:
            ran = subprocess.run(  # noqa: S603 - our own edit of published code
                [sys.executable, "-I", "-c", check_program(problem, solution)],
                capture_output=True,
                timeout=_TRY_SECONDS,
                check=False,
                cwd=folder,
            )
    except (SyntaxError, subprocess.TimeoutExpired):
        return False
    return ran.returncode == 1 and b"Traceback" in ran.stderr


def choose() -> dict[str, int]:
    """Return, for every problem, the first slip that fails its tests."""
    chosen = {}
    for task_id, problem in read_problems().items():
        found = enumerate(slips(problem))
        chosen[task_id] = next(i for i, s in found if _fails(problem, s.applied(problem.solution)))
    return chosen


if __name__ == "__main__":
    _CHOICES.write_text(json.dumps(choose(), indent=0) + "\n", "utf-8")
