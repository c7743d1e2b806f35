"""What ``namespace`` and ``container`` boxes share: the files they see, and where an action starts.

Both show the host's system directories read-only, an interpreter and our scripts at fixed paths,
and three writable places; both pass the maker the box's own mounts alone (``places``).
"""

import os
import stat
from pathlib import Path

from stoker.errors import IsolationUnavailable
from stoker.model.execution import ExecutionPolicy, Trust
from stoker.model.tools import RunRequest
from stoker.sandbox import kernel, places, reporter
from stoker.sandbox.egress.gate import Gate
from stoker.sandbox.entries import FOLDERS
from stoker.sandbox.finding import find
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBackend, LocalBox, Parts
from stoker.sandbox.mounts import MountCheck
from stoker.sandbox.places import Place
from stoker.sandbox.roots import Root
from stoker.sandbox.runtime import INSIDE, INSIDE_SCRIPTS, make_public
from stoker.sandbox.views import View, host_view, root_view, through_env
from stoker.sandbox.words import base_environment

INSIDE_ID = "1000"
"""Uid and gid of a program as the box sees them."""
_ENV = Path("/usr/bin/env")
"""Finds the program on the path for the reporter, which does not search."""
_MASKED = (
    "/proc/keys", "/proc/key-users", "/proc/kallsyms", "/proc/config.gz", "/proc/kcore",
    "/proc/timer_list", "/proc/sched_debug", "/proc/sysrq-trigger", "/proc/latency_stats",
    "/proc/kpagecount", "/proc/kpageflags", "/proc/kpagecgroup", "/proc/vmallocinfo",
)  # fmt: skip


class FencedBackend(LocalBackend):
    """Untrusted work in a view of its own of this host's files, or of a root's."""

    rooted = True

    def __init__(self, host: SandboxHost, parts: Parts) -> None:
        super().__init__(host, parts)
        self.masks = [path for path in _MASKED if _readable_by_others(path)]
        self._mounts = MountCheck()
        self._reporter = (host.runtime.scripts / reporter.NAME).exists() and _ENV.exists()
        if parts.sized_mounts:
            for name in FOLDERS:
                make_public(places.ROOT / name)

    def check(self, policy: ExecutionPolicy) -> None:
        """Refuse what was not agreed to or cannot be mounted."""
        agreed = policy.trust is Trust.TRUSTED or policy.accept_shared_kernel
        if self.shared_kernel and not agreed:
            raise IsolationUnavailable(
                "untrusted work in these boxes shares the host's kernel and that was not accepted; "
                "set sandbox.accept_shared_kernel = true (it is recorded with the run)"
            )
        for mount in policy.mounts:
            self._mounts.check(mount)

    async def gate(self, box: LocalBox) -> Gate | None:
        """Open the egress proxy for one action, where the policy names destinations."""
        return await self.host.egress.open(box.box_id, box.policy) if box.policy.network else None

    def inside_paths(self) -> tuple[str, str]:
        """Return the fixed paths every box has."""
        return f"{INSIDE}/bin/python", INSIDE_SCRIPTS

    def apart(self, policy: ExecutionPolicy) -> bool:
        """Whether its actions start where only the paths of every box are in sight."""
        return self.parts.sized_mounts and not policy.mounts

    def place(self, box: LocalBox, *shown: str) -> tuple[Place | None, list[int]]:
        """Return where an action starts, and the box's mounts for it; ``shown`` stays in sight."""
        if not self.apart(box.policy):
            return None, []
        files = self.host.runtime
        # All roots as one: what stays in sight names a namespace, and those are kept.
        kept = self.root(box) or self.packages(box)
        roots = [self.host.baselines.roots.directory] if kept else []
        seen = [str(p) for p in (files.python, files.scripts, files.etc, *roots)]
        mounts = [kernel.detached_mount(mount) for mount in box.record.mounts]
        targets = [str(places.ROOT / name) for name in FOLDERS]
        return Place(targets=targets, shown=[*shown, *seen]), mounts

    def root(self, box: LocalBox) -> Root | None:
        """Return the root file system of a box; ``None``: the host's files."""
        return self.host.baselines.roots.of(box.box_id)

    def packages(self, box: LocalBox) -> Root | None:
        """Return the packages of a box; ``None``: it has the standard library alone."""
        return self.host.baselines.packages.of(box.box_id)

    def view(self, box: LocalBox) -> View:
        """Return what a box sees of files that are not its own."""
        files, root = self.host.runtime, self.root(box)
        if root is not None:
            return root_view(files, root)
        packages = held.tree if (held := self.packages(box)) else ""
        return host_view(
            python=files.python, scripts=files.scripts, etc=files.etc, packages=packages
        )

    def folders(self, box: LocalBox) -> Path:
        """Return under which path an action finds the box's writable places when it starts."""
        return places.ROOT if self.apart(box.policy) else box.directory

    def reports(self, request: RunRequest) -> bool:
        """Whether the reporter can stand above the program."""
        return self._reporter and "=" not in request.argv[0]  # env would take it for a variable

    def found(self, box: LocalBox, request: RunRequest, argv: list[str]) -> list[str]:
        """Return the path of the program and its arguments, its name first."""
        view = self.view(box)
        path = None
        if self.apart(box.policy) and self.root(box) is None:
            path = find(argv[0], self.host.runtime, box.baseline.environment, request.environment)
        return [path, *argv] if path else through_env(view, argv)

    def environment(self, box: LocalBox, request: RunRequest) -> dict[str, str]:
        """Return every variable of a program, nothing of the host's."""
        return {
            **base_environment(INSIDE, home="/workspace", temporary="/tmp"),  # noqa: S108 - a path inside
            "USER": "agent",
            **(root.environment if (root := self.root(box)) else {}),
            **box.baseline.environment,
            **request.environment,
        }


def _readable_by_others(path: str) -> bool:
    """Whether a file of the kernel's needs a mask: root's own are closed to a box anyway."""
    try:
        return bool(os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH))  # noqa: PTH116 - a kernel file
    except OSError:
        return False
