"""The ``namespace`` backend: bubblewrap, a uid of its own, seccomp, cgroup. A shared kernel.

The workspace lives as long as the box; every action is one fresh bubblewrap in it, with its own
pid, mount, ipc, uts and network namespaces. As root (rung a) the maker drops to a leased uid
*before* bubblewrap: started as root it would leave /proc/sys writable to the box. The launcher's
environment is empty and its options come over a descriptor, since both can be read inside.

Where the policy is ``warm``, ``python`` actions are forked by a server in the box (``warm``).
"""

import logging
import os
import posixpath

from stoker.errors import BoxFailed, IsolationUnavailable
from stoker.model.execution import ExecutionPolicy, Rung
from stoker.model.tools import RunRequest
from stoker.sandbox import kernel, reporter, seccomp, warm
from stoker.sandbox.base import BoxOffer
from stoker.sandbox.canary import namespace_offer
from stoker.sandbox.egress.gate import Gate
from stoker.sandbox.fenced import INSIDE_ID, FencedBackend
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import CHANNEL_FIRST, LocalBox, Parts
from stoker.sandbox.making import WorkOrder
from stoker.sandbox.runtime import INSIDE, INSIDE_SCRIPTS
from stoker.sandbox.starts import Prepared, launcher_told
from stoker.sandbox.views import View
from stoker.sandbox.warm import Plan, WarmOrder, WarmServer, is_warm_form
from stoker.sandbox.words import base_environment, encoded, encoded_argv, inside_directory

_log = logging.getLogger("stoker.boxes")
_NPROC_SHELL = 'ulimit -u "$0" 2>/dev/null || ulimit -p "$0" 2>/dev/null; exec "$@"'


class NamespaceBackend(FencedBackend):
    """Untrusted work on the host's kernel, as well fenced as this user can."""

    def __init__(self, host: SandboxHost, *, rung: Rung | None = None) -> None:
        super().__init__(host, _parts(host, rung))
        self.defences = Defences()
        self._offer: BoxOffer | None = None
        inits = (host.runtime.scripts / reporter.INIT).exists()
        self._not_preloaded: set[tuple[str, ...]] = set()
        """Modules, after the packages they are from, that no server came up with; later ones do
        without."""
        self._said: set[str] = set()
        self._warms = inits and self.parts.leased_uid and self.parts.group

    async def offer(self) -> BoxOffer:
        """Run the canary once; later calls return what it found."""
        if self._offer is None:
            self._offer = await namespace_offer(self)
        return self._offer

    def check(self, policy: ExecutionPolicy) -> None:
        """Refuse what was not agreed to or cannot be mounted."""
        super().check(policy)
        if self.host.runtime.launcher is None:
            raise IsolationUnavailable(self.host.runtime.launcher_missing)

    def prepare(self, box: LocalBox, request: RunRequest, channels: int) -> Prepared:
        """Return one bubblewrap for this action."""
        encoded_argv(request.argv)
        first = CHANNEL_FIRST + channels
        options_at, filter_at, status_at = first, first + 1, first + 2
        view = self.view(box)
        options = [
            *self._namespaces(INSIDE_ID),
            *(["--unshare-pid"] if self.defences.pid_namespace else []),
            *(["--disable-userns"] if self.defences.disable_user_namespaces else []),
            *self._file_system(box, masks=self.defences.proc_masks),
            *self._variables(box, request),
            "--chdir", _directory(view, request),
            "--json-status-fd", str(status_at),
        ]  # fmt: skip
        argv = self._argv(box, request)
        reports = self.reports(request)
        if reports:
            argv = [f"{view.scripts}/{reporter.NAME}", *self.found(box, request, argv)]
            options += ["--as-pid-1"] if self.defences.pid_namespace else []
        if self.defences.seccomp:
            options += ["--seccomp", str(filter_at)]
        place, mounts = self.place(box, str(self.host.runtime.launcher))
        passed = {options_at: kernel.memory_file("options", _terminated(options))}
        if self.defences.seccomp:
            program = seccomp.filter_program(kernel.machine())
            passed[filter_at] = kernel.memory_file("filter", program)
        status, passed[status_at] = os.pipe2(os.O_CLOEXEC)
        reported = -1
        if reports:
            reported, passed[reporter.STATUS_DESCRIPTOR] = os.pipe2(os.O_CLOEXEC)
        launcher = str(self.host.runtime.launcher)
        return Prepared(
            order=WorkOrder(
                argv=encoded_argv([launcher, "--args", str(options_at), "--", *argv]),
                rlimits=self.rlimits(box.policy.limits),
                cgroups=len(box.group.directories) if box.group else 0,
                place=place,
                targets=[*range(CHANNEL_FIRST, first), *passed],
                identity=box.record.uid,
                refuse_root=self.parts.leased_uid,
            ),
            mounts=mounts,
            passed=list(passed.values()),
            opened=[*mounts, *passed.values()],
            began=lambda: launcher_told(status),
            status=status,
            reported=reported,
        )

    async def warm_start(
        self, box: LocalBox, request: RunRequest, channels: int, gate: Gate | None
    ) -> Prepared | None:
        """Return an action for the box's warm server, where that does it as a fresh start would."""
        if gate is not None:
            request = gate.told(request)
        given = (box.baseline.environment, request.environment)
        if box.record.server_uid is None or not is_warm_form(request.argv, *given):
            return None
        if not self._warms or not self.defences.all_on() or self.root(box) is not None:
            return None
        server = await self._server(box)
        if server is None:
            return None
        directory = _directory(self.view(box), request)
        variables = {**self.environment(box, request), "PWD": directory}  # as the launcher does
        return Prepared(
            order=WarmOrder(
                argv=encoded_argv(request.argv),
                environment=encoded(variables),
                directory=os.fsencode(directory),
                rlimits=self.rlimits(box.policy.limits),
                targets=[CHANNEL_FIRST + n for n in range(channels)],
                door=None if gate is None else (CHANNEL_FIRST + channels - 1, *gate.door),
            ),
            server=server,
        )

    async def _server(self, box: LocalBox) -> WarmServer | None:
        """Return the box's living server, started where there is none; ``None``: it will not."""
        if box.server is not None and box.server.dead:
            await box.server.close()
            box.server = None
        preload = box.policy.preload or ()
        packages = self.packages(box)
        of = (packages.digest if packages else "", *preload)
        if box.server is None and preload and of not in self._not_preloaded:
            try:
                box.server = await WarmServer.start(self.host.maker(), self._plan(box, preload))
            except BoxFailed as error:
                self._not_preloaded.add(of)
                self._warn(f"boxes are warm without preload {', '.join(preload)}: {error}")
            else:
                for why in box.server.without:
                    self._warn(f"boxes are warm without preload {why}")
        if box.server is None:
            try:
                box.server = await WarmServer.start(self.host.maker(), self._plan(box))
            except BoxFailed as error:
                # Every action can be started afresh, and as safely; that is only slower.
                _log.warning("boxes of this worker are not warm: %s", error)
                self._warms = False
        return box.server

    def _warn(self, sentence: str) -> None:
        """Say it once: every box of a class would say the same."""
        if sentence not in self._said:
            self._said.add(sentence)
            _log.warning("%s", sentence)

    def _plan(self, box: LocalBox, preload: tuple[str, ...] = ()) -> Plan:
        assert box.group is not None, "a warm box is one of rung a"
        options_at, go_at, info_at = warm.FILTER + 1, warm.FILTER + 2, warm.FILTER + 3
        home = base_environment(INSIDE, home="/nonexistent", temporary="/tmp")  # noqa: S108 - a path inside
        options = [
            *self._namespaces("0"), "--unshare-pid", "--as-pid-1", "--cap-add", "ALL",
            "--userns-block-fd", str(go_at), "--info-fd", str(info_at),
            *self._file_system(box, masks=False), "--clearenv",
            *(o for name, value in home.items() for o in ("--setenv", name, value)),
            "--chdir", "/",
        ]  # fmt: skip
        go, go_write = os.pipe2(os.O_CLOEXEC)
        info, info_write = os.pipe2(os.O_CLOEXEC)
        place, mounts = self.place(box, str(self.host.runtime.launcher))
        python = f"{INSIDE}/bin/python"
        argv = [
            str(self.host.runtime.launcher), "--args", str(options_at), "--", python,
            f"{INSIDE_SCRIPTS}/box_server.py", f"{INSIDE_SCRIPTS}/{reporter.INIT}",
            ",".join(preload), *self.masks,
        ]  # fmt: skip
        uid, server = box.record.uid, box.record.server_uid
        return Plan(
            order=WorkOrder(
                argv=encoded_argv(argv),
                cgroups=len(box.group.directories),
                place=place,
                targets=[warm.SOCKET, warm.FILTER, options_at, go_at, info_at],
                identity=server,
                refuse_root=True,
            ),
            cgroups=box.group.join_descriptors(),
            mounts=mounts,
            passed=[
                kernel.memory_file("filter", seccomp.filter_program(kernel.machine())),
                kernel.memory_file("options", _terminated(options)),
                go,
                info_write,
            ],
            info=info,
            go=go_write,
            python=python,
            preload=preload,
            maps=(f"0 {server} 1\n{INSIDE_ID} {uid} 1\n",) * 2,
        )

    def _argv(self, box: LocalBox, request: RunRequest) -> list[str]:
        if box.group is not None:
            return list(request.argv)
        # Set inside the user namespace the limit counts this box alone, outside all of the user's.
        limit = str(box.policy.limits.processes_max)
        return ["/bin/sh", "-c", _NPROC_SHELL, limit, *request.argv]

    def _namespaces(self, inside_id: str) -> list[str]:
        options = [
            "--unshare-user", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
            "--die-with-parent", "--new-session", "--hostname", "box",
            "--uid", inside_id, "--gid", inside_id,
        ]  # fmt: skip
        if self.defences.network_namespace:
            options.append("--unshare-net")
        return options

    def _file_system(self, box: LocalBox, *, masks: bool) -> list[str]:
        limits, view, folders = box.policy.limits, self.view(box), self.folders(box)
        options = ["--perms", "0755", "--dir", "/opt"] if self.root(box) is None else []
        options += [o for name, target in view.links for o in ("--symlink", target, name)]
        options += [o for source, target in view.binds for o in ("--ro-bind", source, target)]
        options += ["--dev", "/dev", "--proc", "/proc"]
        if masks:
            options += [o for path in self.masks for o in ("--ro-bind", "/dev/null", path)]
            options += ["--ro-bind", "/proc/sys", "/proc/sys"]
        if self.parts.sized_mounts:
            options += ["--bind", str(folders / "tmp"), "/tmp"]  # noqa: S108 - a path inside
            options += ["--bind", str(folders / "shm"), "/dev/shm"]  # noqa: S108 - a path inside
        else:
            for target in ("/tmp", "/dev/shm"):  # noqa: S108 - paths inside
                options += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", target]
        for place in view.workspaces:
            options += ["--bind", str(folders / "workspace"), place]
        for mount in box.policy.mounts:
            kind = "--bind" if mount.writable else "--ro-bind"
            options += [kind, mount.source, mount.target]
        return [*options, "--remount-ro", "/dev", "--remount-ro", "/"]

    def _variables(self, box: LocalBox, request: RunRequest) -> list[str]:
        variables = self.environment(box, request)
        encoded(variables)
        options = ["--clearenv"]
        for name, value in variables.items():
            options += ["--setenv", name, value]
        return options


class Defences:
    """Layers a test may switch off, to show that its attack works without them."""

    def __init__(self) -> None:
        self.seccomp = True
        self.pid_namespace = True
        self.network_namespace = True
        self.disable_user_namespaces = True
        self.proc_masks = True

    def all_on(self) -> bool:
        """Whether none is switched off."""
        return all(vars(self).values())


def _parts(host: SandboxHost, rung: Rung | None) -> Parts:
    if rung is None:
        rung = Rung.USER_NAMESPACE if host.tree is None else Rung.DELEGATED
        if host.root:
            rung = Rung.ROOT
    return Parts(
        rung=rung,
        leased_uid=rung is Rung.ROOT,
        sized_mounts=rung is Rung.ROOT,
        group=host.tree is not None and rung in (Rung.ROOT, Rung.DELEGATED),
    )


def _directory(view: View, request: RunRequest) -> str:
    return posixpath.normpath(f"{view.workspaces[-1]}/{inside_directory(request.directory)}")


def _terminated(options: list[str]) -> bytes:
    return os.fsencode("".join(f"{option}\0" for option in options))
