"""The ``process`` backend: limits, cgroup and process group. For trusted tools only.

No boundary: the program runs as our own user, sees the host's files and its network, and mounts of
the policy are simply the host's paths. What holds is the limits (by cgroup as root, by /proc and
rlimits otherwise) and that nothing survives an action: by cgroup, or by a keeper above it.
"""

from stoker.errors import IsolationUnavailable
from stoker.model.execution import ExecutionPolicy, Isolation, Rung, Trust
from stoker.model.tools import RunRequest
from stoker.sandbox.base import BoxOffer, Strength
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import (
    CHANNEL_FIRST,
    LocalBackend,
    LocalBox,
    Parts,
)
from stoker.sandbox.making import WorkOrder
from stoker.sandbox.starts import Prepared
from stoker.sandbox.words import base_environment, encoded, encoded_argv, inside_directory


class ProcessBackend(LocalBackend):
    """Trusted tools as bounded processes."""

    def __init__(self, host: SandboxHost) -> None:
        super().__init__(
            host,
            Parts(
                rung=Rung.PROCESS,
                leased_uid=False,
                sized_mounts=False,
                group=host.tree is not None,
            ),
        )

    async def offer(self) -> BoxOffer:
        """Return what holds; there is nothing to try that could fail."""
        counted = "enforced" if self.parts.group else "best effort"
        how = "cgroup" if self.parts.group else "/proc and rlimits"
        remedy = "" if self.parts.group else self.host.tree_remedy
        return BoxOffer(
            isolation=Isolation.PROCESS,
            rung=Rung.PROCESS,
            available=True,
            shared_kernel=True,
            strengths=(
                *(
                    Strength(limit=limit, level=counted, how=how, remedy=remedy)
                    for limit in ("memory", "cpu", "processes")
                ),
                Strength(
                    limit="files and network",
                    level="absent",
                    how="a process box is no boundary: trusted tools only",
                    remedy="isolation = namespace",
                ),
            ),
        )

    def check(self, policy: ExecutionPolicy) -> None:
        """Refuse untrusted work."""
        if policy.trust is not Trust.TRUSTED:
            raise IsolationUnavailable(
                "isolation 'process' is no boundary and takes trusted work only; set "
                'trust = "trusted" for tools of your own, or isolation = "namespace"'
            )

    def prepare(self, box: LocalBox, request: RunRequest, channels: int) -> Prepared:
        """Start the program directly in the box's directory."""
        workspace = box.directory / "workspace"
        environment = {
            **base_environment(
                str(self.host.runtime.python),
                home=str(workspace),
                temporary=str(box.directory / "tmp"),
            ),
            **box.baseline.environment,
            **request.environment,
        }
        return Prepared(
            order=WorkOrder(
                argv=encoded_argv(request.argv),
                environment=encoded(environment),
                directory=bytes(workspace / inside_directory(request.directory)),
                rlimits=self.rlimits(box.policy.limits),
                cgroups=len(box.group.directories) if box.group else 0,
                targets=[CHANNEL_FIRST + i for i in range(channels)],
                keeper=box.group is None,
            )
        )

    def inside_paths(self) -> tuple[str, str]:
        """Return the host's own paths."""
        return str(self.host.runtime.python / "bin" / "python"), str(self.host.runtime.scripts)
