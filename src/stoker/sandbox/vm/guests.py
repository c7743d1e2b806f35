"""What backends whose boxes are guests do alike: refusals and the canary.

A backend makes guests its own way; what a guest can be asked for, and what it must answer before
any is offered, is one thing.
"""

from typing import Protocol

import msgspec

from stoker.errors import IsolationUnavailable, StokerError
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation
from stoker.model.tools import RunRequest
from stoker.sandbox.base import not_offered
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.vm.box import GuestBox
from stoker.seams.entropy import fresh_id


class Making(Protocol):
    """A backend, as far as the canary needs it."""

    async def create(self, box_id: str, baseline: Baseline, policy: ExecutionPolicy) -> GuestBox:
        """Make a box."""
        ...


def refuse_beyond(isolation: Isolation, *lacking: tuple[str, object]) -> None:
    """Refuse what guests of this kind do not have, each by its name and what is asked of it.

    Raises:
        IsolationUnavailable: one is asked for.
    """
    for what, asked in lacking:
        if asked:
            raise IsolationUnavailable(
                f"{isolation.value} boxes have no {what}; leave it out of the policy, or set "
                'isolation = "namespace"'
            )


def pinned(host: SandboxHost, isolation: Isolation, baseline: Baseline) -> Baseline:
    """Return ``baseline`` with the digest of what guests of this host are made of.

    Raises:
        IsolationUnavailable: it was pinned as another, or is of a kind that guests do not have.
    """
    if baseline.build is not msgspec.UNSET:  # an empty workspace would be another baseline
        raise not_offered("baselines with files or setup", isolation.value)
    if baseline.root is not msgspec.UNSET:  # a guest has its own
        raise not_offered("baselines with a root of their own", isolation.value)
    if baseline.packages is not msgspec.UNSET:
        raise not_offered("baselines with packages", isolation.value)
    digest = host.baseline_digest(baseline)
    if baseline.digest and baseline.digest != digest:
        raise IsolationUnavailable(
            f"baseline {baseline.name!r} was pinned as {baseline.digest}, this host has "
            f"{digest}; use the interpreter the run was made with"
        )
    return msgspec.structs.replace(baseline, digest=digest)


async def canary(
    backend: Making, policy: ExecutionPolicy, program: str, says: str, *, seconds: float
) -> str:
    """Return what is wrong with a guest that is made and asked; empty: nothing.

    ``program``: a line of Python, which must print the name of the guest and then ``says``.
    """
    name = fresh_id("canary_")
    box = None
    try:
        box = await backend.create(name, Baseline(), policy)
        request = RunRequest(argv=("python", "-I", "-c", program))
        run = await box.run(request, timeout_seconds=seconds)
    except (StokerError, OSError) as error:
        return f"a guest could not be run: {error}"
    finally:
        if box is not None:
            await box.destroy()
    if not run.result.ok or run.result.text != f"{host_name(name)} {says}":
        return f"a guest ran but did not hold: {run.result.text[:300]}"
    return ""


def host_name(box_id: str) -> str:
    """Return a name a host may have."""
    return "".join(c if c.isalnum() else "-" for c in box_id)[:60].strip("-") or "box"
