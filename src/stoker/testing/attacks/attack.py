"""What an attack is, and which defence it is aimed at."""

from enum import StrEnum

import msgspec

from stoker.model.execution import MEBIBYTE, Limits

TIGHT = Limits(
    cpu_seconds=10,
    memory_bytes=96 * MEBIBYTE,
    processes_max=48,
    disk_bytes=8 * MEBIBYTE,
    files_max=500,
    output_bytes=256 * 1024,
)
"""Limits of the boxes that are attacked."""
LOOSE = Limits(
    cpu_seconds=60,
    memory_bytes=512 * MEBIBYTE,
    processes_max=512,
    disk_bytes=64 * MEBIBYTE,
    files_max=20_000,
    output_bytes=16 * MEBIBYTE,
)
"""Under which an attack on a limit succeeds."""
POSSIBLE = b"possible"
"""What a program prints that got what it wanted."""


class Off(StrEnum):
    """Which defence is off where the attack must succeed."""

    FILTER = "filter"
    """The system-call filter, and with it the bar to further user namespaces."""
    NETWORK = "network"
    """The network namespace."""
    MASKS = "masks"
    """The covers over files of the kernel's."""
    UID = "uid"
    """The uid of the box's own: it runs as root."""
    LIMITS = "limits"
    """The limits are wider than what the attack wants."""
    EVERYTHING = "everything"
    """It runs as a plain child of ours, the way most harnesses start tools."""


class Attack(msgspec.Struct, frozen=True, kw_only=True):
    """One program."""

    name: str
    """What it tries, in a few words; unique."""
    case: str
    """Row of the cases it belongs to."""
    off: Off
    program: str
    """Python source; sees ``P``, the places that the world has, and the prelude's names."""
    limits: Limits = TIGHT
    timeout_seconds: float = 20.0
    """In the box; with the limits off it has ten times that."""
    leaves: bool = False
    """It succeeded if a process of it (that sleeps ``P["mark"]`` seconds) outlived it."""


PRELUDE = """\
import ctypes, errno, json, os, resource, signal, socket, struct, subprocess, sys, threading, time
P = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
def say(got):
    print("possible" if got else "no", flush=True)
def call(*arguments):
    got = libc.syscall(*arguments)
    return got if got >= 0 else -ctypes.get_errno()
def tried(action):
    try:
        say(action() is not False)
    except OSError as error:
        print(errno.errorcode.get(error.errno, error), flush=True)
def alone(flags):
    # A user namespace of its own gives every capability in it: the usual first step outwards.
    return call(272, 0x10000000 | flags) == 0
"""
