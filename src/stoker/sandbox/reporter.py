"""A tiny static program that tells a signal from an exit code; runs inside namespace boxes.

The launcher reports a signal as 128 + number, which a program can also return. The reporter is the
box's process 1, where nothing in the box can kill it: it forks, runs its arguments, reaps orphans
until that child ends, writes its raw wait status to ``STATUS_DESCRIPTOR`` and exits 0. The program
does not inherit that descriptor; what is said is about its own ending only, so forging it gains
nothing. On machines without a table entry the launcher's figure is used as it is.

Assembled from: fork; wait4(-1) until the child; write(19, &status, 4); exit_group(0) above,
and fcntl(19, F_SETFD, FD_CLOEXEC); execve(argv[1], argv + 2, environ); exit_group(127) below.
"""

import struct

STATUS_DESCRIPTOR = 19
NAME = "reporter"
CONTAINER_DESCRIPTORS = range(3, 8)
"""Where containers are told to report: runtimes pass descriptors on without gaps."""
INIT = "init"
"""Another such program: process 1 of an action that the box's server forked. It lets the kernel
reap orphans (sigaction(SIGCHLD, SIG_IGN)) and does nothing (pause) until it is killed."""

_CODE = {
    "x86_64": (
        "4889e3b8390000000f0585c0743d786789c5bfffffffff488d7424c031d24531d2b83d0000000f05"
        "83f8f6744a39e875e1b801000000bf13000000488d7424c0ba040000000f0531ffeb31b848000000"
        "bf13000000be02000000ba010000000f05488b0b488d7318488d54cb10488b7b10b83b0000000f05bf"
        "7f000000b8e70000000f05"
    ),
}
_TO_DESCRIPTOR = f"bf{STATUS_DESCRIPTOR:02x}000000"
_ENDS_WITH_PARENT = {"x86_64": "b89d000000bf01000000be090000000f05"}
"""prctl(PR_SET_PDEATHSIG, SIGKILL)."""
_INIT_CODE = {
    "x86_64": ("6a006a006a006a014889e6bf1100000031d241ba08000000b80d0000000f05b8220000000f05ebf7"),
}
_MACHINE_NUMBERS = {"x86_64": 62}
_BASE = 0x400000
_HEADERS_BYTES = 64 + 56


def program(machine: str) -> bytes:
    """Return the program as an executable file; empty where there is none for ``machine``."""
    return _executable(machine, _CODE)


def container_program(machine: str, descriptor: int) -> bytes:
    """Return it as process 1 of a container, which reports to ``descriptor``, likewise.

    It ends with its parent, the runtime, whose death would else leave the container running.
    """
    told = {
        name: _ENDS_WITH_PARENT[name] + code.replace(_TO_DESCRIPTOR, f"bf{descriptor:02x}000000")
        for name, code in _CODE.items()
    }
    return _executable(machine, told)


def init_program(machine: str) -> bytes:
    """Return process 1 of a forked action, likewise."""
    return _executable(machine, _INIT_CODE)


def _executable(machine: str, codes: dict[str, str]) -> bytes:
    if machine not in codes:
        return b""
    code = bytes.fromhex(codes[machine])
    size = _HEADERS_BYTES + len(code)
    entry = _BASE + _HEADERS_BYTES
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01", 2, _MACHINE_NUMBERS[machine], 1,
        entry, 64, 0, 0, 64, 56, 1, 0, 0, 0,
    )  # fmt: skip
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return header + segment + code
