"""What an OCI runtime is told about one action: the specification, as JSON.

Own pid, mount, ipc, uts, cgroup and network namespaces; the root read-only, no capabilities, no new
privileges, the system-call filter; kernel files masked or read-only. The user namespace is not
here: the runtime itself is started in it (``user_namespace``), so it is nobody on the host. Control
groups are not here either: it is in the box's before it starts, as everything it forks is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from stoker.errors import ToolRefused

_VERSION = "1.0.2"
_READ_ONLY = ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs")
_CAPABILITIES = ("bounding", "effective", "permitted", "inheritable", "ambient")
_NAMESPACES = ("pid", "mount", "ipc", "uts", "network", "cgroup")


class Bind(NamedTuple):
    """One place of the host that is seen in a container."""

    source: str
    target: str
    writable: bool = False
    deep: bool = False
    """What is mounted beneath it is read-only too, where it is."""

    def mount(self) -> dict[str, Any]:
        """Return it as the specification says it."""
        # "rro" alone would mean nothing to a runtime that does not know it: a writable mount.
        kinds = ["rw"] if self.writable else ["ro", "rro"] if self.deep else ["ro"]
        return {
            "destination": self.target,
            "type": "bind",
            "source": self.source,
            "options": ["rbind", *kinds, "nosuid", "nodev"],
        }


class Container(msgspec.Struct, kw_only=True):
    """What differs from action to action, and from box to box."""

    root: str
    """Directory with the mount points of ``binds``; read-only inside."""
    directory: str
    """Where its program starts: a place of ours where the workspace is seen."""
    binds: Sequence[Bind]
    argv: Sequence[str]
    environment: Mapping[str, str]
    user: int
    masks: Sequence[str]
    seccomp: dict[str, Any]


def specification(container: Container) -> bytes:
    """Return ``config.json``.

    Raises:
        ToolRefused: an argument or a variable is no UTF-8, which JSON cannot carry.
    """
    words = {
        "args": list(container.argv),
        "env": [f"{name}={value}" for name, value in container.environment.items()],
    }
    document = {
        "ociVersion": _VERSION,
        "hostname": "box",
        "root": {"path": container.root, "readonly": True},
        "process": {
            **words,
            "terminal": False,
            "user": {"uid": container.user, "gid": container.user},
            # Never a path of the caller's: one that leads through a link of the box's would be
            # entered by the runtime, with descriptors of its own open.
            "cwd": container.directory,
            "capabilities": {name: [] for name in _CAPABILITIES},
            "noNewPrivileges": True,
        },
        "mounts": [*_MOUNTS, *(bind.mount() for bind in container.binds)],
        "linux": {
            "namespaces": [{"type": name} for name in _NAMESPACES],
            "maskedPaths": list(container.masks),
            "readonlyPaths": list(_READ_ONLY),
            "seccomp": container.seccomp,
        },
    }
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError as error:
        raise ToolRefused(
            f"an argument or a variable is not UTF-8, and a container takes no other ({error}); "
            "nothing was run"
        ) from error


_QUIET = ["nosuid", "noexec"]
_MOUNTS = (
    {"destination": "/proc", "type": "proc", "source": "proc", "options": [*_QUIET, "nodev"]},
    {
        "destination": "/dev",
        "type": "tmpfs",
        "source": "tmpfs",
        "options": [*_QUIET, "mode=755", "size=64k", "ro"],
    },
    {
        "destination": "/dev/pts",
        "type": "devpts",
        "source": "devpts",
        "options": [*_QUIET, "newinstance", "ptmxmode=0666", "mode=0620"],
    },
)
