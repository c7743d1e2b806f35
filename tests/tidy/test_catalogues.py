"""What the docs owe the code: codes, metrics, settings and promised numbers."""

import ast
import re
from functools import cache

import pytest

from stoker import errors
from stoker.config import keys
from stoker.observe import catalogue
from support.source import ROOT, broken, everything, functions, package

SPECIFICATION = ROOT / "docs" / "SPECIFICATION.md"
BENCH_FIGURE = re.compile(
    r"\b(step|ledger|ledger_postgres|boxes|attacks|lane|scale|seeing|simulate|soak|torch)"
    r"\.[a-z0-9_]+\b"
)
TEST_NAME = re.compile(r"\btest_\w+")


@cache
def docs() -> str:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def test_every_error_code_is_in_the_docs() -> None:
    codes = {cls.code for cls in vars(errors).values() if isinstance(cls, type)
             and issubclass(cls, errors.StokerError)}  # fmt: skip
    broken(f"error {code} is in no document" for code in codes if f"`{code}`" not in docs())


def test_error_codes_and_classes_are_one_to_one() -> None:
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type)
               and issubclass(cls, errors.StokerError)]  # fmt: skip
    codes = [cls.code for cls in classes]
    assert sorted(codes) == sorted(set(codes))
    assert all(cls.__doc__ and cls.__doc__.strip().endswith(".") for cls in classes)


def test_every_metric_and_log_event_is_in_the_docs() -> None:
    names = [metric.name for metric in catalogue.METRICS] + list(catalogue.LOG_EVENTS)
    broken(f"{name} is in no document" for name in names if f"`{name}`" not in docs())


def test_every_setting_is_in_the_docs() -> None:
    names = [keys.dotted(key.path) for key in keys.all_keys()]
    broken(f"setting {name} is in no document" for name in names if f"`{name}`" not in docs())


def test_every_metric_of_the_catalogue_is_measured_somewhere() -> None:
    constants = {
        name for name, value in vars(catalogue).items() if isinstance(value, catalogue.Metric)
    }
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for module in package()
        if not module.where.startswith("observe/")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute | ast.Name)
    }
    broken(f"catalogue.{name} is measured nowhere" for name in constants - used)


def test_every_log_event_of_the_catalogue_is_written_somewhere() -> None:
    written = {
        ast.literal_eval(node.args[0])
        for module in package()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "event"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    } | {catalogue.ROLLOUT_FINISHED}
    broken(f"log event {name} is written nowhere" for name in set(catalogue.LOG_EVENTS) - written)


def test_no_metric_is_made_outside_the_catalogue() -> None:
    broken(
        f"{module.where}: {node.value}"
        for module in package()
        if module.where != "observe/catalogue.py"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"stoker_[a-z_]+_(total|seconds|share|bytes)", node.value)
    )


def test_every_promised_number_has_a_test_a_bench_figure_or_is_pending() -> None:
    if not SPECIFICATION.exists():
        pytest.fail("docs/SPECIFICATION.md is missing: each promised number with its test")
    known = {name for module in everything() for name, _ in functions(module.tree)}
    rows = [
        (number, line)
        for number, line in enumerate(SPECIFICATION.read_text(encoding="utf-8").splitlines(), 1)
        if line.startswith(("|", "- ", "* ")) and re.search(r"\d", re.sub(r"`[^`]*`", "", line))
    ]
    assert rows, "docs/SPECIFICATION.md promises no number"
    broken(
        f"docs/SPECIFICATION.md:{number}: names no test, bench figure or *pending*: {line[:80]}"
        for number, line in rows
        if not (TEST_NAME.search(line) or BENCH_FIGURE.search(line) or "pending" in line)
    )
    broken(
        f"docs/SPECIFICATION.md:{number}: there is no {name}"
        for number, line in rows
        for name in TEST_NAME.findall(line)
        if name not in known and not any((ROOT / "tests").rglob(f"{name}.py"))
    )
