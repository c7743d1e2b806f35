"""The files a guest starts from: a read-only disk shared by all, and what finds it at boot.

Made once per content in the runtime directory. The disk holds busybox, the baseline's interpreter
with the libraries it loads, the scripts of boxes and the runner; the memory disk loads the modules
for it and hands over to the runner, which is process 1. Nothing of the host but these is in it.
"""

import gzip
import io
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec

from stoker.errors import IsolationUnavailable
from stoker.sandbox import runtime
from stoker.sandbox.qemu.parts import MODULES, Parts, module
from stoker.sandbox.runtime import INSIDE, INSIDE_SCRIPTS, RuntimeFiles

PORT_NAME = "stoker"
RUNNER = "/opt/guest"
_GUEST_MODULES = (
    "kernel.py", "seccomp.py", "beneath.py", "entries.py", "states.py", "placing.py",
    "guest/wire.py", "guest/runner.py", "guest/action.py", "guest/counters.py", "guest/place.py",
    "guest/program.py", "guest/carrier.py", "guest/door.py", "guest/keeping.py", "guest/records.py",
)  # fmt: skip
_FOLDERS = ("bin", "usr", "proc", "sys", "dev", "tmp", "run", "workspace", "opt", "lib", "var")
_NO_TK = re.compile(r"_tkinter\.")
_SPARE_BYTES = 16 * 1024 * 1024
_INIT = f"""#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev
$b mount -t proc -o nosuid,nodev,noexec proc /proc
$b mount -t sysfs -o nosuid,nodev,noexec sys /sys
exec </dev/null >/dev/console 2>&1
for m in {" ".join(MODULES)}; do
  if [ -e /modules/$m.ko ]; then $b insmod /modules/$m.ko; fi
done
$b mount -t ext4 -o ro,nodev,nosuid /dev/vda /root
$b mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 /sys/fs/cgroup
echo "+cpu +memory +pids" >/sys/fs/cgroup/cgroup.subtree_control
echo 0 >/proc/sys/user/max_user_namespaces
echo 1 >/proc/sys/kernel/dmesg_restrict
echo 2 >/proc/sys/kernel/kptr_restrict
$b ip link set lo up
$b mkdir -p /dev/shm /dev/pts
$b mount -t devpts -o nosuid,noexec,newinstance,ptmxmode=0666 devpts /dev/pts
for p in /sys/class/virtio-ports/*; do
  if [ "$($b cat $p/name)" = {PORT_NAME} ]; then port=/dev/${{p##*/}}; fi
done
for d in dev proc sys; do $b mount --move /$d /root/$d; done
export PYTHONPATH={RUNNER} PYTHONDONTWRITEBYTECODE=1
exec $b switch_root /root {INSIDE}/bin/python -S -m stoker.sandbox.guest.runner $port
"""


class GuestFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a guest is started with."""

    kernel: str
    initial: str
    """The memory disk."""
    disk: str
    key: str
    """Digest over all of it."""


def prepare(directory: Path, files: RuntimeFiles, parts: Parts) -> GuestFiles:
    """Make the files that are missing; a second or two, and nothing when none is.

    Raises:
        IsolationUnavailable: they cannot be made on this host.
    """
    key = _key(files, parts)
    target = directory / f"guest-{key}"
    with runtime.lock(directory / "lock"):
        if not target.exists():
            with runtime.complete(target) as partial:
                (partial / "initial").write_bytes(_initial(parts))
                shutil.copyfile(parts.kernel, partial / "kernel")
                _disk(partial, files, parts)
    return GuestFiles(
        kernel=str(target / "kernel"),
        initial=str(target / "initial"),
        disk=str(target / "disk"),
        key=key,
    )


def _key(files: RuntimeFiles, parts: Parts) -> str:
    digest = blake2b(f"{tree_digest(files, parts.busybox)} {_INIT}".encode(), digest_size=8)
    digest.update(parts.kernel.encode() + str(Path(parts.kernel).stat().st_size).encode())
    return digest.hexdigest()


# --- the disk ---------------------------------------------------------------------------------


def guest_tree(tree: Path, files: RuntimeFiles, busybox: str) -> None:
    """Make the directory that a guest's programs and its runner see as their root.

    Raises:
        IsolationUnavailable: it cannot be made on this host.
    """
    for folder in _FOLDERS:
        (tree / folder).mkdir(parents=True)
    _busybox(tree, busybox)
    _interpreter(tree, files)
    shutil.copytree(files.etc, tree / "etc", symlinks=True)
    shutil.copytree(files.scripts, tree / INSIDE_SCRIPTS.lstrip("/"))
    for name in _GUEST_MODULES:
        copy = tree / RUNNER.lstrip("/") / "stoker/sandbox" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(__file__).parent.parent / name, copy)
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            runs = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if runs else 0o644)


def tree_digest(files: RuntimeFiles, busybox: str) -> str:
    """Return what stands for the content of ``guest_tree``."""
    digest = blake2b(digest_size=8)
    digest.update(f"{files.key} {files.scripts.name} {sys.version}".encode())
    for name in _GUEST_MODULES:
        digest.update((Path(__file__).parent.parent / name).read_bytes())
    digest.update(Path(busybox).read_bytes())
    return digest.hexdigest()


def _disk(target: Path, files: RuntimeFiles, parts: Parts) -> None:
    tree = target / "tree"
    guest_tree(tree, files, parts.busybox)
    size = sum(p.lstat().st_size + 4096 for p in tree.rglob("*"))
    disk = target / "disk"
    with disk.open("wb") as file:
        file.truncate(size + size // 8 + _SPARE_BYTES)
    _ran(
        [parts.make_file_system, "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0",
         "-E", "root_owner=0:0", "-d", str(tree), str(disk)],
    )  # fmt: skip
    shutil.rmtree(tree)


def _busybox(tree: Path, busybox: str) -> None:
    shutil.copy(busybox, tree / "bin/busybox")
    for name in _ran([busybox, "--list"]).split():
        if name != "busybox":
            (tree / "bin" / name).symlink_to("busybox")
    for folder in ("sbin", "usr/bin", "usr/sbin"):
        (tree / folder).symlink_to("/bin")


def _interpreter(tree: Path, files: RuntimeFiles) -> None:
    python = tree / INSIDE.lstrip("/")
    if (files.python / "lib").is_dir():
        shutil.copytree(files.python, python, symlinks=True)
    else:  # the system's interpreter, which namespace boxes see where it is
        (python / "bin").mkdir(parents=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        runtime.copy_interpreter(Path(sys.base_prefix), python, version)
        for name in ("python", "python3"):
            (python / "bin" / name).symlink_to(version)
    programs = [python / "bin/python", *python.rglob("lib-dynload/*.so")]
    for library in _libraries([p for p in programs if not _NO_TK.match(p.name)], python):
        copy = tree / library.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists():
            shutil.copy(os.path.realpath(library), copy)


def _libraries(programs: list[Path], inside: Path) -> list[str]:
    """Return the libraries these load, by the paths the loader looks at."""
    said = _ran(["ldd", *map(str, programs)])
    found = re.findall(r"(?:=> |^\s+)(/\S+) \(", said, re.MULTILINE)
    return sorted({path for path in found if not path.startswith(str(inside))})


def version(parts: Parts) -> str:
    """Return what the emulator calls itself.

    Raises:
        IsolationUnavailable: it cannot be run.
    """
    return _ran([parts.emulator, "--version"]).partition("\n")[0]


def _ran(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - tools of the host
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise IsolationUnavailable(
            f"{command[0]}, which guests need, failed: {said.strip()[-300:]}"
        ) from error
    return done.stdout


# --- the memory disk ----------------------------------------------------------------------------


def _initial(parts: Parts) -> bytes:
    found = {name: module(parts, name) for name in MODULES}
    modules = {name: content for name, content in found.items() if content is not None}
    return memory_disk(_INIT, Path(parts.busybox).read_bytes(), modules)


def memory_disk(init: str, busybox: bytes, modules: Mapping[str, bytes]) -> bytes:
    """Return a memory disk: its ``/init`` is a script for busybox, ``/modules`` has ``NAME.ko``."""
    archive = io.BytesIO()
    for folder in ("bin", "dev", "proc", "sys", "root", "modules"):
        _entry(archive, folder, stat.S_IFDIR | 0o755, b"")
    _entry(archive, "bin/busybox", stat.S_IFREG | 0o755, busybox)
    _entry(archive, "init", stat.S_IFREG | 0o755, init.encode())
    for name, content in modules.items():
        _entry(archive, f"modules/{name}.ko", stat.S_IFREG | 0o644, content)
    _entry(archive, "TRAILER!!!", 0, b"")
    return gzip.compress(archive.getvalue(), compresslevel=1, mtime=0)


def _entry(archive: io.BytesIO, name: str, mode: int, content: bytes) -> None:
    """Append one file in the ``newc`` form of cpio."""
    path = name.encode() + b"\0"
    fields = (archive.tell() + 1, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
    archive.write(b"070701" + "".join(f"{field:08X}" for field in fields).encode() + path)
    archive.write(b"\0" * (-archive.tell() % 4))
    archive.write(content)
    archive.write(b"\0" * (-archive.tell() % 4))
