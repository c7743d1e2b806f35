import json
from pathlib import Path

import msgspec
import pytest

from stoker.cli.main import main
from stoker.model.execution import Isolation, Rung
from stoker.sandbox import trials
from stoker.sandbox.base import BoxOffer, Strength
from stoker.sandbox.trials import DoctorReport, HostFact

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


KVM = HostFact(name="kvm", value="no /dev/kvm", ok=False, remedy="enable virtualisation")


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[BoxOffer]:
    offers: list[BoxOffer] = []

    async def try_host(state_directory: Path) -> DoctorReport:
        return DoctorReport(facts=(KVM,), offers=tuple(offers), leaked=0)

    monkeypatch.setattr(trials, "try_host", try_host)
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
    assert "microvm (rung process): use a host with KVM" in out
    assert "kvm: enable virtualisation" in out


def test_a_weaker_isolation_asks_for_nothing_while_a_stronger_one_is_there(
    offered: list[BoxOffer], capsys: pytest.CaptureFixture[str]
) -> None:
    strong = msgspec.structs.replace(GIVEN, rung=Rung.ROOT, strengths=(NETWORK,))
    offered += [strong, GIVEN]
    assert main(["doctor", "--fix"]) == 0
    assert "delegated cgroup" not in capsys.readouterr().out


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


def test_what_an_engine_says_at_length_is_cut_and_where_the_rest_is_is_said(
    offered: list[BoxOffer], capsys: pytest.CaptureFixture[str]
) -> None:
    why = "a guest could not be run: " + "monitor agent: build microVM: " * 20
    offered += [GIVEN, msgspec.structs.replace(MISSING, missing=why)]
    assert main(["doctor"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "not available: a guest could not be run: monitor agent: build microVM:" in told
    assert "… (all of it with --json)" in told
    assert told.count("monitor agent") < 6
    assert main(["doctor", "--json"]) == 0
    assert why in capsys.readouterr().out
