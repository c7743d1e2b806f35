"""The ``container`` backend: each action a fresh container of an OCI runtime in its workspace.

One adapter for runc, crun and runsc. The runtime is started like bubblewrap is: in the control
group of the box, in a mount namespace where only the box's own mounts are in sight, and **never as
root**: it is uid 0 of the box's user namespace alone, which is nobody on the host. So what it would
do wrong is bounded by what that uid may do, and limits, verdicts, deadlines and teardown are the
same code as for ``namespace``: our control group is the authority, not one of the runtime's.

A container per action, not a command in a standing one: when its process 1 ends the kernel ends the
rest, and an action finds no process, mount or network of the one before.
"""

import itertools
import os
from pathlib import Path

from stoker.errors import BoxFailed, IsolationUnavailable
from stoker.model.execution import ExecutionPolicy, Isolation, Mount, Rung
from stoker.model.tools import RunRequest
from stoker.sandbox import kernel, oci_runtimes, reporter, seccomp, user_namespace
from stoker.sandbox.base import BoxOffer
from stoker.sandbox.branching import Beginning
from stoker.sandbox.canary import namespace_strengths, tried_offer
from stoker.sandbox.fenced import INSIDE_ID, FencedBackend
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import CHANNEL_FIRST, LocalBox, Parts
from stoker.sandbox.making import WorkOrder
from stoker.sandbox.oci import Bind, Container, specification
from stoker.sandbox.oci_runtimes import Runtime
from stoker.sandbox.removal import remove_tree
from stoker.sandbox.seccomp_profile import profile
from stoker.sandbox.starts import Prepared
from stoker.sandbox.views import View, system_directories
from stoker.sandbox.words import encoded, encoded_argv, inside_directory

_SPECIFICATION, _PROGRAM, _NAMESPACE = 30, 31, 32
"""Descriptors of the runtime; none of them reaches the container."""
_ELSEWHERE = 'cd -- "$0" || exit 127; exec "$@"'
"""Enters a directory inside, as the box's user: the runtime goes to fixed places only."""
_CGROUPS = ("/sys/fs/cgroup/devices", "/sys/fs/cgroup")
"""A runtime looks for control groups before it does without; on a host with both versions one
hierarchy of the older is all it should see."""

_BOTH_VERSIONS = "/sys/fs/cgroup/unified"


class ContainerBox(LocalBox):
    """A box whose actions are containers."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.namespace = -1
        """Its user namespace, while it stands."""
        self._names = itertools.count(1)

    @property
    def root(self) -> Path:
        """Where the mount points of its containers are."""
        return self.directory / "root"

    @property
    def bundle(self) -> Path:
        """Where the runtime looks for a specification."""
        return self.directory / "bundle"

    @property
    def state(self) -> Path:
        """Where the runtime keeps what it must remember."""
        return self.directory / "state"

    def build(self, begins: Beginning | None) -> None:
        """Make its parts; blocking, some milliseconds and the copy of a state."""
        super().build(begins)
        owner, uid = self.record.server_uid, self.record.uid
        assert owner is not None, "a container's launcher has a uid of its own"
        assert uid is not None, "and so has the box"
        assert isinstance(self.backend, ContainerBackend), "made by it"
        for directory in (self.root, self.bundle, self.state):
            directory.mkdir(mode=0o755)
        os.chown(self.state, owner, owner)
        self.state.chmod(0o700)
        # Read from the descriptor each time: what a program is given lies in no file.
        (self.bundle / "config.json").symlink_to(f"/proc/self/fd/{_SPECIFICATION}")
        view = self.backend.view(self)
        for name, target in view.links:
            (self.root / name.lstrip("/")).symlink_to(target)
        for bind in [*_view_binds(view), *map(_policy_bind, self.policy.mounts)]:
            _make_mount_point(self.root, bind)
        for target in ("proc", "dev", "tmp", "workspace"):
            (self.root / target).mkdir(exist_ok=True)
        self.namespace = user_namespace.make(owner, uid, sealed=self.backend.shared_kernel)

    def next_name(self) -> str:
        """Return the name of its next container, when what was left of the last is gone.

        A runtime that was killed has tidied nothing up.
        """
        for left in self.state.iterdir():
            remove_tree(left)
        return f"action-{next(self._names)}"

    async def _remove(self) -> None:
        if self.namespace >= 0:
            os.close(self.namespace)
            self.namespace = -1
        await super()._remove()


class ContainerBackend(FencedBackend):
    """Containers by one runtime of this host; ``None``: by none, which its offer says."""

    box_type = ContainerBox

    def __init__(self, host: SandboxHost, runtime: Runtime | None) -> None:
        super().__init__(
            host,
            Parts(
                rung=runtime.rung if runtime else Rung.RUNC,
                leased_uid=host.root,
                sized_mounts=host.root,
                group=host.root and host.tree is not None,
                launcher_uid=host.root,
            ),
        )
        self.runtime = runtime
        self.shared_kernel = runtime is None or runtime.shared_kernel
        self._offer: BoxOffer | None = None
        self._program = -1
        self._cgroups = next((path for path in _CGROUPS if os.path.ismount(path)), _CGROUPS[-1])

    async def offer(self) -> BoxOffer:
        """Run the canary once; later calls return what it found."""
        if self._offer is None:
            missing, remedy = self._needs()
            self._offer = await tried_offer(
                self, Isolation.CONTAINER, missing, remedy, namespace_strengths(self.parts)
            )
        return self._offer

    def check(self, policy: ExecutionPolicy) -> None:
        """Refuse what was not agreed to, cannot be mounted or cannot be started."""
        super().check(policy)
        crun = self.runtime is not None and self.runtime.rung is Rung.CRUN
        if crun and policy.mounts and os.path.ismount(_BOTH_VERSIONS):
            raise IsolationUnavailable(
                "crun refuses hosts with both versions of control groups, and one cannot be hidden "
                'from it where a policy has mounts; use isolation = "namespace"'
            )

    def _needs(self) -> tuple[str, str]:
        if self.runtime is None:
            return oci_runtimes.missing()
        if self.runtime.problem:
            return self.runtime.problem, f"install a newer {self.runtime.rung.value}"
        if not self.host.root:
            return "containers need uids of their own", "run as root, or isolation = namespace"
        if self.host.tree is None:
            return self.host.tree_note, "a host that lets root make control groups"
        if not seccomp.supported(kernel.machine()):
            return f"there is no system-call table for {kernel.machine()}", "x86_64 or aarch64"
        return "", ""

    def prepare(self, box: LocalBox, request: RunRequest, channels: int) -> Prepared:
        """Return one container for this action."""
        assert isinstance(box, ContainerBox), "boxes of this backend are made by it"
        assert self.runtime is not None, "it is offered only where there is one"
        first = CHANNEL_FIRST + channels
        reports = self.reports(request) and first in reporter.CONTAINER_DESCRIPTORS
        words = self._argv(box, request, first if reports else None)
        told = specification(self._container(box, request, words))
        program, sealed = self.runtime.path, self._sealed(box)
        opened = {_SPECIFICATION: kernel.memory_file("specification", told)}
        opened[_NAMESPACE] = os.dup(box.namespace)
        if sealed is not None:
            program, opened[_PROGRAM] = f"/proc/self/fd/{_PROGRAM}", os.dup(sealed)
        reported = -1
        if reports:
            reported, opened[first] = os.pipe2(os.O_CLOEXEC)
        place, mounts = self.place(box, self._cgroups)
        name, started = box.next_name(), box.state / "started"
        argv = [
            program, *self.runtime.options, "--root", str(box.state),
            "run", "--bundle", str(box.bundle), "--pid-file", str(started),
            *self.runtime.passing(channels + reports), name,
        ]  # fmt: skip
        return Prepared(
            order=WorkOrder(
                argv=encoded_argv(argv),
                rlimits=self.rlimits(box.policy.limits),
                cgroups=len(box.group.directories) if box.group else 0,
                place=place,
                targets=[*range(CHANNEL_FIRST, first), *opened],
                identity=box.record.server_uid,
                user_namespace=_NAMESPACE,
                refuse_root=True,
            ),
            mounts=mounts,
            passed=list(opened.values()),
            opened=[*mounts, *opened.values()],
            # Written by the runtime once the container's first process runs.
            began=lambda: os.path.lexists(started),
            reported=reported,
        )

    def _sealed(self, box: LocalBox) -> int | None:
        """Return the runtime's program where nobody can change it; ``None``: it starts by its path.

        Runtimes copy themselves before they enter a container, lest it should write to their file;
        from a sealed copy they need not.
        """
        assert self.runtime is not None, "it is offered only where there is one"
        if not self.runtime.shared_kernel:
            return None
        if self._program < 0:
            try:
                self._program = kernel.sealed_copy(self.runtime.path)
            except OSError as error:
                raise BoxFailed(
                    f"box {box.box_id} could not start anything: {self.runtime.path} cannot be "
                    f"read ({error}); nothing was run"
                ) from error
        return self._program

    def _argv(self, box: LocalBox, request: RunRequest, report_to: int | None) -> list[str]:
        encoded_argv(request.argv)
        argv = list(request.argv)
        directory = inside_directory(request.directory)
        if Path(directory) != Path():
            argv = ["/bin/sh", "-c", _ELSEWHERE, directory, *argv]
        found = self.found(box, request, argv)
        if report_to is None:
            return [found[0], *found[2:]]
        return [f"{self.view(box).scripts}/{reporter.NAME}.{report_to}", *found]

    def _container(self, box: ContainerBox, request: RunRequest, argv: list[str]) -> Container:
        view, folders = self.view(box), self.folders(box)
        environment = {**self.environment(box, request), "PWD": view.workspaces[-1]}
        encoded(environment)
        binds = [
            *_view_binds(view),
            Bind(str(folders / "tmp"), "/tmp", writable=True),  # noqa: S108 - a path inside
            Bind(str(folders / "shm"), "/dev/shm", writable=True),  # noqa: S108 - a path inside
            *(Bind(str(folders / "workspace"), at, writable=True) for at in view.workspaces),
            *map(_policy_bind, box.policy.mounts),
        ]
        return Container(
            root=str(box.root),
            directory=view.workspaces[-1],
            binds=binds,
            argv=argv,
            environment=environment,
            user=int(INSIDE_ID),
            masks=self.masks,
            seccomp=profile(kernel.machine()),
        )

    async def close(self) -> None:
        """Destroy every box, and let go of the runtime."""
        try:
            await super().close()
        finally:
            if self._program >= 0:
                os.close(self._program)
                self._program = -1


def system_binds() -> list[Bind]:
    """Return the host's system directories."""
    return [Bind(path, path) for path in system_directories()]


def _view_binds(view: View) -> list[Bind]:
    return [Bind(source, target) for source, target in view.binds]


def _policy_bind(mount: Mount) -> Bind:
    return Bind(mount.source, mount.target, writable=mount.writable, deep=True)


def _make_mount_point(root: Path, bind: Bind) -> None:
    point = root / bind.target.lstrip("/")
    if Path(bind.source).is_dir():
        point.mkdir(parents=True, exist_ok=True)
    else:
        point.parent.mkdir(parents=True, exist_ok=True)
        point.touch()


def container_backends(host: SandboxHost) -> list[ContainerBackend]:
    """Return a backend for each runtime of this host, or the one that says there is none."""
    found = [ContainerBackend(host, runtime) for runtime in oci_runtimes.find()]
    return found or [ContainerBackend(host, None)]
