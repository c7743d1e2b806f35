import pickle
import tomllib
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from stoker.config import keys
from stoker.config.load import load_settings
from stoker.config.secret import DOTS, Secret
from stoker.config.show import rows, toml_text
from stoker.config.toml_lines import key_lines, line_of
from stoker.config.units import duration_text, seconds, size_bytes, size_text


class Holder(BaseModel):
    token: Secret


def test_what_is_shown_can_be_written_back() -> None:
    resolved = load_settings(sets=["ledger.lease=90s", "workers.classes.fast.limits.memory=1.5GiB"])
    text = [f"{row.key}={row.value}" for row in rows(resolved) if row.value not in {"unset", "{}"}]
    assert load_settings(sets=text).settings == resolved.settings


def test_every_setting_has_a_meaning_in_the_docs() -> None:
    silent = [
        keys.dotted(key.path)
        for key in keys.all_keys()
        if key.field is None or not key.field.description
    ]
    assert silent == []


def test_units_are_shown_as_people_write_them() -> None:
    shown = {row.key: row.value for row in rows(load_settings())}
    assert shown["ledger.lease"] == '"10s"'
    assert shown["lane.retry_delay"] == '"200ms"'
    assert shown["workers.classes.fast.deadline"] == '"30m"'
    assert shown["workers.classes.fast.limits.memory"] == '"512MiB"'
    assert shown["run.task_limit"] == "unset"


@given(st.floats(min_value=0.001, max_value=1e7))
def test_durations_survive_being_shown(value: float) -> None:
    assert cast("float", seconds(duration_text(value))) == pytest.approx(value, rel=1e-5)


@given(st.integers(min_value=1, max_value=2**50))
def test_sizes_survive_being_shown(value: int) -> None:
    assert size_bytes(size_text(value)) == value


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_texts_are_valid_toml(value: str) -> None:
    assert tomllib.loads(f"a = {toml_text(value)}") == {"a": value}


def test_a_secret_prints_as_dots_everywhere() -> None:
    holder = Holder.model_validate({"token": "hunter2"})
    seen = f"{holder} {holder!r} {holder.token!s:>3} {holder.model_dump_json()}"
    assert "hunter2" not in seen
    assert DOTS in toml_text(holder.token)
    assert holder.token.reveal() == "hunter2"
    with pytest.raises(TypeError):
        pickle.dumps(holder.token)


def test_lines_of_every_kind_of_key() -> None:
    lines_given = [
        "a.b = 1",
        '[t."quoted name"]',
        'x = """',
        "y = 2",
        '"""',
        "z = [ # [",
        "  1,",
        "]",
        "[[rows]]",
        "k = 'a = b'",
        "[[rows]]",
        "k = { inner = 1 }",
    ]
    source = "\n".join(lines_given)
    tomllib.loads(source)
    lines = key_lines(source)
    assert lines[("a", "b")] == 1
    assert lines[("t", "quoted name")] == 2
    assert lines[("t", "quoted name", "x")] == 3
    assert ("t", "quoted name", "y") not in lines
    assert lines[("t", "quoted name", "z")] == 6
    assert lines[("rows",)] == 9
    assert line_of(lines, ("rows", "k", "inner")) == 10
    assert line_of(lines, ("unheard",)) is None
