"""Install what some tests drive and pip cannot bring: ``make test`` calls this before its floors.

Only as root on Debian and its kin, only what is missing, and never a failure of its own: where a
program cannot be had, the tests that need it are skipped, say so, and are counted.
``DEBIAN_PACKAGES=0`` leaves the machine as it is. Standard library only.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NEEDED = {
    "runc": ("runc", "boxes of an OCI runtime"),
    "qemu-system-x86_64": ("qemu-system-x86", "boxes with a kernel of their own"),
    "busybox": ("busybox-static", "the programs of such boxes"),
    "mke2fs": ("e2fsprogs", "the disk of such boxes"),
}
"""Program → its package, and what it is for."""
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
_SECONDS = 600


KERNEL = "linux-image-cloud-amd64"
GUEST_KERNEL = Path("/var/lib/stoker/guest-kernel")
"""Where a kernel for guests is unpacked: it is not to become one of the host's."""


def main() -> int:
    """Install what is missing and say in a line what came of it; always 0."""
    programs()
    guest_kernel()
    return 0


def guest_kernel() -> None:
    """Fetch and unpack a kernel for guests where there is none."""
    if any(_has_kernel(top) for top in (GUEST_KERNEL, Path("/"))):
        print("ok   a kernel for guests is here")
        return
    reason = _reason_not_to()
    if not reason:
        began = time.monotonic()
        reason = _unpacked()
        if not reason:
            print(f"ok   unpacked a kernel for guests ({time.monotonic() - began:.0f} s)")
            return
    print(f"skip a kernel for guests ({reason}); tests that need it are skipped")
    print(f"     boxes with a kernel of their own; to get it: apt-get install {KERNEL}")


def _has_kernel(top: Path) -> bool:
    """Whether a kernel for guests lies there with its modules."""
    releases = [path.name.removeprefix("vmlinuz-") for path in top.glob("boot/vmlinuz-*cloud*")]
    return any((top / "lib/modules" / release / "kernel").is_dir() for release in releases)


def _unpacked() -> str:
    """Unpack the newest kernel package; return why not, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        said = _said(["apt-cache", "depends", KERNEL], folder)
        names = [line.split()[-1] for line in said.splitlines() if "Depends: linux-image-" in line]
        if not names:
            return f"apt knows no {KERNEL}"
        _said(["apt-get", "download", names[0]], folder)
        packages = list(Path(folder).glob("*.deb"))
        if not packages:
            return f"apt-get download {names[0]} failed"
        _said(["dpkg", "-x", str(packages[0]), f"{folder}/all"], folder)
        draft = GUEST_KERNEL.with_suffix(".part")
        shutil.rmtree(draft, ignore_errors=True)
        for wanted in (
            "boot/vmlinuz-*",
            "lib/modules/*/kernel/drivers/virtio",
            "lib/modules/*/kernel/drivers/block",
            "lib/modules/*/kernel/drivers/char",
        ):
            for found in Path(folder, "all").glob(wanted):
                copy = draft / found.relative_to(Path(folder, "all"))
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(found, copy)
        shutil.rmtree(GUEST_KERNEL, ignore_errors=True)
        draft.rename(GUEST_KERNEL)
    return ""


def _said(command: list[str], folder: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    return done.stdout


def programs() -> None:
    """Install the programs that are missing."""
    missing = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
    if not missing:
        print(f"ok   programs for tests: {', '.join(NEEDED)} are here")
        return
    packages = [NEEDED[name][0] for name in missing]
    command = f"apt-get install --no-install-recommends {' '.join(packages)}"
    purposes = "; ".join(f"{name}: {NEEDED[name][1]}" for name in missing)
    reason = _reason_not_to()
    if not reason:
        began = time.monotonic()
        reason = _installed(packages)
        if not reason:
            print(f"ok   installed {', '.join(packages)} ({time.monotonic() - began:.0f} s)")
            return
    print(f"skip {', '.join(missing)} not installed ({reason}); tests that need them are skipped")
    print(f"     {purposes}; to get them: {command}")


def _reason_not_to() -> str:
    if os.environ.get("DEBIAN_PACKAGES") == "0":
        return "DEBIAN_PACKAGES=0"
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("apt-get") is None:
        return "no apt-get here"
    return ""


def _installed(packages: list[str]) -> str:
    """Install; return why not, or nothing."""
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    # The lists may be missing or old on a fresh machine; they are fetched only where that shows.
    for command in (install, ["apt-get", "update"], install):
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"apt-get took more than {_SECONDS} s"
        if command == install and done.returncode == 0:
            return ""
    return (done.stderr.strip().splitlines() or ["apt-get failed"])[-1]


if __name__ == "__main__":
    sys.exit(main())
