import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["settings.md", "metrics.md", "errors.md", "boxes.md"])
def test_the_reference_says_what_the_code_says(name: str) -> None:
    expected = reference().pages()[name]
    written = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert written == expected, "run: python tools/reference.py"
