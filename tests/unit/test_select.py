"""Which guests ``auto`` takes where KVM runs them: the first kind that has what is asked for."""

from pathlib import Path
from typing import cast

import pytest

from stoker.errors import IsolationUnavailable
from stoker.model.execution import Destination, ExecutionPolicy, Isolation, Mount, Rung
from stoker.sandbox import select
from stoker.sandbox.base import BoxOffer
from stoker.sandbox.host import SandboxHost
from support.sandbox import run

OUT = (Destination(host="example.org"),)
MOUNTS = (Mount(source="/usr", target="/x"),)


class Guests:
    """Guests that can be had and are fast."""

    kind = Isolation.QEMU
    accelerated = True

    def __init__(self, host: SandboxHost) -> None:
        del host

    def check(self, policy: ExecutionPolicy) -> None:
        """Have everything but mounts, and machines no way out."""
        assert not policy.mounts
        assert not (policy.network and self.kind is Isolation.MICROVM)

    async def offer(self) -> BoxOffer:
        return BoxOffer(
            isolation=self.kind, rung=Rung.ROOT, available=True, shared_kernel=False, strengths=()
        )

    async def close(self) -> None: ...


class Machines(Guests):
    """Smol Machines."""

    kind = Isolation.MICROVM


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (ExecutionPolicy(), Isolation.MICROVM),
        (ExecutionPolicy(network=OUT), Isolation.QEMU),
        (ExecutionPolicy(network=OUT, isolation=Isolation.QEMU), Isolation.QEMU),
        (ExecutionPolicy(mounts=MOUNTS), None),
    ],
    ids=["plain", "a way out", "a way out, by name", "mounts"],
)
def test_auto_takes_the_first_kind_of_guests_that_has_what_is_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: ExecutionPolicy,
    kind: Isolation | None,
) -> None:
    monkeypatch.setattr(select, "has_kvm", lambda: True)
    monkeypatch.setattr(select, "installed", lambda: True)
    monkeypatch.setattr(select, "QemuBackend", Guests)
    monkeypatch.setattr(select, "SmolBackend", Machines)
    monkeypatch.setattr(select, "container_backends", lambda _: [])

    async def body() -> Isolation | None:
        async with SandboxHost.open(tmp_path) as host:
            try:
                return cast("Guests", await select.choose_backend(policy, host)).kind
            except IsolationUnavailable:  # on the host's kernel, which was not accepted
                return None

    assert run(body) is kind
