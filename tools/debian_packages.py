"""Install what some tests drive and pip cannot bring: ``make test`` calls this before its floors.

Only as root on Debian and its kin, only what is missing, and never a failure of its own: where a
program cannot be had, the tests that need it are skipped, say so, and are counted.
``DEBIAN_PACKAGES=0`` leaves the machine as it is. Standard library only.
"""

import os
import shutil
import subprocess
import sys
import time

NEEDED = {
    "runc": ("runc", "boxes of an OCI runtime"),
}
"""Program → its package, and what it is for."""
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
_SECONDS = 600


def main() -> int:
    """Install what is missing and say in a line what came of it; always 0."""
    missing = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
    if not missing:
        print(f"ok   programs for tests: {', '.join(NEEDED)} are here")
        return 0
    packages = [NEEDED[name][0] for name in missing]
    command = f"apt-get install --no-install-recommends {' '.join(packages)}"
    purposes = "; ".join(f"{name}: {NEEDED[name][1]}" for name in missing)
    reason = _reason_not_to()
    if not reason:
        began = time.monotonic()
        reason = _installed(packages)
        if not reason:
            print(f"ok   installed {', '.join(packages)} ({time.monotonic() - began:.0f} s)")
            return 0
    print(f"skip {', '.join(missing)} not installed ({reason}); tests that need them are skipped")
    print(f"     {purposes}; to get them: {command}")
    return 0


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
