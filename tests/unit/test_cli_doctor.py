import json
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from stoker.cli.main import main
from stoker.model.execution import Isolation, Rung
from stoker.sandbox.base import BoxOffer, Strength

MEMORY = Strength(
    limit="memory", level="best effort", how="RLIMIT_AS", remedy="run in a delegated cgroup"
)
NETWORK = Strength(limit="network", level="enforced", how="an empty network namespace")
GIVEN = BoxOffer(
    isolation=Isolation.NAMESPACE, rung=Rung.USER_NAMESPACE, available=True, shared_kernel=True,
    strengths=(MEMORY, NETWORK),
)  # fmt: skip
MISSING = BoxOffer(
    isolation=Isolation.MICROVM, rung=Rung.PROCESS, available=False, shared_kernel=False,
    missing="there is no /dev/kvm", remedy="use a host with KVM",
)  # fmt: skip


class Report(msgspec.Struct, frozen=True, kw_only=True):
    offers: tuple[BoxOffer, ...]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[BoxOffer]:
    offers: list[BoxOffer] = []

    async def try_host(state_directory: Path) -> Report:
        return Report(offers=tuple(offers))

    monkeypatch.setitem(sys.modules, "stoker.sandbox.trials", SimpleNamespace(try_host=try_host))
    return offers


def test_levels_and_what_is_missing_are_said(
    offered: list[BoxOffer], capsys: pytest.CaptureFixture[str]
) -> None:
    offered += [GIVEN, MISSING]
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "namespace (rung c)  available, shares the host's kernel" in out
    assert "best effort" in out
    assert "enforced" in out
    assert "not available: there is no /dev/kvm" in out
    assert "stoker doctor --fix" in out
    assert "use a host with KVM" not in out


def test_fix_prints_every_remedy_and_changes_nothing(
    offered: list[BoxOffer], capsys: pytest.CaptureFixture[str]
) -> None:
    offered += [GIVEN, MISSING]
    assert main(["doctor", "--fix"]) == 0
    out = capsys.readouterr().out
    assert "memory: run in a delegated cgroup" in out
    assert "microvm: use a host with KVM" in out


def test_json_is_the_whole_report_on_stdout(
    offered: list[BoxOffer], capsys: pytest.CaptureFixture[str]
) -> None:
    offered += [GIVEN]
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["offers"][0]["strengths"][0]["level"] == "best effort"


def test_a_host_that_gives_nothing_is_a_failure(
    offered: list[BoxOffer], capsys: pytest.CaptureFixture[str]
) -> None:
    offered += [MISSING]
    assert main(["doctor"]) == 1
