"""The kernel calls Python has no name for: openat2, mount, prctl, Landlock, sealed memory files.

Thin and blocking; every function raises ``OSError`` with the kernel's errno. No policy here.
"""

import ctypes
import errno
import fcntl
import functools
import os
import platform
import struct

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("mount", "prctl", "setns", "syscall", "umount2", "unshare"):
    getattr(_libc, _name)  # looked up now: each child of a fork would do it anew

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_REMOUNT = 32
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2
CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10
RESOLVE_STRICT = RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

_NR_OPEN_TREE = 428
_NR_MOVE_MOUNT = 429
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_NR_CLOSE_RANGE = 436
_NR_OPENAT2 = 437
_NR_LANDLOCK_CREATE = 444
_NR_LANDLOCK_ADD = 445
_NR_LANDLOCK_RESTRICT = 446
_OPENAT2_TRIES = 8


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def openat2(directory: int, path: bytes, flags: int, mode: int = 0, *, resolve: int) -> int:
    """Open ``path`` beneath ``directory`` under ``resolve`` rules; returns a descriptor."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve)
    for _ in range(_OPENAT2_TRIES):
        result = _libc.syscall(_NR_OPENAT2, directory, path, how, len(how))
        # EAGAIN: a rename raced with the walk; the kernel asks to try again.
        if result >= 0 or ctypes.get_errno() != errno.EAGAIN:
            break
    return _checked(result, "openat2")


@functools.cache
def has_openat2() -> bool:
    """Whether this kernel has openat2 (5.6) and lets us call it."""
    try:
        os.close(
            openat2(_AT_FDCWD, b".", os.O_PATH | os.O_DIRECTORY, resolve=RESOLVE_NO_MAGICLINKS)
        )
    except OSError:
        return False
    return True


_AT_FDCWD = -100


def mount_tmpfs(target: str, options: str) -> None:
    """Mount a tmpfs on ``target``: nosuid, nodev, with ``options`` (size, nr_inodes, mode …)."""
    _checked(
        _libc.mount(
            b"stoker", os.fsencode(target), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode()
        ),
        f"mount tmpfs on {target}",
    )


def resize_tmpfs(target: str, options: str) -> None:
    """Give the tmpfs on ``target`` another size or ``nr_inodes``; OSError: more is in it."""
    flags = MS_REMOUNT | MS_NOSUID | MS_NODEV
    _checked(
        _libc.mount(b"stoker", os.fsencode(target), b"tmpfs", flags, options.encode()),
        f"resize tmpfs on {target}",
    )


def unmount(target: str) -> None:
    """Unmount ``target``, at once for the name, later for whoever still uses it."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def detached_mount(path: str) -> int:
    """Return a descriptor of a copy of the mount at ``path`` that is attached nowhere."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    return _checked(
        _libc.syscall(_NR_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags), f"open_tree {path}"
    )


def attach_mount(mount: int, target: str) -> None:
    """Attach a detached mount on ``target``; a descriptor does so once."""
    _checked(
        _libc.syscall(
            _NR_MOVE_MOUNT, mount, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH
        ),
        f"move_mount to {target}",
    )


def own_mount_namespace() -> None:
    """Give this process a mount namespace of its own, from and to which nothing spreads."""
    _checked(_libc.unshare(CLONE_NEWNS), "unshare")
    _checked(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "make mounts private")


def enter_mount_namespace(namespace: int) -> None:
    """Enter the mount namespace of a descriptor; root and working directory become its root."""
    _checked(_libc.setns(namespace, CLONE_NEWNS), "setns")


def enter_user_namespace(namespace: int) -> None:
    """Enter the user namespace of a descriptor, with every capability in it."""
    _checked(_libc.setns(namespace, CLONE_NEWUSER), "setns")


def prctl(option: int, argument: int = 0) -> None:
    """Call prctl with one argument."""
    _checked(_libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), f"prctl {option}")


def close_from(lowest: int) -> None:
    """Close every descriptor from ``lowest`` up."""
    if _libc.syscall(_NR_CLOSE_RANGE, lowest, 0xFFFFFFFF, 0) < 0:
        os.closerange(lowest, os.sysconf("SC_OPEN_MAX"))


def memory_file(name: str, content: bytes) -> int:
    """Return a descriptor of an anonymous file with ``content``, positioned at its start."""
    descriptor = os.memfd_create(name)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def sealed_copy(path: str) -> int:
    """Return a descriptor of an anonymous copy of a program that nobody can change any more."""
    written = os.memfd_create(os.path.basename(path), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)  # noqa: PTH119 - a name only
    try:
        with open(path, "rb") as source:  # noqa: PTH123 - as bytes go
            while os.sendfile(written, source.fileno(), None, _COPY_BYTES):
                pass
        fcntl.fcntl(written, fcntl.F_ADD_SEALS, _SEALS)
        # A program that is open for writing cannot be run, sealed or not.
        return os.open(f"/proc/self/fd/{written}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(written)


_COPY_BYTES = 1 << 26
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def sync_file_system(directory: int) -> None:
    """Write everything of the file system that holds ``directory`` to the disk."""
    _checked(_libc.syncfs(directory), "syncfs")


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def load_seccomp(program: bytes) -> None:
    """Apply a BPF program (8 bytes per instruction) to this process; it stays over exec."""
    filter_program = _FilterProgram(len(program) // 8, program)
    _checked(
        _libc.prctl(PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0),
        "seccomp",
    )


# --- Landlock ------------------------------------------------------------------------------

_CREATE_VERSION = 1
_RULE_PATH_BENEATH = 1
READ_EXECUTE = (1 << 0) | (1 << 2) | (1 << 3)
_WRITES_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
_TRUNCATE_ABI = 3
_NETWORK_ABI = 4
_SCOPE_ABI = 6


def landlock_abi() -> int:
    """Return the Landlock version of this kernel; 0 where there is none."""
    version: int = _libc.syscall(_NR_LANDLOCK_CREATE, None, 0, _CREATE_VERSION)
    return max(0, version)


def landlock(read: list[str], write: list[str]) -> None:
    """Confine this process: ``read`` beneath may be read and run, ``write`` also changed."""
    abi = landlock_abi()
    if not abi:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock")
    handled = _WRITES_BY_ABI[min(abi, _TRUNCATE_ABI)]
    network = 3 if abi >= _NETWORK_ABI else 0
    scoped = 3 if abi >= _SCOPE_ABI else 0
    attributes = struct.pack("=QQQ", handled, network, scoped)
    size = 24 if abi >= _SCOPE_ABI else 16 if abi >= _NETWORK_ABI else 8
    ruleset = _checked(
        _libc.syscall(_NR_LANDLOCK_CREATE, attributes, size, 0), "landlock_create_ruleset"
    )
    for paths, access in ((read, READ_EXECUTE), (write, handled)):
        for path in paths:
            _allow_beneath(ruleset, path, access)
    _checked(_libc.syscall(_NR_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


_FILE_ACCESS = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14)


def _allow_beneath(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):  # noqa: PTH112 - the maker imports as little as it can
        access &= _FILE_ACCESS
    rule = struct.pack("=Qi", access, descriptor)
    _checked(
        _libc.syscall(_NR_LANDLOCK_ADD, ruleset, _RULE_PATH_BENEATH, rule, 0), f"landlock {path}"
    )
    os.close(descriptor)


def machine() -> str:
    """Return ``x86_64`` or ``aarch64`` (or what else this machine is)."""
    return platform.machine()
