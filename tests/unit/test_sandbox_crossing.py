"""Plain data between judge and solution."""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.sandbox import judge


def _load() -> ModuleType:
    path = Path(judge.__file__).parent / "inside" / "crossing.py"
    spec = importlib.util.spec_from_file_location("crossing_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


crossing = _load()
KEYS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
PLAIN = st.recursive(
    KEYS | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_data_comes_back_equal_and_of_the_same_types(value: object) -> None:
    back = crossing.decode(json.loads(json.dumps(crossing.encode(value))))
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value) or isinstance(value, (set, frozenset, dict, list, tuple))


def test_nan_and_lone_surrogates_cross() -> None:
    back = crossing.decode(json.loads(json.dumps(crossing.encode([math.nan, "\ud800"]))))
    assert math.isnan(back[0])
    assert back[1] == "\ud800"


def test_subclasses_arrive_as_their_base() -> None:
    class Equal(int):
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    back = crossing.decode(crossing.encode(Equal(41)))
    assert type(back) is int
    assert back != 6


@pytest.mark.parametrize("value", [object(), print, iter([]), range(3), [object()]])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(crossing.CannotCrossError):
        crossing.encode(value)


def test_nesting_is_bounded_even_when_it_never_ends() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(crossing.CannotCrossError, match="nested"):
        crossing.encode(endless)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("ifbctdszq"), inner),
    max_leaves=10,
)


@given(JSON)
def test_malformed_data_is_an_error_never_something_else(message: object) -> None:
    try:
        crossing.decode(message)
    except (ValueError, TypeError, OverflowError):
        return
