"""What a machine is given: an archive of the tree that its programs see as their root.

The same tree as the disk of a QEMU guest (``qemu.image``): busybox, the baseline's interpreter and
the runner. It is copied in: a machine that mounts a directory of the host cannot be checkpointed.
"""

import shutil
import tarfile
from pathlib import Path

from stoker.errors import IsolationUnavailable
from stoker.sandbox import runtime
from stoker.sandbox.qemu.image import RUNNER, guest_tree, tree_digest
from stoker.sandbox.runtime import INSIDE, RuntimeFiles

ARCHIVE = "/storage/stoker.tgz"
"""Where a machine is given it."""
_ROOT = "/storage/stoker"
LINK = "/run/stoker"
"""Where a machine has the pipes of its runner."""
START = f"""set -e
r={_ROOT}
mkdir -p $r
tar -xzf {ARCHIVE} -C $r
rm {ARCHIVE}
mount -o bind $r $r
mkdir -p {LINK}; chmod 700 {LINK}; mkfifo -m 600 {LINK}/orders
mount -t proc -o nosuid,nodev,noexec proc $r/proc
mount -t sysfs -o nosuid,nodev,noexec sys $r/sys
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 $r/sys/fs/cgroup
mount -o rbind /dev $r/dev
mkdir -p $r/dev/shm
mount -t tmpfs -o nosuid,nodev,mode=755 run $r/run
mkdir -m 700 $r{LINK}
mount -o bind {LINK} $r{LINK}
mount -o remount,ro,bind $r
echo "+cpu +memory +pids" >$r/sys/fs/cgroup/cgroup.subtree_control
echo 0 >/proc/sys/user/max_user_namespaces
echo 1 >/proc/sys/kernel/dmesg_restrict || true
echo 2 >/proc/sys/kernel/kptr_restrict || true
env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH={RUNNER} PYTHONDONTWRITEBYTECODE=1 \\
  setsid chroot $r {INSIDE}/bin/python -S -m stoker.sandbox.guest.carrier {LINK} \\
  </dev/null >{LINK}/said 2>&1 &
until [ -e {LINK}/up ]; do
  if ! kill -0 $!; then cat {LINK}/said; exit 1; fi
  sleep 0.1
done
"""
"""What the machine's root does once: the tree becomes the root of a runner."""


def prepare(directory: Path, files: RuntimeFiles) -> Path:
    """Return the archive, made in ``directory`` where this content has none.

    Raises:
        IsolationUnavailable: it cannot be made on this host.
    """
    busybox = shutil.which("busybox", path="/usr/bin:/usr/sbin:/bin:/sbin:/usr/local/bin")
    if busybox is None:
        raise IsolationUnavailable(
            "busybox not found; apt install --no-install-recommends busybox-static"
        )
    target = directory / f"smol-{tree_digest(files, busybox)}"
    with runtime.lock(directory / "lock"):
        if not target.exists():
            with runtime.complete(target) as partial:
                guest_tree(partial / "tree", files, busybox)
                with tarfile.open(partial / "tree.tgz", "w:gz", compresslevel=6) as archive:
                    archive.add(partial / "tree", ".", filter=_as_root)
                shutil.rmtree(partial / "tree")
    return target / "tree.tgz"


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
