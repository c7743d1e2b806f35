"""A user namespace for a box, owned by the uid of its launcher, held by a descriptor alone.

Its uid 0 is the launcher's and its 1000 the box's; no other uid of the host is in it, root's least
of all. Whoever has the owner's uid outside enters it with every capability in it and none outside.
"""

import os
import subprocess
from pathlib import Path

_UNSHARE = "/usr/bin/unshare"
_SEAL = "echo 0 > /proc/sys/user/max_user_namespaces"
_HOLD = 'echo there && read go && exec sh -c "$0"'
"""The second shell has capabilities in the namespace, since it starts when the maps are written."""
_SECONDS = 30.0


def make(owner: int, inside: int, *, sealed: bool = True) -> int:
    """Return a descriptor of a new namespace; blocking, a few milliseconds.

    ``sealed``: no further user namespaces can be made in it.

    Raises:
        OSError: the kernel or its settings forbid it; the text says what was answered.
    """
    process = subprocess.Popen(  # noqa: S603 - a fixed program
        [_UNSHARE, "--user", "sh", "-c", _HOLD, _SEAL if sealed else "true"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin"},
        cwd="/",
        user=owner,
        group=owner,
        extra_groups=[],
    )
    namespace = -1
    try:
        assert process.stdout is not None, "it was asked for"
        if process.stdout.readline():
            for file in ("uid_map", "gid_map"):
                Path(f"/proc/{process.pid}/{file}").write_text(f"0 {owner} 1\n1000 {inside} 1\n")
            namespace = os.open(f"/proc/{process.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        _, said = process.communicate(b"go\n", timeout=_SECONDS)
        _check(namespace, process.returncode, said.decode(errors="replace").strip())
    except BaseException:
        process.kill()
        process.communicate()
        if namespace >= 0:
            os.close(namespace)
        raise
    return namespace


def _check(namespace: int, code: int, said: str) -> None:
    if namespace < 0 or code != 0:
        raise OSError(f"no user namespace: {said or code}")
