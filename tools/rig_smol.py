"""``make rig-smol``: the tests of Smol Machines on a host that has no KVM of its own.

An ordinary kernel is booted under QEMU, whose emulated processor has AMD's virtualisation, so that
kernel gets a working ``/dev/kvm``; inside it the contract of a sandbox backend is run against real
machines. Everything is emulated twice, so times are only reported; counts are not softened.

    make rig-smol                                # the suite
    .venv/bin/python tools/rig_smol.py COMMAND   # something else in it, e.g. one test

What it needs, and where the host's disk is kept, says ``rig_host``.
Exit code: that of what ran in it; 3 where it could not be run, 4 past its deadline.
"""

import sys
from pathlib import Path

import rig_host

TESTS = (
    "STOKER_RIG=smol python3 -m pytest -p no:cacheprovider -vvv -rs --tb=short "
    "--maxfail=5 --durations=25 -m '' "
    "-k microvm tests/security/test_guests.py"
)
_INIT = f"""#!/bin/sh
mount -t proc proc /proc; mount -t sysfs sys /sys
mkdir -p /dev/shm /dev/pts; mount -t tmpfs shm /dev/shm; mount -t devpts pts /dev/pts
mount -t tmpfs run /run; mount -t tmpfs tmp /tmp; mount -t cgroup2 cgroup2 /sys/fs/cgroup
ln -s /proc/self/fd /dev/fd; ip link set lo up; hostname rig
modprobe kvm; modprobe kvm-amd; modprobe tun; modprobe vhost_vsock; modprobe fuse
chmod 666 /dev/kvm
mount /dev/vdb /payload
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PYTHONPATH=/payload/src:/payload/tests:/opt/site PYTHONDONTWRITEBYTECODE=1
echo "booted: $(uname -r), $(nproc) processors, kvm $(stat -c %a /dev/kvm)"
cd /payload && sh -c "$(cat /payload/command)" </dev/null
echo "{rig_host.EXIT}$?"
sync; echo o >/proc/sysrq-trigger; sleep 60
"""


def _unpack_templates(root: Path) -> None:
    for packed in (root / "opt/site/smol").glob("*-template.ext4.zst"):
        # Sparse files of 30 GB: here it takes a second, in the emulated host five minutes.
        rig_host.ran(
            ["zstd", "-q", "-d", "--sparse", str(packed), "-o", str(packed.with_suffix(""))]
        )


RIG = rig_host.Rig(
    name="rig-smol",
    packages="python3,kmod,iproute2,busybox-static,e2fsprogs,procps",
    init=_INIT,
    furnish=_unpack_templates,
    site=("smolmachines==1.32.2",),
    memory_mebibytes=6144,
)

if __name__ == "__main__":
    sys.exit(rig_host.run(RIG, " ".join(sys.argv[1:]) or TESTS))
