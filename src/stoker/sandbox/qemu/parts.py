"""What a guest is made of: emulator, kernel with its modules, a busybox, a tool for file systems.

All of them are the host's, from its packages; nothing is fetched here. A missing part is named
with the command that brings it.
"""

import lzma
import os
import re
import shutil
from pathlib import Path

import msgspec

from stoker.errors import IsolationUnavailable
from stoker.sandbox import kernel

UNPACKED = Path("/var/lib/stoker/guest-kernel")
"""Where a kernel package may be unpacked, for a host that does not run that kernel itself."""
MODULES = ("virtio", "virtio_ring", "virtio_mmio", "virtio_blk", "virtio_console")
"""In the order of loading; those built into the kernel have no file."""
_FOLDERS = ("drivers/virtio", "drivers/block", "drivers/char")
_PATH = "/usr/bin:/usr/sbin:/bin:/sbin:/usr/local/bin:/usr/local/sbin"
_REMEDY = (
    "apt install --no-install-recommends qemu-system-x86 busybox-static e2fsprogs "
    "linux-image-cloud-amd64"
)


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Where they lie."""

    emulator: str
    busybox: str
    make_file_system: str
    kernel: str
    modules: str
    """The ``kernel`` directory of its modules."""
    accelerator: str
    """``kvm`` or ``tcg``."""


def find(top: Path = Path("/")) -> Parts:
    """Return the parts on this host; ``top`` is where the host's files begin.

    Raises:
        IsolationUnavailable: one is missing; the sentence names it, and how to get it.
    """
    if kernel.machine() != "x86_64":
        raise IsolationUnavailable(
            f"guests are made for x86_64, and this is {kernel.machine()}; use another isolation"
        )
    found = _kernel(top)
    programs = {
        name: shutil.which(name, path=_beneath(top))
        for name in ("qemu-system-x86_64", "busybox", "mke2fs")
    }
    if programs["busybox"] is not None and _is_dynamic(programs["busybox"]):
        programs["busybox"] = None
    missing = [
        "a static busybox" if name == "busybox" else name
        for name, path in programs.items()
        if path is None
    ]
    missing += [] if found else ["a kernel for guests (linux-image-cloud-amd64)"]
    if missing or found is None:
        raise IsolationUnavailable(f"{', '.join(missing)} not found; {_REMEDY}")
    emulator, busybox, make_file_system = (str(path) for path in programs.values())
    return Parts(
        emulator=emulator,
        busybox=busybox,
        make_file_system=make_file_system,
        kernel=str(found[0]),
        modules=str(found[1]),
        accelerator="kvm" if has_kvm() else "tcg",
    )


def module(parts: Parts, name: str) -> bytes | None:
    """Return a module's content, or ``None`` where the kernel has it built in."""
    for folder in _FOLDERS:
        for suffix in (".ko", ".ko.xz"):
            path = Path(parts.modules) / folder / f"{name}{suffix}"
            if path.exists():
                content = path.read_bytes()
                return lzma.decompress(content) if suffix.endswith("xz") else content
    return None


def _kernel(top: Path) -> tuple[Path, Path] | None:
    """Return the newest kernel for guests and its modules."""
    found: list[tuple[list[int], Path, Path]] = []
    for base in (top / UNPACKED.relative_to("/"), top):
        for image in (base / "boot").glob("vmlinuz-*cloud*"):
            release = image.name.removeprefix("vmlinuz-")
            for library in ("lib", "usr/lib"):
                modules = base / library / "modules" / release / "kernel"
                if modules.is_dir():
                    found.append(([int(n) for n in re.findall(r"\d+", release)], image, modules))
    return max(found)[1:] if found else None


def _is_dynamic(program: str) -> bool:
    with Path(program).open("rb") as file:
        return b"/ld-linux" in file.read(4096)


def _beneath(top: Path) -> str:
    return ":".join(str(top / folder.lstrip("/")) for folder in _PATH.split(":"))


def has_kvm() -> bool:
    """Whether a leased uid could open the device; whether guests run is for the canary to say."""
    try:
        mode = os.stat("/dev/kvm").st_mode  # noqa: PTH116 - one look
    except OSError:
        return False
    return mode & 0o006 == 0o006  # noqa: PLR2004 - read and write for others
