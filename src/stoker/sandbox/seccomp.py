"""The system-call filter of boxes: a hand-assembled BPF program, no library needed.

What is allowed: every call the kernel had when the tables were written, less the refused ones.
That is the OCI default list minus io_uring, keys, userfaultfd, bpf, perf, memfd_secret, ptrace,
process_vm, pidfd_getfd, file handles, mounts and namespaces. Later calls answer ENOSYS, refused
ones EPERM, ``clone3`` ENOSYS (its flags lie in memory a filter cannot read; libc falls back to
``clone``). Calls of another ABI (x32, i386) end the process.

Source: docs/design/0003; numbers from the kernel's unistd tables.
"""

import errno
import functools
import socket
import struct

# Instruction codes: load a 32-bit word, compare, return.
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_GREATER = 0x25
_JUMP_GREATER_EQUAL = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000

_OFFSET_NUMBER = 0
_OFFSET_ARCHITECTURE = 4
_OFFSET_ARGUMENTS = 16
_ARGUMENT_BYTES = 8

_X32_BIT = 0x40000000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

NAMESPACE_FLAGS = 0x7E020080 | 0x00000080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME."""

TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into a terminal."""
PERSONALITIES = (0, 0xFFFFFFFF)
"""The usual one, and the question which it is."""
SOCKET_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
NETLINK_ROUTE = 0

# From 424 on the numbers are the same everywhere.
_REFUSED_NEW = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "set_mempolicy_home_node": 450,
    "statmount": 457,
    "listmount": 458,
    "lsm_get_self_attr": 459,
    "lsm_set_self_attr": 460,
    "lsm_list_modules": 461,
}
_CLONE3 = 435
_NEW_FIRST, _NEW_LAST = 424, 466

_REFUSED: dict[str, dict[str, int]] = {
    "x86_64": {
        "ptrace": 101, "syslog": 103, "uselib": 134, "ustat": 136, "sysfs": 139, "vhangup": 153,
        "modify_ldt": 154, "pivot_root": 155, "_sysctl": 156, "chroot": 161, "acct": 163,
        "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
        "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
        "create_module": 174, "init_module": 175, "delete_module": 176, "get_kernel_syms": 177,
        "query_module": 178, "quotactl": 179, "nfsservctl": 180, "lookup_dcookie": 212,
        "clock_settime": 227, "mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239,
        "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
        "migrate_pages": 256, "unshare": 272, "move_pages": 279, "perf_event_open": 298,
        "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
        "kcmp": 312, "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "nfsservctl": 42,
        "chroot": 51, "vhangup": 58, "quotactl": 60, "acct": 89, "unshare": 97,
        "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112,
        "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162,
        "settimeofday": 170, "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224,
        "swapoff": 225, "mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237,
        "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
        "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
_OLD_LAST = {"x86_64": 334, "aarch64": 293}
_CHECKED = {
    "x86_64": {"ioctl": 16, "socket": 41, "clone": 56, "personality": 135},
    "aarch64": {"ioctl": 29, "socket": 198, "clone": 220, "personality": 92},
}


def supported(machine: str) -> bool:
    """Whether there is a table for ``machine``."""
    return machine in _ARCHITECTURES


def refused_numbers(machine: str) -> dict[str, int]:
    """Return the refused calls of ``machine`` by name."""
    return {**_REFUSED[machine], **_REFUSED_NEW}


def allowed_ranges(machine: str) -> list[tuple[int, int]]:
    """Return the allowed numbers as closed ranges, in rising order."""
    refused = sorted({*refused_numbers(machine).values(), _CLONE3})
    ranges = []
    for first, last in ((0, _OLD_LAST[machine]), (_NEW_FIRST, _NEW_LAST)):
        start = first
        for number in (*(n for n in refused if first <= n <= last), last + 1):
            if start < number:
                ranges.append((start, number - 1))
            start = number + 1
    return ranges


@functools.cache
def filter_program(machine: str, *, sockets: bool = True) -> bytes:
    """Return the program for ``machine``; ``sockets=False`` refuses every new socket (rung d)."""
    checked = _CHECKED[machine]
    code = [
        _load(_OFFSET_ARCHITECTURE),
        *_unless_equal(_ARCHITECTURES[machine], _KILL),
        _load(_OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        code += [_jump(_JUMP_GREATER_EQUAL, _X32_BIT, (0, 1)), _return(_KILL)]
    code += [_jump(_JUMP_EQUAL, _CLONE3, (0, 1)), _return(_ERRNO | errno.ENOSYS)]
    code += _when(checked["clone"], [
        _load_argument(0), _jump(_JUMP_ANY_BIT, NAMESPACE_FLAGS, (0, 1)), _refuse(),
        _return(_ALLOW),
    ])  # fmt: skip
    code += _when(checked["ioctl"], [
        _load_argument(1), *_refuse_values(TERMINAL_INPUT), _return(_ALLOW),
    ])  # fmt: skip
    code += _when(checked["personality"], [
        _load_argument(0), *_allow_values(PERSONALITIES), _refuse(),
    ])  # fmt: skip
    code += _when(checked["socket"], _socket_rules() if sockets else [_refuse()])
    for first, last in allowed_ranges(machine):
        if first == _NEW_FIRST:  # between the old numbers and these there is no call
            code += [_jump(_JUMP_GREATER_EQUAL, first, (1, 0)), _return(_ERRNO | errno.ENOSYS)]
        code += [
            _jump(_JUMP_GREATER, last, (3, 0)),
            _jump(_JUMP_GREATER_EQUAL, first, (0, 1)),
            _return(_ALLOW),
            _refuse(),
        ]
    code.append(_return(_ERRNO | errno.ENOSYS))
    return b"".join(code)


def _socket_rules() -> list[bytes]:
    return [
        _load_argument(0),
        *_allow_values(SOCKET_FAMILIES),
        *_unless_equal(socket.AF_NETLINK, _ERRNO | errno.EAFNOSUPPORT),
        _load_argument(2),
        *_allow_values((NETLINK_ROUTE,)),
        _return(_ERRNO | errno.EPROTONOSUPPORT),
    ]


def _when(number: int, body: list[bytes]) -> list[bytes]:
    """Run ``body``, which always returns, when the call is ``number``."""
    return [_jump(_JUMP_EQUAL, number, (0, len(body))), *body]


def _unless_equal(value: int, verdict: int) -> list[bytes]:
    return [_jump(_JUMP_EQUAL, value, (1, 0)), _return(verdict)]


def _refuse_values(values: tuple[int, ...]) -> list[bytes]:
    return [part for v in values for part in (_jump(_JUMP_EQUAL, v, (0, 1)), _refuse())]


def _allow_values(values: tuple[int, ...]) -> list[bytes]:
    return [part for v in values for part in (_jump(_JUMP_EQUAL, v, (0, 1)), _return(_ALLOW))]


def _load(offset: int) -> bytes:
    return struct.pack("=HBBI", _LOAD, 0, 0, offset)


def _load_argument(index: int) -> bytes:
    # The low half, which is first on both little-endian machines; the kernel ignores the high one.
    return _load(_OFFSET_ARGUMENTS + index * _ARGUMENT_BYTES)


def _jump(kind: int, value: int, skips: tuple[int, int]) -> bytes:
    """Compare with ``value`` and skip so many instructions when it holds, when it does not."""
    return struct.pack("=HBBI", kind, *skips, value)


def _return(verdict: int) -> bytes:
    return struct.pack("=HBBI", _RETURN, 0, 0, verdict)


def _refuse() -> bytes:
    return _return(_ERRNO | errno.EPERM)
