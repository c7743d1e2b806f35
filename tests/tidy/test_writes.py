"""Whatever writes a file goes through a fault point, so that the crash floor can try it."""

import ast

from support.allowed import UNTRIED_WRITES
from support.source import Function, broken, functions, package

_WRITES = {"write_bytes", "write_text", "copyfile", "copytree", "pwrite"}
_MODES = {"w", "wb", "x", "xb", "a", "ab"}
_POINTS = {"reach", "write", "tears"}
NOT_OURS = ("testing/", "cli/bench_", "sandbox/inside/")
"""What writes there is a bench, a test, or what runs in a box."""


def writes(function: Function) -> bool:
    """Whether the function itself makes or fills a file."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        given = [*node.args, *(word.value for word in node.keywords)]
        modes = {one.value for one in given if isinstance(one, ast.Constant)}
        if name in _WRITES or (name == "open" and modes & _MODES):
            return True
    return False


def reaches(function: Function) -> bool:
    """Whether the function goes through a fault point."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _POINTS
        for node in ast.walk(function)
    )


def test_whoever_writes_a_file_has_a_fault_point_or_a_reason() -> None:
    found = {
        f"{module.where}:{name}"
        for module in package()
        if not module.where.startswith(NOT_OURS)
        for name, function in functions(module.tree)
        if writes(function) and not reaches(function)
    }
    broken(f"{one} writes a file and reaches no fault point" for one in found - set(UNTRIED_WRITES))
    broken(f"support/allowed.py: {one} needs no entry" for one in set(UNTRIED_WRITES) - found)
