"""Break the code in one small way at a time, and count how often the tests notice.

``mutants.py --group broker --sample 300 --seed 1`` changes the syntax tree of one function (a
comparison turned or moved by one, ``and`` for ``or``, a statement left out, a constant, an enum's
member, a keyword of a row's change), runs the group's quick floors, and prints what survived.
Nothing is written to the tree: ``mutant_floors`` gives the functions of a fork their other code.
Results are kept in ``.mutants.jsonl``, so that a run that was stopped goes on.

Left alone, since no test should hold them: messages, docstrings, assertions (they state our own
invariants), log lines, counters of the live view and fault points (one that is never reached fails
the crash floor). A change that compiles to the same code is
none. A mutant that runs ten times as long as the true code, and more, is noticed as *endless*: it
loops, or waits for what never comes. A survivor that cannot be noticed stands with its reason in
``docs/design/0011-mutants.md``; the goal is 90 % of the others. Run with .venv's Python, nicely.
"""

import argparse
import ast
import copy
import difflib
import enum
import hashlib
import importlib
import json
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from mutant_floors import SAME, Floors, Verdict, collected

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "stoker"
KEPT = ROOT / ".mutants.jsonl"
REASONS = ROOT / "docs" / "design" / "0011-mutants.md"
EXPLAINED = "explained"
"""The result of a mutant that cannot be noticed: its name stands there; it is not tried."""
GOAL = 0.9

_BROKER = (
    "core",
    "loss",
    "books",
    "counts",
    "coordinator_verbs",
    "worker_verbs",
    "queueing",
    "expiry",
)
_APPLY = ("events", "results", "appender", "restoring", "resuming", "rebuild", "flow")
GROUPS: dict[str, tuple[list[str], list[str]]] = {
    "broker": (
        [f"broker/{name}.py" for name in _BROKER],
        ["tests/unit/test_broker_core.py", "tests/model"],
    ),
    "apply": (
        [f"coordinator/{name}.py" for name in _APPLY],
        ["tests/unit", "tests/simulation"],
    ),
}
# Real owners and files run the same service; a process of its own has the true code.
CHOICE = {
    "broker": "not sqlite and not owner and not postgres and not gateway and not exhaustive",
    "apply": "test_coordinator or test_run_",
}

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
}
QUIET = ("log", "figures")
"""Attributes whose calls only tell: left alone."""
COUNTERS = {"transitions", "commits", "syncs"}
"""What a live view shows and nobody decides by: left alone."""
BELLS = {"work_seq", "events_seq", "tickets_seq"}
"""Numbers that only differ from what they were before: left out, not counted otherwise."""
CHANGES = {"replace", "_replace", "Row", "Decision"}
"""Calls of which one keyword is left out: the rest of the row keeps its old value."""


class Site(NamedTuple):
    """One change that can be made."""

    file: str
    name: str
    """What is changed, without line numbers: stable while the code around it moves."""
    place: int
    number: int


class Mutant(NamedTuple):
    """One changed file."""

    name: str
    key: str
    """Of the change and what is around it: a result is kept under it."""
    code: CodeType
    diff: str


# --- making them


def sites(file: str) -> Iterator[Site]:
    """Yield every change of a file, in order of its lines."""
    tree = _tree(file)
    seen: Counter[str] = Counter()
    for place, node in enumerate(_nodes(tree)):
        for number, (what, _) in enumerate(_changes(node, tree)):
            name = f"{file} {_within(tree, node)}: {what}"
            seen[name] += 1
            again = f" ({seen[name]})" if seen[name] > 1 else ""
            yield Site(file, name + again, place, number)


def made(site: Site) -> Mutant:
    """Make one change."""
    tree = _tree(site.file)
    before = ast.unparse(tree)
    _, change = list(_changes(_nodes(tree)[site.place], tree))[site.number]
    change()
    after = ast.unparse(ast.fix_missing_locations(tree))
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
    diff = "\n".join(list(lines)[3:])
    key = hashlib.sha256(f"{site.name}\n{diff}".encode()).hexdigest()[:16]
    code = compile(tree, str(SOURCE / site.file), "exec")  # lines are those of the true source
    return Mutant(site.name, key, code, diff)


def sampled(chosen: Sequence[Site], number: int, draw: random.Random) -> list[Site]:
    """Draw ``number`` changes, from each file its share, in a drawn order."""
    files = {one.file: [site for site in chosen if site.file == one.file] for one in chosen}
    shares = {file: number * len(sites) / len(chosen) for file, sites in files.items()}
    counts = {file: int(share) for file, share in shares.items()}
    rest = sorted(shares, key=lambda file: counts[file] - shares[file])
    for file in rest[: number - sum(counts.values())]:
        counts[file] += 1
    found = [site for file, sites in files.items() for site in draw.sample(sites, counts[file])]
    draw.shuffle(found)
    return found


def _tree(file: str) -> ast.Module:
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            others = CONSTANTS[file].get(node.id, [])
            node.others = others  # type: ignore[attr-defined] # what may stand in its place
    return tree


def _nodes(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes that may change, outside messages, assertions and declarations."""
    found: list[ast.AST] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.arguments | ast.AnnAssign | ast.Raise):
            found.extend([node] if isinstance(node, ast.Raise) else [])
            return
        if _is_told(node):
            return
        found.append(node)
        if _rings(node):
            return
        for field, value in ast.iter_fields(node):
            if field in {"decorator_list", "returns", "annotation"}:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child)

    for function in _functions(tree.body):
        visit(function)
    return found


def _functions(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _functions(statement.body)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement


def _is_told(node: ast.AST) -> bool:
    """Whether somebody is told something: a docstring, a log line, a message of two."""
    if isinstance(node, ast.AugAssign) and getattr(node.target, "attr", "") in COUNTERS:
        return True
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) and _is_text(node.orelse)
    return isinstance(node, ast.Expr) and (_is_text(node.value) or _is_quiet(node.value))


def _rings(node: ast.AST) -> bool:
    return isinstance(node, ast.AugAssign) and getattr(node.target, "attr", "") in BELLS


def _is_text(node: ast.expr) -> bool:
    spoken = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return spoken or isinstance(node, ast.JoinedStr)


def _is_quiet(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    told = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    return _called(node) == "reach" or any(word in told for word in QUIET)


def _within(tree: ast.Module, node: ast.AST) -> str:
    names = [
        one.name
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and one.lineno <= getattr(node, "lineno", 0) <= (one.end_lineno or 0)
    ]
    return ".".join(names)


Change = tuple[str, Callable[[], None]]


def _changes(node: ast.AST, tree: ast.Module) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        yield from _compared(node)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield _set(node, "op", other())
    elif (
        isinstance(node, ast.BinOp | ast.AugAssign)
        and type(node.op) in OPERATED
        and not _rings(node)
    ):
        yield _set(node, "op", OPERATED[type(node.op)]())
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(
        node.test, ast.Compare | ast.BoolOp | ast.Constant
    ):
        yield _set(node, "test", _negated(node.test))
    elif isinstance(node, ast.Constant):
        yield from _constant(node)
    elif isinstance(node, ast.Attribute):
        yield from _member(node)
    elif isinstance(node, ast.Name) and getattr(node, "others", ()):
        yield _set(node, "id", node.others[0])  # type: ignore[attr-defined] # see _tree
    elif isinstance(node, ast.Call) and _called(node) in CHANGES:
        yield from _keywords(node)
    yield from _left_out(node, tree)


def _set(node: Any, field: str, value: Any) -> Change:  # noqa: ANN401 - any field of any node
    before = ast.unparse(node).split("\n")[0]
    shown = copy.deepcopy(node)
    setattr(shown, field, value)
    after = ast.unparse(ast.fix_missing_locations(shown)).split("\n")[0]
    return f"`{before}` → `{after}`", lambda: setattr(node, field, value)


def _compared(node: ast.Compare) -> Iterator[Change]:
    if len(node.ops) == 1:
        for other in COMPARED.get(type(node.ops[0]), ()):
            yield _set(node, "ops", [other()])


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _constant(node: ast.Constant) -> Iterator[Change]:
    if isinstance(node.value, bool):
        yield _set(node, "value", not node.value)
    elif isinstance(node.value, int | float):
        yield _set(node, "value", node.value + 1)


def _member(node: ast.Attribute) -> Iterator[Change]:
    """Put another member in the place of an enum's."""
    members = ENUMS.get(node.value.id) if isinstance(node.value, ast.Name) else None
    if members and node.attr in members:
        other = members[(members.index(node.attr) + 1) % len(members)]
        yield _set(node, "attr", other)


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _keywords(node: ast.Call) -> Iterator[Change]:
    for place in range(len(node.keywords)):
        if len(node.keywords) > 1 or node.args:
            kept = [word for at, word in enumerate(node.keywords) if at != place]
            shown = f"`{ast.unparse(node.keywords[place])}` of `{_called(node)}(…)` left out"
            yield shown, partial(setattr, node, "keywords", kept)


def _left_out(node: ast.AST, tree: ast.Module) -> Iterator[Change]:
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    stored = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
    told = isinstance(node, ast.AugAssign | ast.Delete | ast.Raise | ast.Continue | ast.Break)
    if not (called or stored or told):
        return
    for owner in ast.walk(tree):
        for _, value in ast.iter_fields(owner):
            if isinstance(value, list) and node in value:
                line = ast.unparse(node).split("\n")[0]
                at = value.index(node)
                yield f"`{line}` left out", partial(value.__setitem__, at, ast.Pass())
                return


def enums() -> dict[str, list[str]]:
    """Return the string enums of the ledger's words, by name."""
    found: dict[str, list[str]] = {}
    for name in (
        "broker.base",
        "broker.leasing",
        "broker.rows",
        "model.action",
        "model.completion",
    ):
        for value in vars(importlib.import_module(f"stoker.{name}")).values():
            if isinstance(value, type) and issubclass(value, enum.Enum) and len(value) > 1:
                found[value.__name__] = [member.name for member in value]
    return found


def constants(file: str) -> dict[str, list[str]]:
    """Return the names that a file gives to members of enums, each with others of its enum."""
    module = importlib.import_module("stoker." + file.removesuffix(".py").replace("/", "."))
    named = {n: value for n, value in vars(module).items() if isinstance(value, enum.Enum)}
    return {
        name: [n for n, other in named.items() if type(other) is type(value) and other != value]
        for name, value in named.items()
    }


# --- trying them


def run(floors: Floors, chosen: Sequence[Mutant], *, again: bool, jobs: int) -> dict[str, str]:
    """Try mutants, keeping each result; those kept are not tried again (survivors: ``again``)."""
    kept = _kept()
    results = {
        mutant.key: kept[mutant.key]
        for mutant in chosen
        if mutant.key in kept and not (again and kept[mutant.key] == "survived")
    }
    known = _explained()
    results |= {one.key: EXPLAINED for one in chosen if one.name in known}
    open_ones = {mutant.key: mutant for mutant in chosen if mutant.key not in results}
    spent = floors.measure()
    print(f"{len(open_ones)} to try; the unchanged code takes {spent:.1f} s of CPU", flush=True)
    trials = floors.tried(((key, one.code) for key, one in open_ones.items()), jobs)
    for number, (key, verdict) in enumerate(trials, start=1):
        results[key] = verdict.result
        spent += verdict.seconds
        _keep(open_ones[key], verdict)
        print(
            f"{number:4}/{len(open_ones)} {spent:6.0f} s  {_line(open_ones[key], verdict)}",
            flush=True,
        )
    return results


def _line(mutant: Mutant, verdict: Verdict) -> str:
    by = verdict.by.rpartition("/")[2]
    return f"{verdict.result:8} {verdict.seconds:5.1f} s  {mutant.name}  [{by}]"


def _keep(mutant: Mutant, verdict: Verdict) -> None:
    line = {"key": mutant.key, "name": mutant.name, "result": verdict.result, "by": verdict.by}
    with KEPT.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _kept() -> dict[str, str]:
    if not KEPT.exists():
        return {}
    lines = [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()]
    return {line["key"]: line["result"] for line in lines}


def main() -> int:
    """Choose, try, report; return 0 when the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", choices=sorted(GROUPS), required=True)
    parser.add_argument("--sample", type=int, help="how many, from each file its share")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="try those whose name holds this")
    parser.add_argument("--again", action="store_true", help="try kept survivors again")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at once")
    parser.add_argument("--list", action="store_true", help="print names and diffs, try nothing")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    files, tests = GROUPS[arguments.group]
    everything = [site for file in files for site in sites(file)]
    chosen = [site for site in everything if arguments.only in site.name]
    if arguments.sample is not None and arguments.sample < len(chosen):
        chosen = sampled(chosen, arguments.sample, random.Random(arguments.seed))  # noqa: S311 - a sample
    mutants = [made(site) for site in chosen]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name}\n{mutant.diff}\n")
        return 0
    print(f"{len(chosen)} of {len(everything)} mutants of {arguments.group}", flush=True)

    def work(floors: Floors) -> int:
        results = run(floors, mutants, again=arguments.again, jobs=arguments.jobs)
        return report(mutants, results, whole=len(chosen) == len(everything))

    return collected(tests, CHOICE[arguments.group], [SOURCE / file for file in files], work)


def report(chosen: Sequence[Mutant], results: dict[str, str], *, whole: bool) -> int:
    """Print survivors and shares."""
    count = Counter(results[mutant.key] for mutant in chosen)
    for mutant in chosen:
        if results[mutant.key] == "survived":
            print(f"\nsurvived: {mutant.name}\n{mutant.diff}")
    killed = count["killed"] + count["endless"]
    tried = killed + count["survived"]
    share = killed / tried if tried else 1.0
    print(
        f"\n{tried} tried, {killed} killed ({count['endless']} of them endless), "
        f"{count['survived']} survived: {share:.1%} killed"
        + ("" if whole else _interval(killed, tried))
        + f"; {count[EXPLAINED]} cannot be noticed, {count[SAME]} are the same code"
    )
    return 0 if share >= GOAL else 1


def _explained() -> set[str]:
    """Return the names of mutants whose reason is written down."""
    lines = REASONS.read_text(encoding="utf-8").splitlines()
    return {line.strip() for line in lines if line.startswith("    ")}


def _interval(killed: int, counted: int) -> str:
    """Return the 95 % interval (Wilson) of a share that was sampled."""
    z, share = 1.96, killed / max(1, counted)
    wide = 1 + z * z / max(1, counted)
    middle = (share + z * z / (2 * max(1, counted))) / wide
    half = (
        z * math.sqrt(share * (1 - share) / max(1, counted) + (z / max(1, counted) / 2) ** 2) / wide
    )
    return f" (95 %: {middle - half:.1%} to {middle + half:.1%})"


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    ENUMS = enums()
    CONSTANTS = {file: constants(file) for files, _ in GROUPS.values() for file in files}
    sys.exit(main())
