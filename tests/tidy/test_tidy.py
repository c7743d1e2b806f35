"""STYLE, executed. A rule that is broken names file, line and what to do."""

import ast
import re
from collections.abc import Iterator

import pytest

from support.allowed import BOUNDARIES, ENTRY_POINTS, OUTSIDE
from support.source import SOURCE, Function, Module, broken, everything, functions, imports, package

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 7
DOCSTRING_LINES_MAX = 20
FORBIDDEN_IMPORTS = {"time", "random", "uuid", "subprocess"}
FORBIDDEN_NAMES = {
    "os.environ", "os.getenv", "os.fork", "os.posix_spawn", "os.execv", "os.execve", "os.execvpe",
    "os.system", "os.popen",
}  # fmt: skip
FORBIDDEN_CALLS = {"create_subprocess_exec", "create_subprocess_shell"}
FORBIDDEN_FOLDERS = {"core", "common", "utils", "util", "helpers", "misc", "lib"}
INSIDE_BOXES = "stoker.sandbox.inside"
SCALARS = {"str", "int", "float", "bool", "bytes", "Path"}


def test_files_stay_below_the_ratchet() -> None:
    broken(
        f"{module.where}: {lines} lines, at most {FILE_LINES_MAX}"
        for module in everything()
        if (lines := module.text.count("\n")) > FILE_LINES_MAX
    )


def test_functions_stay_below_the_ratchet() -> None:
    broken(
        f"{module.where}:{node.lineno}: {name} has {lines} lines, at most {FUNCTION_LINES_MAX}"
        for module in everything()
        for name, node in functions(module.tree)
        if (lines := length(node)) > FUNCTION_LINES_MAX
    )


def test_parameters_stay_below_the_ratchet() -> None:
    # A command's options are its parameters; they are given by name on the command line.
    broken(
        f"{module.where}:{node.lineno}: {name} has {count} parameters, at most {PARAMETERS_MAX}"
        for module in package()
        for name, node in functions(module.tree)
        if (count := len(parameters(node))) > PARAMETERS_MAX and not is_command(node)
    )


def test_long_rows_of_one_type_are_keyword_only() -> None:
    """Two neighbours of one type get swapped sooner or later; three are never told apart."""
    broken(
        f"{module.where}:{node.lineno}: {name} takes {row} in a row; make them keyword-only"
        for module in package()
        for name, node in functions(module.tree)
        if (row := longest_row(node)) and not is_command(node)
    )


def test_every_module_says_what_it_is_for() -> None:
    for module in everything():
        if module.path.name.startswith("test_"):
            continue  # the names of its tests say it
        said = ast.get_docstring(module.tree) or ""
        assert said, f"{module.where}: no docstring"
        lines = said.count("\n") + 1
        assert lines <= DOCSTRING_LINES_MAX, f"{module.where}: docstring of {lines} lines"


def test_rooms_are_nouns_of_the_domain() -> None:
    folders = {path.name for path in SOURCE.rglob("*") if path.is_dir()}
    assert not folders & FORBIDDEN_FOLDERS


def test_no_module_is_dead() -> None:
    names = {module.name for module in package()}
    # A module that is started with -m, or shipped for users' tests, is named as a string or used
    # by our own tests, as theirs would.
    used = {name for module in everything() for name in needs(module, names)} | set(ENTRY_POINTS)
    broken(
        f"{name}: nothing imports it"
        for name in names - used
        if not is_package(name) and not name.startswith("stoker.testing")
    )


def test_print_is_for_the_command_line() -> None:
    broken(
        f"{module.where}:{node.lineno}: print"
        for module in package()
        if not module.where.startswith("cli/")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    )


def test_the_outside_world_comes_in_through_the_seams() -> None:
    reached = {(module.where, what, line) for module in package() for what, line in outside(module)}
    broken(
        f"{where}:{line}: {what} belongs to a seam; give the function what it needs instead"
        for where, what, line in reached
        if not any(where.startswith(owner) and what == ok for owner, ok in OUTSIDE)
    )
    broken(
        f"support/allowed.py: OUTSIDE holds {owner} for {ok}, which no longer needs it"
        for owner, ok in OUTSIDE
        if not any(where.startswith(owner) and what == ok for where, what, _ in reached)
    )


def test_everything_is_caught_at_named_boundaries_only() -> None:
    swallowing = {
        f"{module.where}:{name}"
        for module in package()
        for name, node in functions(module.tree)
        for handler in own_nodes(node)
        if isinstance(handler, ast.ExceptHandler) and is_broad(handler) and not raises(handler)
    }
    broken(
        f"{where} catches everything and goes on; catch what you mean, or name it in BOUNDARIES"
        for where in swallowing - set(BOUNDARIES)
    )
    broken(
        f"support/allowed.py: BOUNDARIES holds {where}, which no longer needs it"
        for where in set(BOUNDARIES) - swallowing
    )


def test_exceptions_to_the_rules_give_a_human_reason() -> None:
    marks = re.compile(r"#\s*noqa(?P<rest>.*)")
    broken(
        f"{module.where}:{number}: {line.strip()[:80]}"
        for module in package()
        for number, line in enumerate(module.text.splitlines(), start=1)
        if (mark := marks.search(line))
        and not re.match(r":\s*[A-Z0-9, ]+\s+[-#].*\w{3}", mark["rest"])
        and "re.compile" not in line
    )


# --- what the rules look at -----------------------------------------------------------------


def length(node: Function) -> int:
    """Count lines of the body; a docstring and the signature are not branches to follow."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def parameters(node: Function) -> list[ast.arg]:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [one for one in arguments if one.arg not in {"self", "cls"}]


def longest_row(node: Function) -> str:
    """Return three or more neighbouring positional parameters of one plain type."""
    row: list[str] = []
    before = ""
    for one in [*node.args.posonlyargs, *node.args.args]:
        kind = ast.unparse(one.annotation) if one.annotation else ""
        row = [*row, one.arg] if kind == before and kind in SCALARS else [one.arg]
        before = kind
        if len(row) > 2:
            return ", ".join(row)
    return ""


def is_command(node: Function) -> bool:
    return any("typer." in ast.unparse(one.annotation) or "Option" in ast.unparse(one.annotation)
               for one in parameters(node) if one.annotation)  # fmt: skip


def is_package(name: str) -> bool:
    return (SOURCE.parent.joinpath(*name.split(".")) / "__init__.py").exists()


def needs(module: Module, names: set[str]) -> Iterator[str]:
    inside = module.path.is_relative_to(SOURCE)
    for name, _ in imports(module):
        if name in names and not (inside and name == module.name):
            yield name
        yield f"{INSIDE_BOXES}.{name}"  # scripts in a box import each other by bare name
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
            yield f"{INSIDE_BOXES}.{node.value.removesuffix('.py')}"


def outside(module: Module) -> Iterator[tuple[str, int]]:
    for name, line in imports(module):
        root = name.split(".")[0]
        if root in FORBIDDEN_IMPORTS:
            yield root, line
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            if ast.unparse(node) in FORBIDDEN_NAMES:
                yield ast.unparse(node), node.lineno
            elif node.attr in FORBIDDEN_CALLS:
                yield node.attr, node.lineno


def own_nodes(node: Function) -> Iterator[ast.AST]:
    """Yield what a function holds, without what its inner functions hold."""
    waiting = list(ast.iter_child_nodes(node))
    while waiting:
        child = waiting.pop()
        yield child
        if not isinstance(child, Function | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(child))


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type
    names = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    return any(
        name is None or ast.unparse(name) in {"Exception", "BaseException"} for name in names
    )


def raises(handler: ast.ExceptHandler) -> bool:
    """Whether the handler ends by raising: it cleans up or translates, and swallows nothing."""
    return isinstance(handler.body[-1], ast.Raise)


@pytest.mark.parametrize(
    ("text", "count"),
    [("def f(): pass", 1), ("def f():\n '''d'''\n x = 1\n y = 2", 2), ("def f(): 'd'", 0)],
)
def test_the_ruler_itself(text: str, count: int) -> None:
    ((_, node),) = functions(ast.parse(text))
    assert length(node) == count
