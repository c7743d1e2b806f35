"""Where a ledger lives on disk: files of its directory, and whether the directory can hold one.

SQLite's locks and syncs mean nothing on network file systems, so those are refused by the magic
number of ``statfs``. The socket lies outside, since its path may have 107 bytes at most.
"""

import ctypes
import errno
import fcntl
import os
import select
import stat
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from stoker.errors import RunDirectoryUnusable

LOCK = "ledger.lock"
DATABASE = "ledger.db"
DATABASE_ADDRESS = "ledger.postgres"
SOCKET_PATH = "ledger.sock.path"
LOG = "ledger.log"

_NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x01021997: "9p",
    0x65735546: "FUSE",
    0x5346414F: "AFS",
    0x0BD00BD0: "Lustre",
    0x00C36400: "Ceph",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x564C: "NCP",
    0x73757245: "Coda",
}
_FUSE = 0x65735546
_LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs", "fuse.ntfs-3g"})
_PRIVATE = "drwx------"
_LOCK_TRIES = 20
_LOCK_SECONDS = 0.01
_STATFS_BYTES = 256
_SOCKET_BYTES_MAX = 107


def check_directory(directory: Path) -> None:
    """Return when a ledger can live in ``directory``; it is created where it does not exist.

    Raises:
        RunDirectoryUnusable: with what is wrong and where to put it instead.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        kind = network_file_system(directory)
        if kind is not None:
            raise RunDirectoryUnusable(
                f"{directory} lies on a network file system ({kind}), where locks and syncs do not "
                "hold; nothing was written; put the run on a local disk, for instance "
                "in a directory of this machine's own disk"
            )
        probe = directory / f".ledger-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if full else "choose a directory you may write to"
        raise RunDirectoryUnusable(
            f"{directory} cannot hold a ledger: {error.strerror}; nothing was written; {remedy}"
        ) from error


def network_file_system(directory: Path) -> str | None:
    """Return the name of the network file system under ``directory``, or ``None`` if local."""
    magic = _magic(directory)
    if magic == _FUSE and _mount_type(directory) in _LOCAL_FUSE:
        return None
    return _NETWORK.get(magic)


def _mount_type(directory: Path) -> str:
    """Return the file system type of the mount that holds ``directory`` (``fuse.sshfs`` …)."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    return ""


def _magic(directory: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if libc.statfs(os.fsencode(directory), buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(directory))
    return int(ctypes.c_ulong.from_buffer(buffer).value) & 0xFFFFFFFF


def socket_path(directory: Path, environ: Mapping[str, str]) -> Path:
    """Return the socket of this directory's owner, in a 0700 directory that is ours.

    Raises:
        RunDirectoryUnusable: somebody else owns the place, or others may enter it.
    """
    runtime = environ.get("XDG_RUNTIME_DIR")
    name = blake2b(os.fsencode(directory.resolve()), digest_size=8).hexdigest() + ".sock"
    places = [Path(runtime) / "stoker"] if runtime else []
    places.append(Path(f"/tmp/stoker-{os.getuid()}"))  # noqa: S108 - mode and owner are checked
    for place in places:
        if len(os.fsencode(place / name)) > _SOCKET_BYTES_MAX:
            continue
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            status = place.lstat()
        except OSError:
            continue
        if status.st_uid == os.getuid() and stat.filemode(status.st_mode) == _PRIVATE:
            return place / name
    raise RunDirectoryUnusable(
        f"no private place for the ledger's socket: none of {', '.join(map(str, places))} is a "
        "directory of mode 0700 that belongs to you; remove it or set XDG_RUNTIME_DIR"
    )


def take_lock(directory: Path) -> int | None:
    """Return a descriptor that holds the directory's lock and names us, or ``None`` if taken."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            # Somebody who only looks (``owner_pid``) holds it for an instant; an owner for long.
            select.select([], [], [], _LOCK_SECONDS)
    else:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def owner_pid(directory: Path) -> int | None:
    """Return the process id of the living owner of ``directory``'s ledger, ``None`` without one."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.pread(descriptor, 32, 0).strip()
        return int(written) if written else None
    else:
        return None
    finally:
        os.close(descriptor)
