"""The JSON Schema of settings as it is written. To rewrite the file: ``python`` this file."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import main
from stoker.config import keys
from stoker.config.schema import UNIT, settings_schema
from stoker.config.show import _is
from stoker.config.units import Duration, Size

FILE = Path(__file__).resolve().parent / "files" / "settings_schema.json"
SCHEMA = settings_schema()


def text() -> str:
    return json.dumps(SCHEMA, indent=2) + "\n"


def followed(part: Any) -> Any:
    """Return a part of the schema with its reference followed; what stands beside it stays."""
    reference = part.get("$ref")
    if reference is None:
        return part
    name = reference.removeprefix("#/$defs/")
    return SCHEMA["$defs"][name] | {key: value for key, value in part.items() if key != "$ref"}


def described(path: keys.Path) -> Any:
    part: Any = SCHEMA
    for name in path:
        part = followed(part)
        properties = part.get("properties", {})
        part = part["additionalProperties"] if name == keys.ENTRY else properties[name]
    return followed(part)


KEYS = list(keys.all_keys())


@pytest.mark.parametrize("key", KEYS, ids=lambda key: keys.dotted(key.path))
def test_every_setting_is_in_it_with_unit_default_and_meaning(key: keys.Key) -> None:
    part = described(key.path)
    assert key.field is not None
    if key.path[-1] == keys.ENTRY:
        return  # a free name; what it holds is of the table's kind
    assert part["description"], "what it means"
    assert ("default" in part) is not key.field.is_required()
    assert (part.get(UNIT) == "seconds") is _is(key.field.metadata, Duration)
    assert (part.get(UNIT) == "bytes") is _is(key.field.metadata, Size)


def test_sections_refuse_unknown_keys_and_say_what_they_are() -> None:
    for name, part in SCHEMA["$defs"].items():
        assert part["description"], name
        assert "properties" not in part or part["additionalProperties"] is False, name


def test_quantities_are_numbers_or_texts_with_a_unit() -> None:
    number, words = described(("ledger", "lease"))["anyOf"]
    assert number == {"type": "number", "exclusiveMinimum": 0}
    for good in ("30s", "1.5 h", "200ms", ".5m"):
        assert re.search(words["pattern"], good), good
    for bad in ("30", "s", "30 parsecs", "-1s", "512MiB"):
        assert not re.search(words["pattern"], bad), bad
    _, words = described(("workers", "classes", keys.ENTRY, "limits", "memory"))["anyOf"]
    assert re.search(words["pattern"], "512MiB")


def test_entries_that_exist_by_default_are_defaults() -> None:
    assert described(("workers", "classes"))["default"].keys() == {"fast"}


def test_a_secret_is_text_that_is_not_shown() -> None:
    assert {"type": "string", "format": "password", "writeOnly": True} in described(
        ("model", "api_key")
    )["anyOf"]


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


def test_it_is_as_it_was() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), f"if it is meant: python {__file__}"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    sys.exit(0)
