"""What OCI runtimes are told, checked without one: the filter's names, the specification, ages."""

import ctypes
import errno
import json
from typing import Any

import pytest

from stoker.errors import ToolRefused
from stoker.sandbox import oci_runtimes, reporter, seccomp
from stoker.sandbox.oci import Bind, Container, specification
from stoker.sandbox.seccomp_profile import ALLOWED, profile

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW = 0
WORD = 0xFFFFFFFF


def _decide(machine: str, name: str, *arguments: int) -> int:
    """Return the answer of the profile as a runtime reads it: 0, or an error."""
    given = profile(machine)
    answers = set()
    for rule in given["syscalls"]:
        if name in rule["names"] and all(
            arguments[a["index"]] & a["value"] == a["valueTwo"] for a in rule["args"]
        ):
            answers.add(ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else rule["errnoRet"])
    assert len(answers) <= 1, f"{name} {arguments} meets rules that differ"
    return answers.pop() if answers else int(given["defaultErrnoRet"])


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_names_of_the_profile_are_the_numbers_of_the_filter(machine: str) -> None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("needs libseccomp: apt-get install libseccomp2 (runc brings it)")
    resolve = library.seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    numbers = {resolve(ARCHITECTURES[machine], name.encode()): name for name in ALLOWED}
    # Below zero: not of this machine, or younger than this libseccomp; neither can be called then.
    numbers = {number: name for number, name in numbers.items() if number >= 0}
    ranges = seccomp.allowed_ranges(machine)
    outside = {name for n, name in numbers.items() if not any(a <= n <= b for a, b in ranges)}
    assert outside == set()
    checked = set(seccomp._CHECKED[machine].values())
    name_of = library.seccomp_syscall_resolve_num_arch
    name_of.argtypes = [ctypes.c_uint32, ctypes.c_int]
    name_of.restype = ctypes.c_char_p
    allowed = {n for a, b in ranges for n in range(a, b + 1) if name_of(ARCHITECTURES[machine], n)}
    assert allowed - checked == set(numbers)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_refused_names_are_refused_and_unknown_ones_do_not_exist(machine: str) -> None:
    refused = seccomp.refused_numbers(machine)
    assert not ALLOWED & set(refused)
    assert {_decide(machine, name) for name in refused} == {errno.EPERM}
    for name in ("clone3", "a_call_of_tomorrow"):
        assert _decide(machine, name) == errno.ENOSYS
    assert {_decide(machine, name) for name in ALLOWED} == {ALLOW}


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize(
    "high", [0, 1 << 32, WORD << 32], ids=["plain", "a bit above", "all above"]
)
def test_arguments_decide_as_in_the_filter(machine: str, high: int) -> None:
    for request in seccomp.TERMINAL_INPUT:
        assert _decide(machine, "ioctl", 0, request | high) == errno.EPERM
    for request in (0, 0x5401, 0x5411, 0x5413, 0x541B, 0x541D, WORD):
        assert _decide(machine, "ioctl", 0, request | high) == ALLOW
    for bit in range(32):
        wanted = errno.EPERM if seccomp.NAMESPACE_FLAGS >> bit & 1 else ALLOW
        assert _decide(machine, "clone", 1 << bit) == wanted
    for family, protocol, wanted in (
        (1, 0, ALLOW), (2, 17, ALLOW), (10, 0, ALLOW), (16, 0, ALLOW),
        (16, 9, errno.ENOSYS), (17, 0, errno.ENOSYS), (40, 0, errno.ENOSYS),
    ):  # fmt: skip
        assert _decide(machine, "socket", family | high, 1, protocol | high) == wanted
    assert _decide(machine, "personality", 0 | high) == ALLOW
    assert _decide(machine, "personality", 0x0040000 | high) == errno.ENOSYS


def _told(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "root": "/r", "binds": [Bind("/a", "/b"), Bind("/c", "/d", writable=True, deep=True)],
        "argv": ["true"], "environment": {"A": "b"}, "user": 1000, "masks": ["/proc/keys"],
        "directory": "/workspace", "seccomp": profile("x86_64"), **changes,
    }  # fmt: skip
    return json.loads(specification(Container(**given)))  # type: ignore[no-any-return]


def test_a_specification_gives_nothing_away() -> None:
    told = _told()
    process = told["process"]
    assert process["noNewPrivileges"]
    assert process["cwd"] == "/workspace"
    assert set(map(tuple, process["capabilities"].values())) == {()}
    assert told["root"]["readonly"]
    kinds = {one["type"] for one in told["linux"]["namespaces"]}
    assert kinds == {"pid", "mount", "ipc", "uts", "network", "cgroup"}
    binds = {m["destination"]: m["options"] for m in told["mounts"] if m["type"] == "bind"}
    assert binds["/b"] == ["rbind", "ro", "nosuid", "nodev"]
    assert binds["/d"] == ["rbind", "rw", "nosuid", "nodev"]


def test_what_json_cannot_carry_is_refused() -> None:
    for words in ({"argv": ["\udcff"]}, {"environment": {"A": "\udcff"}}):
        with pytest.raises(ToolRefused, match="not UTF-8"):
            _told(**words)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("runsc version 0.0~20221219.0", "too old"),
        ("runsc version release-20231211.0", "too old"),
        ("runsc version release-20240102.0", ""),
        ("runsc version release-20261020.0", ""),
        ("", "no date"),
    ],
)
def test_an_old_gvisor_is_not_used(version: str, said: str) -> None:
    problem = oci_runtimes.age_problem(version)
    assert said in problem if said else not problem


def test_the_reporter_of_containers_differs_by_its_descriptor_alone() -> None:
    plain = reporter.program("x86_64")
    for number in reporter.CONTAINER_DESCRIPTORS:
        told = reporter.container_program("x86_64", number)
        prefix = bytes.fromhex(reporter._ENDS_WITH_PARENT["x86_64"])
        code, start = told[120:], len(prefix)
        assert code[:start] == prefix
        assert len(code) - start == len(plain) - 120
        changed = [a for a, b in zip(code[start:], plain[120:], strict=True) if a != b]
        assert changed == [number, number]
    assert reporter.container_program("riscv64", 3) == b""
