"""Rung (d): Landlock and seccomp without sockets. Best effort, for trusted demos only.

For hosts where user namespaces are blocked. The program sees the host's processes and reads system
directories and its own folder; it writes only in its folder and opens no socket.
"""

from stoker.errors import IsolationUnavailable
from stoker.model.execution import ExecutionPolicy, Isolation, Rung, Trust
from stoker.model.tools import RunRequest
from stoker.sandbox import kernel, seccomp
from stoker.sandbox.base import BoxOffer, Strength
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBackend, LocalBox, Parts
from stoker.sandbox.process import ProcessBackend
from stoker.sandbox.starts import Prepared

_READ = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache",
    "/etc/passwd", "/etc/group", "/etc/ssl/certs", "/etc/localtime", "/etc/alternatives", "/proc",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class ConfinedBackend(ProcessBackend):
    """A process box that Landlock and a filter confine."""

    def __init__(self, host: SandboxHost) -> None:
        super().__init__(host)
        LocalBackend.__init__(
            self,
            host,
            Parts(
                rung=Rung.LANDLOCK,
                leased_uid=False,
                sized_mounts=False,
                group=host.tree is not None,
            ),
        )

    async def offer(self) -> BoxOffer:
        """Say whether this kernel has Landlock, and what rung (d) is worth."""
        missing = ""
        if not kernel.landlock_abi():
            missing = "this kernel has no Landlock"
        elif not seccomp.supported(kernel.machine()):
            missing = f"there is no system-call table for {kernel.machine()}"
        limits = await super().offer()
        return BoxOffer(
            isolation=Isolation.NAMESPACE,
            rung=Rung.LANDLOCK,
            available=not missing,
            shared_kernel=True,
            strengths=(
                *(s for s in limits.strengths if s.limit != "files and network"),
                Strength(
                    limit="files",
                    level="best effort",
                    how="Landlock; processes of the host stay visible",
                    remedy="a host with user namespaces, or root",
                ),
                Strength(limit="network", level="enforced", how="no sockets (seccomp)"),
            ),
            missing=missing,
            remedy="a kernel from 5.13 on with lsm=landlock" if missing else "",
        )

    def check(self, policy: ExecutionPolicy) -> None:
        """Refuse untrusted work and policies with network."""
        if policy.trust is not Trust.TRUSTED:
            raise IsolationUnavailable(
                "Landlock alone (rung d) takes trusted work only; use a host with user "
                "namespaces, or root, for untrusted work"
            )
        if policy.network:
            raise IsolationUnavailable("Landlock alone (rung d) has no network; use namespaces")

    def prepare(self, box: LocalBox, request: RunRequest, channels: int) -> Prepared:
        """Start the program like a process, confined just before exec."""
        prepared = super().prepare(box, request, channels)
        runtime = self.host.runtime
        mounts = box.policy.mounts
        read = [*_READ, str(runtime.python), str(runtime.scripts)]
        read += [m.source for m in mounts if not m.writable]
        write = [str(box.directory), *_DEVICES, *(m.source for m in mounts if m.writable)]
        prepared.order.landlock = (read, write)
        prepared.order.seccomp = seccomp.filter_program(kernel.machine(), sockets=False)
        return prepared
