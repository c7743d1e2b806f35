"""The filter, run by a small interpreter of the kernel's machine, for both architectures."""

import errno
import socket
import struct

import pytest

from stoker.sandbox import seccomp

ALLOW = 0x7FFF0000
KILL = 0x80000000
ERRNO = 0x00050000
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(program: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator = position = 0
    while True:
        code, when_true, when_false, value = struct.unpack_from("=HBBI", program, position * 8)
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            return int(value)
        else:
            taken = {
                0x15: accumulator == value,
                0x25: accumulator > value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]
            position += when_true if taken else when_false


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_gets_the_right_answer(machine: str) -> None:
    program = seccomp.filter_program(machine)
    refused = set(seccomp.refused_numbers(machine).values())
    special = {*seccomp._CHECKED[machine].values(), 435}
    last_old = seccomp._OLD_LAST[machine]
    for number in range(1024):
        if number in special:
            continue
        known = number <= last_old or 424 <= number <= 466
        wanted = ERRNO | errno.ENOSYS
        if number in refused:
            wanted = ERRNO | errno.EPERM if known else wanted
        elif known:
            wanted = ALLOW
        assert decide(program, MACHINES[machine], number) == wanted, number


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide_where_they_matter(machine: str) -> None:
    program = seccomp.filter_program(machine)
    numbers = seccomp._CHECKED[machine]

    def asked(name: str, *arguments: int) -> int:
        return decide(program, MACHINES[machine], numbers[name], arguments)

    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert asked("clone", flag | 17) == ERRNO | errno.EPERM
    assert asked("clone", 0x3D0F00) == ALLOW  # what pthread_create asks for
    assert asked("clone", 17) == ALLOW
    assert asked("ioctl", 0, 0x5412) == ERRNO | errno.EPERM
    assert asked("ioctl", 0, (1 << 32) | 0x5412) == ERRNO | errno.EPERM
    assert asked("ioctl", 0, 0x5413) == ALLOW
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
        assert asked("socket", family, 1, 0) == ALLOW
    assert asked("socket", socket.AF_NETLINK, 3, 0) == ALLOW
    assert asked("socket", socket.AF_NETLINK, 3, 9) == ERRNO | errno.EPROTONOSUPPORT
    for other in (17, 40, 38, 21):
        assert asked("socket", other, 1, 0) == ERRNO | errno.EAFNOSUPPORT
    assert asked("personality", 0xFFFFFFFF) == ALLOW
    assert asked("personality", 0x0040000) == ERRNO | errno.EPERM
    assert decide(program, MACHINES[machine], 435) == ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_other_abis_end_the_process(machine: str) -> None:
    program = seccomp.filter_program(machine)
    for architecture in (0x40000003, 0x40000028, 0):
        assert decide(program, architecture, 1) == KILL
    if machine == "x86_64":
        assert decide(program, MACHINES[machine], 0x40000000 | 39) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_without_sockets_every_family_is_refused(machine: str) -> None:
    program = seccomp.filter_program(machine, sockets=False)
    number = seccomp._CHECKED[machine]["socket"]
    for family in range(64):
        assert decide(program, MACHINES[machine], number, (family, 1, 0)) == ERRNO | errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_the_program_is_one_the_kernel_takes(machine: str) -> None:
    program = seccomp.filter_program(machine)
    assert len(program) % 8 == 0
    assert len(program) // 8 < 400  # far below the kernel's 4096


def test_ranges_are_disjoint_and_rising() -> None:
    for machine in MACHINES:
        ranges = seccomp.allowed_ranges(machine)
        flat = [number for pair in ranges for number in pair]
        assert flat == sorted(flat)
        assert all(first <= last for first, last in ranges)
