"""What holds for this floor: a test marked ``warm`` meets boxes that fork their python actions."""

import pytest

from support import sandbox


@pytest.fixture(autouse=True)
def _warm_where_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("warm") is not None:
        monkeypatch.setattr(sandbox, "WARM", True)
