"""``make rig-systemd``: boxes by the control groups that hosts have: systemd, one hierarchy.

Debian is booted under QEMU with systemd as its first process, and the contract of ``namespace``
boxes is run there by whoever can make them: root in a unit with delegation and without, an ordinary
user with a delegated scope (rung b) and without (rung c). The processor is emulated, so times are
only reported; what is counted and what is refused is not softened.

    make rig-systemd                                # the suite
    .venv/bin/python tools/rig_systemd.py COMMAND   # something else in it, as root

What it needs, and where the host's disk is kept, says ``rig_host``.
Exit code: that of what ran in it; 3 where it could not be run, 4 past its deadline.
"""

import sys
from pathlib import Path

import rig_host

USER = "agent"
_UNIT = """[Unit]
Description=What this host was started for
After=multi-user.target dbus.service systemd-logind.service
[Service]
Delegate=yes
TasksMax=infinity
ExecStart=/usr/local/sbin/rig-run
StandardInput=null
StandardOutput=tty
StandardError=inherit
TTYPath=/dev/ttyS0
[Install]
WantedBy=multi-user.target
"""
_INIT = """#!/bin/sh
exec /lib/systemd/systemd systemd.show_status=false systemd.log_level=warning
"""
_RUN = f"""#!/bin/sh
mount -o ro /dev/vdb /payload; ip link set lo up
cd /payload
echo "booted: $(uname -r), systemd $(systemctl --version | head -1), $(nproc) processors"
bash /payload/command </dev/null
echo "{rig_host.EXIT}$?"
sync; echo o >/proc/sysrq-trigger; sleep 60
"""
_COMMON = """export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PYTHONPATH=/payload/src:/payload/tests:/opt/site PYTHONDONTWRITEBYTECODE=1
cd /payload
"""
_AS_USER = f"""#!/bin/bash
# In a session of the user's own, as a login makes one.
exec su - {USER} -c "cd /payload && $(printf '%q ' "$@")"
"""
_TESTS = (
    "env STOKER_RIG=systemd python3 -m pytest -p no:cacheprovider -vv -rs --tb=short --maxfail=8 "
    "--durations=5 tests/security/test_"
)
_BOXES = "{groups,actions,containment,host_side,sweep,judge,box_states}.py"
_DOCTOR = "python3 -m stoker.cli.main doctor"
_SCOPE = "systemd-run --scope -q -p Delegate=yes"
SUITE = f"""
. /etc/profile.d/rig.sh
status=0
part() {{ echo "== $1"; shift; "$@" || status=$?; }}
part "a user's own scope (rung b)" as-user {_SCOPE} --user {_TESTS}{_BOXES} -m delegated
part "which gives" as-user {_SCOPE} --user {_DOCTOR} --fix
part "root, in a delegated service" {_TESTS}{{groups,containment}}.py -m "root and not slow"
part "a user's session (rung c)" as-user {_TESTS}rung_levels.py
exit $status
"""
"""Half an hour on two busy cores (29 minutes measured, of which rung b took 8). Counts of attacks
are cut; each kind of user has those of its own. Under emulation a test may miss its CPU limit, as
``test_a15…[runc]`` did: then the suite ends non-zero, and the line of that test says why."""


def _furnish(root: Path) -> None:
    (root / "etc/systemd/system/rig.service").write_text(_UNIT)
    for name, text in (("rig-run", _RUN), ("as-user", _AS_USER)):
        program = root / "usr/local/sbin" / name
        program.write_text(text)
        program.chmod(0o755)
    (root / "etc/profile.d/rig.sh").write_text(_COMMON)
    (root / "etc/hostname").write_text("rig\n")
    rig_host.ran(["chroot", str(root), "useradd", "-m", "-s", "/bin/bash", USER])
    rig_host.ran(["chroot", str(root), "systemctl", "enable", "rig.service"])
    # No login on the console that the results go to, and nothing of its own accord.
    rig_host.ran(
        ["chroot", str(root), "systemctl", "mask", "serial-getty@ttyS0.service", "getty@.service",
         "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer",
         "e2scrub_all.timer", "fstrim.timer", "systemd-networkd.service"]
    )  # fmt: skip


RIG = rig_host.Rig(
    name="rig-systemd",
    packages=(
        "python3,kmod,iproute2,busybox-static,e2fsprogs,procps,"
        "systemd,systemd-sysv,dbus,dbus-user-session,libpam-systemd,runc,crun"
    ),
    init=_INIT,
    furnish=_furnish,
    recipe=repr((_UNIT, _RUN, _AS_USER, _COMMON)),
)

if __name__ == "__main__":
    sys.exit(rig_host.run(RIG, " ".join(sys.argv[1:]) or SUITE))
