"""The source tree as syntax trees, for tests that hold the code to its style."""

import ast
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "stoker"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """One parsed file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def where(self) -> str:
        """Path as a reader finds it: ``rollout/host.py`` or ``tests/unit/test_x.py``."""
        base = SOURCE if self.path.is_relative_to(SOURCE) else ROOT
        return str(self.path.relative_to(base))

    @property
    def name(self) -> str:
        """Dotted name of a module of the package."""
        parts = self.path.relative_to(SOURCE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parsed(folder: Path) -> list[Module]:
    """Return every Python file below ``folder``."""
    return [
        Module(path, text := path.read_text(encoding="utf-8"), ast.parse(text))
        for path in sorted(folder.rglob("*.py"))
    ]


@cache
def package() -> list[Module]:
    """Return every module of the package."""
    return parsed(SOURCE)


@cache
def everything() -> list[Module]:
    """Return every Python file of the tree."""
    folders = ("tests", "tools", "bench", "examples")
    return package() + [module for name in folders for module in parsed(ROOT / name)]


def functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, Function]]:
    """Yield qualified name and node of every function, methods and inner ones too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield f"{above}{node.name}", node
            yield from functions(node, f"{above}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{above}{node.name}.")
        else:
            yield from functions(node, above)


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """Yield dotted name and line of everything ``module`` imports, relative imports resolved."""
    package_parts = module.name.split(".") if module.path.is_relative_to(SOURCE) else []
    if module.path.name != "__init__.py":
        package_parts = package_parts[:-1]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package_parts[: len(package_parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def tracked_texts() -> Iterator[tuple[Path, str]]:
    """Yield path and text of every file that belongs to the tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        try:
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue


def broken(findings: Iterable[str]) -> None:
    """Fail with every finding on a line of its own."""
    found = sorted(findings)
    assert not found, "\n" + "\n".join(found)
