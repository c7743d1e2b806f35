"""The system-call filter as OCI runtimes take it: by name, for libseccomp to translate.

The same list as ``seccomp``: what that allows by number is allowed here by name, what it refuses
answers EPERM, and everything else ENOSYS. So a name that a runtime's libseccomp does not know is a
call that cannot be made, never one that slipped through. A test translates every name back and
compares the numbers. Calls of another ABI end the process, since only one is named.

Sockets and personalities that are not allowed answer ENOSYS here, since OCI's conditions cannot
say "everything but these" with another answer.
"""

import errno
import functools
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from stoker.sandbox import seccomp

ALLOWED = frozenset(
    """
    accept accept4 access adjtimex afs_syscall alarm arch_prctl bind brk cachestat capget capset
    chdir chmod chown clock_getres clock_gettime clock_nanosleep close close_range connect
    copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old
    epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 execve execveat exit
    exit_group faccessat faccessat2 fadvise64 fallocate fanotify_mark fchdir fchmod fchmodat
    fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr
    fsetxattr fstat fstatfs fsync ftruncate futex futex_requeue futex_wait futex_waitv
    futex_wake futimesat get_robust_list get_thread_area getcpu getcwd getdents getdents64
    getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getpmsg
    getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname
    getsockopt gettid gettimeofday getuid getxattr getxattrat inotify_add_watch inotify_init
    inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_setup
    io_submit ioprio_get ioprio_set kill landlock_add_rule landlock_create_ruleset
    landlock_restrict_self lchown lgetxattr link linkat listen listxattr listxattrat llistxattr
    lremovexattr lseek lsetxattr lstat madvise map_shadow_stack membarrier memfd_create mincore
    mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect mq_getsetattr mq_notify
    mq_open mq_timedreceive mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd
    msync munlock munlockall munmap nanosleep newfstatat open openat openat2 pause pidfd_open
    pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll prctl pread64
    preadv preadv2 prlimit64 process_mrelease pselect6 putpmsg pwrite64 pwritev pwritev2 read
    readahead readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr
    removexattrat rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction
    rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
    rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity
    sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity
    sched_setattr sched_setparam sched_setscheduler sched_yield seccomp security select semctl
    semget semop semtimedop sendfile sendmmsg sendmsg sendto set_robust_list set_thread_area
    set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid setpriority setregid
    setresgid setresuid setreuid setrlimit setsid setsockopt setuid setxattr setxattrat shmat
    shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 socketpair splice stat statfs
    statx symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create
    timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime
    timerfd_settime times tkill truncate tuxcall umask uname unlink unlinkat utime utimensat
    utimes vfork vmsplice vserver wait4 waitid write writev
    """.split()  # noqa: SIM905 - three hundred words
)
"""Of both machines; runtimes pass over what theirs has not."""
_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
_WORD = 0xFFFFFFFF
"""The kernel reads these arguments as 32 bits; comparing all 64 would let a set high bit pass."""
_NAMESPACE_BITS = tuple(1 << bit for bit in range(32) if seccomp.NAMESPACE_FLAGS >> bit & 1)
_Rule = dict[str, Any]


@functools.cache
def profile(machine: str) -> _Rule:
    """Return ``linux.seccomp`` of a specification for ``machine``; not to be changed."""
    refused = sorted({*seccomp.refused_numbers(machine)})
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "architectures": [_ARCHITECTURES[machine]],
        "syscalls": [
            _allow(sorted(ALLOWED)),
            _refuse(refused),
            _allow(["clone"], _equal(0, 0, under=seccomp.NAMESPACE_FLAGS)),
            *(_refuse(["clone"], _equal(0, bit, under=bit)) for bit in _NAMESPACE_BITS),
            *(_allow(["ioctl"], one) for one in _all_but(1, seccomp.TERMINAL_INPUT)),
            *(
                _refuse(["ioctl"], _equal(1, value, under=_WORD))
                for value in seccomp.TERMINAL_INPUT
            ),
            *(_allow(["personality"], _equal(0, v, under=_WORD)) for v in seccomp.PERSONALITIES),
            *(_allow(["socket"], _equal(0, int(f), under=_WORD)) for f in seccomp.SOCKET_FAMILIES),
            _allow(
                ["socket"],
                _equal(0, int(socket.AF_NETLINK), under=_WORD),
                _equal(2, seccomp.NETLINK_ROUTE, under=_WORD),
            ),
        ],
    }


def _allow(names: list[str], *conditions: _Rule) -> _Rule:
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": list(conditions)}


def _refuse(names: list[str], *conditions: _Rule) -> _Rule:
    rule = {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}
    return {**rule, "args": list(conditions)}


def _equal(index: int, value: int, *, under: int) -> _Rule:
    """Return the condition that an argument's bits in ``under`` are ``value``."""
    return {"index": index, "value": under, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _all_but(index: int, values: Iterable[int]) -> Iterator[_Rule]:
    """Yield conditions one of which holds for every 32-bit value but ``values``.

    There is no "none of these": so for each place at which a value can first differ, one rule.
    """
    heads = {0}
    for bit in reversed(range(32)):
        step = 1 << bit
        upper = _WORD & ~(step - 1)
        kept = {value & upper for value in values}
        for head in sorted(heads):
            for longer in (head, head | step):
                if longer not in kept:
                    yield _equal(index, longer, under=upper)
        heads = kept
