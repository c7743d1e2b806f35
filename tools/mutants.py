"""Break the code in one small way at a time, and count how often the tests notice.

``mutants.py --group broker --sample 100 --seed 1`` changes the syntax tree of one file (a
comparison turned or moved by one, ``and`` for ``or``, a statement left out, a constant, an enum's
member, a keyword of a row's change), runs the group's quick floors, and prints what survived.
Nothing is written to the tree: a fork of this process imports the changed module in the place of
the true one. Results are kept in ``.mutants.jsonl``, so that a run that was stopped goes on.

Left alone, since no test should hold them: messages, docstrings, assertions (they state our own
invariants), log lines and counters. A survivor that cannot be noticed stands with its reason in
``docs/design/0011-mutants.md``; the goal is 90 % of the others. Run with .venv's Python, nicely.
"""

import argparse
import ast
import copy
import difflib
import enum
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "stoker"
KEPT = ROOT / ".mutants.jsonl"
EXPLAINED = ROOT / "docs" / "design" / "0011-mutants.md"
CPU_SECONDS = 40
WALL_SECONDS = 600
GOAL = 0.9

_BROKER = ("core", "loss", "books", "coordinator_verbs", "worker_verbs", "queueing", "expiry")
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
# Real owners and files run the same service; a fork's children would import the true module.
CHOICE = {
    "broker": "not sqlite and not owner and not postgres and not exhaustive",
    "apply": "test_coordinator or test_run_",
}
PRELOADED = (
    "pytest",
    "hypothesis",
    "msgspec",
    "apsw",
    "pydantic",
    "structlog",
    "prometheus_client",
)

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

    file: str
    name: str
    source: str
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
    return Mutant(site.file, site.name, after, "\n".join(list(lines)[2:]))


def _tree(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


def _nodes(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes that may change, outside messages, assertions and declarations."""
    found: list[ast.AST] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.arguments | ast.AnnAssign | ast.Raise):
            found.extend([node] if isinstance(node, ast.Raise) else [])
            return
        if isinstance(node, ast.Expr) and (_is_text(node.value) or _is_quiet(node.value)):
            return
        found.append(node)
        for field, value in ast.iter_fields(node):
            if field in {"decorator_list", "returns", "annotation"}:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child)

    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            visit(statement)
    return found


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_quiet(node: ast.expr) -> bool:
    told = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    return isinstance(node, ast.Call) and any(word in told for word in QUIET)


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
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATED:
        yield _set(node, "op", OPERATED[type(node.op)]())
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(
        node.test, ast.Compare | ast.BoolOp | ast.Constant
    ):
        yield _set(node, "test", _negated(node.test))
    elif isinstance(node, ast.Constant):
        yield from _constant(node)
    elif isinstance(node, ast.Attribute):
        yield from _member(node)
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


# --- trying them


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module another source."""

    def __init__(self, module: str, source: str) -> None:
        self._module, self._source = module, source

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Claim the changed module."""
        return importlib.util.spec_from_loader(name, self) if name == self._module else None

    def exec_module(self, module: ModuleType) -> None:
        """Run the other source."""
        exec(compile(self._source, f"<mutant of {self._module}>", "exec"), vars(module))  # noqa: S102


def tried(group: str, mutant: Mutant | None) -> str:
    """Run a group's floors on a mutant: ``killed``, ``timed out`` or ``survived``."""
    pid = os.fork()
    if pid == 0:
        _child(group, mutant)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return "timed out" if os.WTERMSIG(status) in {signal.SIGALRM, signal.SIGXCPU} else "killed"
    return "killed" if os.WEXITSTATUS(status) else "survived"


def _child(group: str, mutant: Mutant | None) -> None:
    pytest = importlib.import_module("pytest")
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2) if mutant is not None else ():
        os.dup2(quiet, descriptor)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    signal.alarm(WALL_SECONDS)
    if mutant is not None:
        module = "stoker." + mutant.file.removesuffix(".py").replace("/", ".")
        sys.meta_path.insert(0, Changed(module, mutant.source))
    chosen = f"({CHOICE[group]})"
    arguments = [
        "-x",
        "-q",
        "--assert=plain",
        "-m",
        "not slow and not root",
        "-k",
        chosen,
        *GROUPS[group][1],
    ]
    code = 70
    try:
        code = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(code)


def run(group: str, chosen: Sequence[Mutant]) -> dict[str, str]:
    """Try mutants in turn, keeping each result; those kept already are not tried again."""
    kept = _kept()
    found: dict[str, str] = {}
    for number, mutant in enumerate(chosen, start=1):
        key = hashlib.sha256(f"{mutant.name}\n{mutant.source}".encode()).hexdigest()[:16]
        if key not in kept:
            began = time.monotonic()
            kept[key] = tried(group, mutant)
            line = {"key": key, "name": mutant.name, "result": kept[key]}
            with KEPT.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            spent = time.monotonic() - began
            print(
                f"{number:4}/{len(chosen)} {kept[key]:9} {spent:5.1f} s  {mutant.name}", flush=True
            )
        found[mutant.name] = kept[key]
    return found


def _kept() -> dict[str, str]:
    if not KEPT.exists():
        return {}
    lines = [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()]
    return {line["key"]: line["result"] for line in lines}


def main() -> int:
    """Choose, try, report; return 0 when the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", choices=sorted(GROUPS), required=True)
    parser.add_argument("--sample", type=int, help="how many, chosen by the seed; all by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="try those whose name holds this")
    parser.add_argument("--list", action="store_true", help="print names and diffs, try nothing")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    everything = [site for file in GROUPS[arguments.group][0] for site in sites(file)]
    chosen = [site for site in everything if arguments.only in site.name]
    if arguments.sample is not None and arguments.sample < len(chosen):
        chosen = random.Random(arguments.seed).sample(chosen, arguments.sample)  # noqa: S311 - a sample
    if arguments.list:
        for mutant in map(made, chosen):
            print(f"{mutant.name}\n{mutant.diff}\n")
        return 0
    print(f"{len(chosen)} of {len(everything)} mutants of {arguments.group}", flush=True)
    if tried(arguments.group, None) != "survived":
        print("the floors fail on the unchanged code; nothing was tried; run them and repair that")
        return 2
    mutants = [made(site) for site in chosen]
    return report(mutants, run(arguments.group, mutants))


def report(chosen: Sequence[Mutant], results: dict[str, str]) -> int:
    """Print survivors and shares."""
    known = EXPLAINED.read_text(encoding="utf-8") if EXPLAINED.exists() else ""
    survived = [mutant for mutant in chosen if results[mutant.name] == "survived"]
    explained = [mutant for mutant in survived if f"{mutant.name}\n" in known]
    for mutant in survived:
        if mutant not in explained:
            print(f"\nsurvived: {mutant.name}\n{mutant.diff}")
    counted = len(chosen) - len(explained)
    share = (len(chosen) - len(survived)) / counted if counted else 1.0
    print(
        f"\n{len(chosen)} tried, {len(chosen) - len(survived)} killed, {len(survived)} survived, "
        f"of which {len(explained)} are explained: {share:.1%} of the others killed"
    )
    return 0 if share >= GOAL else 1


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    ENUMS = enums()
    for name in [name for name in sys.modules if name.partition(".")[0] == "stoker"]:
        del sys.modules[name]
    for name in PRELOADED:
        importlib.import_module(name)
    sys.exit(main())
