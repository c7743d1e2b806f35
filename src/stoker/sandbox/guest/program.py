"""Between fork and exec: a child of the runner becomes the program of an action."""

import contextlib
import fcntl
import os
import resource
import signal
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from stoker.sandbox import kernel

NOT_STARTED = 127
ERROR_BYTES_MAX = 4096
_PARKED_FROM = 200
_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_LIMITS = {
    "core": resource.RLIMIT_CORE,
    "file": resource.RLIMIT_FSIZE,
    "files": resource.RLIMIT_NOFILE,
    "cpu": resource.RLIMIT_CPU,
}
"""Per-process limits a host may ask for, by the names it uses."""


class Program(NamedTuple):
    """What is to run, and as whom."""

    argv: list[bytes]
    environment: dict[bytes, bytes]
    directory: str
    rlimits: dict[str, tuple[int, int]]
    identity: int | None
    system_calls: bytes
    authorities: list[str]
    """A file, and whom it is to trust beside those that are known; empty: none is made."""


def become(
    program: Program, join: Callable[[], None], descriptors: list[int], errors: int
) -> NoReturn:
    """Turn this forked child into the program, ``descriptors`` being its 0, 1, 2 …."""
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        join()
        _unprotect()
        errors = arrange(descriptors, errors)
        for name, bounds in program.rlimits.items():
            resource.setrlimit(_LIMITS[name], bounds)
        if program.identity is not None:
            os.setgroups([])
            os.setresgid(program.identity, program.identity, program.identity)
            os.setresuid(program.identity, program.identity, program.identity)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of identity clears it
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        os.chdir(program.directory)
        if program.authorities:
            _trust(*program.authorities)
        if program.system_calls:
            kernel.load_seccomp(program.system_calls)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(program.argv[0], program.argv, program.environment)  # noqa: S606 - the ordered program
    except OSError as error:
        os.write(errors, f"{error.errno or 0} {error}".encode()[:ERROR_BYTES_MAX])
    finally:
        os._exit(NOT_STARTED)


def _trust(bundle: str, authority: str) -> None:
    """Write it as the program's user: whatever the box made of the name is the box's."""
    known = b""
    with contextlib.suppress(OSError), open(_AUTHORITIES, "rb") as file:  # noqa: PTH123 - starts fast
        known = file.read()
    with open(bundle, "wb") as out:  # noqa: PTH123 - starts fast
        out.write(known + b"\n" + authority.encode())


def arrange(descriptors: list[int], errors: int) -> int:
    """Let ``descriptors`` be 0, 1, 2 …, and close what else is open; return the new ``errors``."""
    parked = [fcntl.fcntl(d, fcntl.F_DUPFD_CLOEXEC, _PARKED_FROM) for d in descriptors]
    errors = fcntl.fcntl(errors, fcntl.F_DUPFD_CLOEXEC, _PARKED_FROM)
    for number, descriptor in enumerate(parked):
        os.dup2(descriptor, number, inheritable=True)
    os.closerange(len(parked), min([*parked, errors]))
    return errors


def _unprotect() -> None:
    """Be killed for want of memory as any other, which the runner is not."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="ascii") as file,  # noqa: PTH123 - a kernel file
    ):
        file.write("0")
