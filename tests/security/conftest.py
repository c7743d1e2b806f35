"""What holds for this floor: which backends a test meets by default, and warm boxes where marked.

The contract of a backend is one suite: its tests take a ``rung``, and every backend that promises
what they try is among the parameters. Containers start slowly; by default they run what is marked
``every_backend``, in ``make test-all`` everything.
"""

import pytest

from stoker.model.execution import Rung
from support import sandbox

_SLOW_TO_START = (Rung.RUNC, Rung.CRUN)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        rung = getattr(item, "callspec", None) and item.callspec.params.get("rung")  # type: ignore[attr-defined]
        if rung in _SLOW_TO_START and item.get_closest_marker("every_backend") is None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _warm_where_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("warm") is not None:
        monkeypatch.setattr(sandbox, "WARM", True)
