"""Every number in the settings: what lies beyond its bounds is refused, with the field named."""

from collections.abc import Iterator
from typing import Any

import pytest

from stoker.config.load import load_settings
from stoker.config.tree import Settings
from stoker.errors import ConfigInvalid

SCHEMA = Settings.model_json_schema()
BEYOND = {
    "minimum": lambda bound: bound - 1,
    "maximum": lambda bound: bound + 1,
    "exclusiveMinimum": lambda bound: bound,
    "exclusiveMaximum": lambda bound: bound,
}


def beyond(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    """Yield a field and a value just beyond one of its bounds, for every bound."""
    if "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    for bound in BEYOND.keys() & node.keys():
        yield ".".join(path), BEYOND[bound](node[bound])
    for other in (*node.get("anyOf", ()), *node.get("allOf", ())):
        yield from beyond(other, path)
    for name, field in node.get("properties", {}).items():
        yield from beyond(field, (*path, name))
    if isinstance(named := node.get("additionalProperties"), dict):
        yield from beyond(named, (*path, "fast"))


NEEDED = {"services.fast.burst": ["services.fast.rate=1"]}
"""What a section must have besides, for a field of it to be looked at."""
CASES = sorted({(field, str(value)) for field, value in beyond(SCHEMA)})


def test_all_sections_with_numbers_are_among_the_cases() -> None:
    sections = {field.split(".")[0] for field, _ in CASES}
    assert sections >= {"run", "ledger", "workers", "admission", "lane", "model", "training"}


@pytest.mark.parametrize(("field", "value"), CASES)
def test_a_number_beyond_its_bounds_is_refused_and_its_field_named(field: str, value: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load_settings([], {}, [*NEEDED.get(field, ()), f"{field}={value}"])
    assert f"{field} is {value}" in caught.value.message
    assert "\n" not in caught.value.message


DURATIONS = [
    "lane.call_timeout",
    "lane.retry_delay",
    "ledger.lease",
    "program.stuck",
    "workers.classes.fast.timeout",
    "workers.classes.fast.ready_idle",
]


@pytest.mark.parametrize("field", DURATIONS)
def test_no_time_runs_backwards(field: str) -> None:
    with pytest.raises(ConfigInvalid, match=field):
        load_settings([], {}, [f"{field}=-1s"])
