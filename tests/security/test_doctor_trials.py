"""``stoker doctor`` tries each limit and says how far it holds."""

import asyncio
from pathlib import Path

import pytest

from stoker.errors import IsolationUnavailable
from stoker.model.execution import Isolation, Rung
from stoker.sandbox import trials
from stoker.sandbox.qemu import parts
from stoker.sandbox.trials import DoctorReport, try_host
from support import sandbox

LIMITS = {
    "memory", "cpu", "processes", "disk", "output", "wall", "network", "kernel settings",
    "host environment", "nothing survives",
}  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> DoctorReport:
    return asyncio.run(try_host(tmp_path_factory.mktemp("doctor")))


def test_every_offer_was_tried_in_every_limit(report: DoctorReport) -> None:
    assert report.leaked == 0
    for offer in report.offers:
        if offer.available:
            assert {s.limit for s in offer.strengths} == LIMITS
            assert all(s.level == "enforced" or s.remedy for s in offer.strengths), offer
        else:
            assert offer.missing
            assert offer.remedy
    assert {"kernel", "control groups", "bubblewrap", "user namespaces", "openat2", "Landlock"} <= {
        fact.name for fact in report.facts
    }
    assert all(fact.ok or fact.remedy for fact in report.facts)


@sandbox.needs_root
@pytest.mark.root
def test_rung_a_enforces_everything(report: DoctorReport) -> None:
    shared = (o for o in report.offers if o.isolation is not Isolation.QEMU)
    (offer,) = (o for o in shared if o.rung is Rung.ROOT)
    if not any(f.name == "control groups" and f.ok for f in report.facts):
        pytest.skip("this host has no writable control groups")
    assert offer.available, offer.missing
    assert {s.limit: s.level for s in offer.strengths} == dict.fromkeys(LIMITS, "enforced")


@sandbox.needs_root
@pytest.mark.root
def test_guests_of_qemu_have_a_line_that_says_how_they_run(report: DoctorReport) -> None:
    (offer,) = (o for o in report.offers if o.isolation is Isolation.QEMU)
    facts = [f for f in report.facts if f.name == "guests of QEMU"]
    if not offer.available:
        assert not facts
        pytest.skip(f"guests of QEMU: {offer.missing}; {offer.remedy}")
    assert not offer.shared_kernel
    (fact,) = facts
    assert "QEMU emulator version" in fact.value
    assert ("with KVM" in fact.value) == fact.ok == (not fact.remedy)
    # An emulated one is never the strongest: its remedies would hide those of what is used.
    strongest = next(o for o in report.offers if o.available)
    assert (strongest is offer) <= fact.ok


V2 = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n"


@pytest.mark.parametrize(
    ("mounts", "remedy"),
    [
        (V2, "mount -o remount,favordynmods /sys/fs/cgroup"),
        (V2.replace("nsdelegate", "nsdelegate,favordynmods"), ""),
    ],
)
def test_prompt_joins_are_offered_and_never_made(mounts: str, remedy: str) -> None:
    fact = trials.joining(mounts)
    assert fact.ok
    assert remedy in fact.remedy
    assert bool(fact.remedy) is bool(remedy)


def test_a_process_box_admits_that_it_is_no_boundary(report: DoctorReport) -> None:
    (offer,) = (o for o in report.offers if o.rung is Rung.PROCESS)
    levels = {s.limit: s.level for s in offer.strengths}
    assert levels["network"] == levels["kernel settings"] == "absent"
    assert levels["wall"] == levels["output"] == levels["nothing survives"] == "enforced"


def test_a_limit_that_does_not_hold_is_called_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = trials._Trial(
        limit="wall", argv=("true",), stopped=lambda r: r.timed_out, how="a program that ends"
    )
    monkeypatch.setattr(trials, "_trials", lambda _: [idle])

    def missing() -> parts.Parts:
        raise IsolationUnavailable("the emulator was not found; apt install it")

    monkeypatch.setattr(parts, "find", missing)
    tried = asyncio.run(try_host(tmp_path))
    (guests,) = (o for o in tried.offers if o.isolation is Isolation.QEMU)
    seen = (guests.available, guests.missing, guests.remedy)
    assert seen == (False, "the emulator was not found", "apt install it")
    assert "guests of QEMU" not in {fact.name for fact in tried.facts}
    (offer,) = (o for o in tried.offers if o.rung is Rung.PROCESS)
    assert {s.limit: s.level for s in offer.strengths}["wall"] == "absent"
