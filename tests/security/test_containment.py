"""Attackers who want out of the box (CASES A15, A16, A18, A27, A29).

Each attack is first shown to succeed with its defence off, so that a test cannot pass because the
attack itself is broken.
"""

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stoker.errors import BoxFailed
from stoker.model.execution import Baseline, Rung
from stoker.model.tools import RunRequest, RunResult
from stoker.sandbox import runtime
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBox
from stoker.sandbox.making import WorkOrder
from stoker.sandbox.namespace import NamespaceBackend
from stoker.sandbox.starts import Prepared
from support import sandbox
from support.attacks import ENVIRONMENTS, WRITE_BACK
from support.sandbox import BOXED, OWN, attacked, backend_of, needs_root, policy_of

SECRET = b"a-secret-of-the-host"
LIBC = """
import ctypes, errno, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*arguments)
    print("possible" if result >= 0 else errno.errorcode[ctypes.get_errno()])
"""
CALLS = {
    "io_uring_setup": "call(425, 8, ctypes.create_string_buffer(256))",
    "userfaultfd": "call(323, 1)",
    "add_key": "call(248, b'user', b'name', b'value', 5, -2)",
    "name_to_handle_at": "b = ctypes.create_string_buffer(struct.pack('Ii', 128, 0), 256);"
    "call(303, -100, b'/usr', b, ctypes.byref(ctypes.c_int()), 0)",
    "PTRACE_TRACEME": "call(101, 0, 0, 0, 0)",
    "kcmp": "call(312, os.getpid(), os.getpid(), 0, 0, 1)",
    "vsock": """
try:
    socket.socket(40, socket.SOCK_STREAM); print("possible")
except OSError as error:
    print(errno.errorcode[error.errno])""",
    "memfd_secret": "call(447, 0)",
    "clone a user namespace": """
result = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
if result == 0: os._exit(0)
print("possible" if result > 0 else errno.errorcode[ctypes.get_errno()])""",
    "unshare a user namespace": "call(272, 0x10000000)",
}

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers are x86_64's")


class Weakened(NamespaceBackend):
    """A backend whose order is changed by a test."""

    spoil: Callable[[WorkOrder], None] = staticmethod(lambda _: None)

    def prepare(self, box: LocalBox, request: RunRequest, channels: int) -> Prepared:
        prepared = super().prepare(box, request, channels)
        self.spoil(prepared.order)
        return prepared


def ran(
    state: Path,
    *argv: str,
    weaken: Callable[[Weakened], None] = lambda _: None,
) -> RunResult:
    """Run in a rung (a) box, with a defence switched off by ``weaken``."""

    async def body() -> RunResult:
        async with SandboxHost.open(state) as host:
            backend = Weakened(host)
            weaken(backend)
            box = await backend.create("box_out", Baseline(), policy_of(Rung.ROOT))
            # A box that was weakened to another uid can still enter.
            (box.directory / "workspace").chmod(0o777)
            try:
                return (await box.run(RunRequest(argv=argv), timeout_seconds=30)).result
            finally:
                await box.destroy()

    return sandbox.run(body)


def without_filter(backend: Weakened) -> None:
    backend.defences.seccomp = False
    backend.defences.disable_user_namespaces = False


@pytest.mark.parametrize("rung", OWN)
@pytest.mark.parametrize("name", CALLS)
def test_a27_refused_system_calls(tmp_path: Path, rung: Rung, name: str) -> None:
    script = LIBC + CALLS[name]
    off = ran(tmp_path, "python", "-c", script, weaken=without_filter)
    if off.stdout.kept.strip() != b"possible":
        pytest.skip(f"this kernel refuses {name} by itself: {off.text}")
    on = attacked(tmp_path, rung, "python", "-c", script).run.result
    assert on.stdout.kept.strip() in (b"EPERM", SOCKET_REFUSED[rung]), on.text


SOCKET_REFUSED = {Rung.ROOT: b"EAFNOSUPPORT", Rung.RUNC: b"ENOSYS", Rung.CRUN: b"ENOSYS"}
"""What a socket of a family that is not allowed answers (seccomp_profile says why)."""
OTHER_ABIS = {
    "x32": "call(0x40000000 | 39)",
    "i386": """
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # eax = getpid of i386; int 0x80; ret
at = ctypes.addressof(ctypes.c_char.from_buffer(page))
print("possible" if ctypes.CFUNCTYPE(ctypes.c_int)(at)() > 0 else "ENOSYS")""",
}


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", OWN)
@pytest.mark.parametrize("name", OTHER_ABIS)
def test_a27_other_abis_end_the_process(tmp_path: Path, rung: Rung, name: str) -> None:
    script = LIBC + OTHER_ABIS[name]
    off = ran(tmp_path, "python", "-c", script, weaken=without_filter)
    # A kernel built without that ABI says so or kills (i386); the filter must not be what does.
    if off.signal == signal.SIGSEGV:
        pytest.skip(f"this kernel has no {name} system calls")
    assert off.stdout.kept.strip() in (b"possible", b"ENOSYS"), off.text
    assert off.signal is None
    on = attacked(tmp_path, rung, "python", "-c", script).run.result
    assert on.signal == signal.SIGSYS, on.text


CLONE3 = """
arguments = struct.pack("8Q", int(sys.argv[1], 16), 0, 0, 0, 17, 0, 0, 0)
result = libc.syscall(435, arguments, len(arguments))
if result == 0: os._exit(0)
print("possible" if result > 0 else errno.errorcode[ctypes.get_errno()], flush=True)
import threading
t = threading.Thread(target=print, args=("thread",)); t.start(); t.join()
"""


@pytest.mark.parametrize("rung", OWN)
@pytest.mark.parametrize("flags", ["0", "10000000"], ids=["none", "new user namespace"])
def test_a27_clone3_says_it_does_not_exist_and_threads_work(
    tmp_path: Path, rung: Rung, flags: str
) -> None:
    argv = ("python", "-c", LIBC + CLONE3, flags)
    off = ran(tmp_path, *argv, weaken=without_filter)
    assert off.stdout.kept.split() == [b"possible", b"thread"], off.text
    on = attacked(tmp_path, rung, *argv).run.result
    assert on.stdout.kept.split() == [b"ENOSYS", b"thread"], on.text


FAKE_INPUT = """
import fcntl, pty
child, ours = pty.fork()
if child == 0:  # a session of its own, whose terminal this is
    try:
        fcntl.ioctl(0, 0x5412, b"x"); os._exit(0)
    except OSError as error: os._exit(error.errno)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(errno.errorcode[code] if code else "possible")
"""


@pytest.mark.parametrize("rung", OWN)
def test_a27_terminal_input_cannot_be_faked(tmp_path: Path, rung: Rung) -> None:
    argv = ("python", "-c", LIBC + FAKE_INPUT)
    off = ran(tmp_path, *argv, weaken=without_filter)
    if off.stdout.kept.strip() == b"EIO":
        pytest.skip("this kernel refuses TIOCSTI by itself (dev.tty.legacy_tiocsti = 0)")
    assert off.stdout.kept.strip() == b"possible", off.text
    on = attacked(tmp_path, rung, *argv).run.result
    assert on.stdout.kept.strip() == b"EPERM", on.text


@needs_root
@pytest.mark.root
def test_a16_kernel_settings_are_writable_for_a_launcher_that_is_root(tmp_path: Path) -> None:
    def as_root(backend: Weakened) -> None:
        backend.defences.proc_masks = False

        def spoil(order: WorkOrder) -> None:
            order.identity, order.refuse_root = None, False

        backend.spoil = staticmethod(spoil)

    off = ran(tmp_path, "python", "-c", WRITE_BACK, weaken=as_root)
    assert b"possible" in off.stdout.kept, off.text


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", BOXED)
def test_a16_kernel_settings_cannot_be_written(tmp_path: Path, rung: Rung) -> None:
    result = attacked(tmp_path, rung, "python", "-c", WRITE_BACK).run.result
    assert result.stdout.kept.split() == [b"refused", b"refused"]


@needs_root
@pytest.mark.root
def test_a16_the_leased_uid_alone_protects_kernel_settings(tmp_path: Path) -> None:
    def unmasked(backend: Weakened) -> None:
        backend.defences.proc_masks = False
        backend.defences.seccomp = False

    off = ran(tmp_path, "python", "-c", WRITE_BACK, weaken=unmasked)
    assert off.stdout.kept.split() == [b"refused", b"refused"]


@needs_root
@pytest.mark.root
def test_a16_a_box_is_never_started_as_root(tmp_path: Path) -> None:
    def as_root(backend: Weakened) -> None:
        def spoil(order: WorkOrder) -> None:
            order.identity = None

        backend.spoil = staticmethod(spoil)

    with pytest.raises(Exception, match="never started as root"):
        ran(tmp_path, "true", weaken=as_root)


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", OWN)
def test_a16_no_environment_or_argument_of_the_host_is_readable(
    tmp_path: Path, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", SECRET.decode())

    def leaking(backend: Weakened) -> None:
        backend._reporter = False  # as process 1 the reporter hides the launcher's, too

        def spoil(order: WorkOrder) -> None:
            order.environment = {b"SECRET_TOKEN": SECRET}

        backend.spoil = staticmethod(spoil)

    assert SECRET in ran(tmp_path, "python", "-c", ENVIRONMENTS, weaken=leaking).stdout.kept
    seen = attacked(tmp_path, rung, "python", "-c", ENVIRONMENTS).run.result.stdout.kept
    assert SECRET not in seen
    assert os.fsencode(tmp_path) not in seen


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", BOXED)
def test_a16_nothing_of_the_host_is_inherited_or_writable(tmp_path: Path, rung: Rung) -> None:
    script = """
import os
own = os.open("/proc/self/fd", os.O_RDONLY)
print(sorted(int(n) for n in os.listdir(own) if int(n) not in (own, own + 1)))
print(os.getuid(), open("/proc/self/status").read().split("CapEff:")[1].split()[0])
status = open("/proc/self/status").read()
print(status.split("NoNewPrivs:")[1].split()[0], status.split("Seccomp:")[1].split()[0])
print(os.path.exists("/root") or os.path.exists("/home") or os.path.exists("/var/lib"))
print(len([p for p in os.listdir("/proc") if p.isdigit()]) <= 5)
"""
    result = attacked(tmp_path, rung, "python", "-c", script).run.result
    assert result.stdout.kept.decode().splitlines() == [
        "[0, 1, 2]", "1000 0000000000000000", "1 2", "False", "True",
    ], result.text  # fmt: skip


MASKED = "cat /proc/keys /proc/kallsyms /proc/kcore /proc/config.gz 2>/dev/null | head -c 100"


@needs_root
@pytest.mark.root
def test_a16_proc_tells_of_the_kernel_where_it_is_not_masked(tmp_path: Path) -> None:
    def unmasked(backend: Weakened) -> None:
        backend.defences.proc_masks = False

    assert len(ran(tmp_path, "sh", "-c", MASKED, weaken=unmasked).stdout.kept) == 100


@pytest.mark.parametrize("rung", BOXED)
def test_a16_masked_proc_files_say_nothing(tmp_path: Path, rung: Rung) -> None:
    assert attacked(tmp_path, rung, "sh", "-c", MASKED).run.result.stdout.kept == b""


CONNECT = """
import socket, sys
def tried(name, action):
    try:
        action(); print(name, "possible")
    except OSError:
        print(name, "refused")
port = int(sys.argv[1])
tried("loopback", lambda: socket.create_connection(("127.0.0.1", port), 2))
tried("loopback6", lambda: socket.create_connection(("::1", port), 2))
tried("public", lambda: socket.create_connection(("192.0.2.1", 80), 2))
tried("metadata", lambda: socket.create_connection(("169.254.169.254", 80), 2))
tried("dns", lambda: socket.getaddrinfo("example.org", 80))
tried("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
tried("packet", lambda: socket.socket(17, socket.SOCK_RAW, 3))
def abstract():
    peer = socket.socket(socket.AF_UNIX); peer.connect("\\0" + sys.argv[2])
tried("abstract", abstract)
"""


def _listeners(name: str) -> tuple[socket.socket, socket.socket]:
    tcp = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0" + name)
    abstract.listen()
    return tcp, abstract


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", OWN)
def test_a15_with_network_off_nothing_is_reachable(tmp_path: Path, rung: Rung) -> None:
    name = f"stoker-test-{os.getpid()}"
    tcp, abstract = _listeners(name)
    with tcp, abstract:
        argv = ("python", "-c", CONNECT, str(tcp.getsockname()[1]), name)

        def shared(backend: Weakened) -> None:
            backend.defences.network_namespace = False

        off = ran(tmp_path, *argv, weaken=shared).stdout.kept.decode().splitlines()
        assert "loopback possible" in off
        assert "abstract possible" in off
        on = attacked(tmp_path, rung, *argv).run.result
        lines = on.stdout.kept.decode().splitlines()
        assert len(lines) == 8, on.text
        assert all(line.endswith("refused") for line in lines), on.text


def test_a15_an_ordinary_user_s_box_reaches_nothing(tmp_path: Path) -> None:
    name = f"stoker-test-{os.getpid()}"
    tcp, abstract = _listeners(name)
    with tcp, abstract:
        argv = ("python", "-c", CONNECT, str(tcp.getsockname()[1]), name)
        result = attacked(tmp_path, Rung.USER_NAMESPACE, *argv).run.result
        lines = result.stdout.kept.decode().splitlines()
        assert len(lines) == 8, result.text
        assert all(line.endswith("refused") for line in lines), result.text


MEETING_HOST = """
import os, socket, sys, time
s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1]); s.listen()
t = socket.create_server(('127.0.0.1', int(sys.argv[2])))
open('/dev/shm/shared', 'w').write('x'); open('/tmp/shared', 'w').write('x')
open('/workspace/shared', 'w').write('x'); time.sleep(1000)
"""
MEETING_GUEST = """
import os, socket, sys
found = [p for p in ("/dev/shm/shared", "/tmp/shared", "/workspace/shared") if os.path.exists(p)]
port = ("127.0.0.1", int(sys.argv[2]))
for family, address in ((socket.AF_UNIX, "\\0" + sys.argv[1]), (socket.AF_INET, port)):
    try:
        socket.socket(family).connect(address); found.append(family.name)
    except OSError: pass
own = {1, os.getpid(), os.getppid()}
found += ["processes" for p in os.listdir("/proc") if p.isdigit() and int(p) not in own][:1]
print(found)
"""


def _met(state: Path, rung: Rung, *, apart: bool) -> bytes:
    """Return what a second program finds of a first one: in a box of its own, or in the same."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        where = (f"box-meeting-{os.getpid()}", str(probe.getsockname()[1]))

    async def body() -> RunResult:
        async with SandboxHost.open(state) as host:
            backend = backend_of(host, rung)
            if not apart:
                assert isinstance(backend, NamespaceBackend)
                backend.defences.network_namespace = backend.defences.pid_namespace = False
            policy = policy_of(Rung.ROOT)
            boxes = [await backend.create(f"box_{n}", Baseline(), policy) for n in (1, 2)]
            assert boxes[0].record.uid != boxes[1].record.uid
            host_argv = ("python", "-c", MEETING_HOST, *where)
            holding = asyncio.ensure_future(
                boxes[0].run(RunRequest(argv=host_argv), timeout_seconds=60)
            )
            while not (boxes[0].directory / "workspace" / "shared").exists():
                assert not holding.done(), holding.result().result.text
                await asyncio.sleep(0.01)
            guest = RunRequest(argv=("python", "-c", MEETING_GUEST, *where))
            seen = await boxes[apart].run(guest, timeout_seconds=30)
            assert not (apart and holding.done())
            # In the same box its end is the end of both, so there it may have been killed.
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await backend.close()
            assert host.leaked() == 0
            return seen.result

    result = sandbox.run(body)
    assert result.ok, result.text
    return result.stdout.kept


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", OWN)
def test_a18_two_boxes_see_nothing_of_each_other(tmp_path: Path, rung: Rung) -> None:
    everything = b"['/dev/shm/shared', '/tmp/shared', '/workspace/shared', 'AF_UNIX', 'AF_INET', "
    assert _met(tmp_path, Rung.ROOT, apart=False) == everything + b"'processes']\n"
    assert _met(tmp_path, rung, apart=True) == b"[]\n"


def test_a29_an_ordinary_user_gets_the_strongest_rung_that_holds() -> None:
    script = """
import asyncio, sys
from pathlib import Path
from stoker.model.execution import ExecutionPolicy
from stoker.sandbox import runtime
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.select import choose_backend
async def main():
    async with SandboxHost.open(Path(sys.argv[1])) as host:
        backend = await choose_backend(ExecutionPolicy(accept_shared_kernel=True), host)
        offer = await backend.offer()
        levels = {s.limit: s.level for s in offer.strengths}
        print(offer.rung.value, levels["memory"], levels["network"], host.leaked())
asyncio.run(main())
"""
    assert sandbox.ordinary_output(script).decode().strip() == "c best effort enforced 0"


BLOCKED_HOST = ("--dev-bind", "/", "/", "--unshare-user", "--disable-userns", "--")


def test_a29_a_host_that_blocks_user_namespaces_is_refused_with_a_remedy() -> None:
    script = """
import asyncio, sys
from pathlib import Path
from stoker.errors import IsolationUnavailable
from stoker.model.execution import ExecutionPolicy, Trust
from stoker.sandbox import runtime
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.select import choose_backend
async def main():
    async with SandboxHost.open(Path(sys.argv[1])) as host:
        try:
            await choose_backend(ExecutionPolicy(accept_shared_kernel=True), host)
        except IsolationUnavailable as error:
            print(error)
        trusted = await choose_backend(ExecutionPolicy(trust=Trust.TRUSTED), host)
        print((await trusted.offer()).rung.value)
asyncio.run(main())
"""
    launcher = runtime.prepare().launcher
    assert launcher is not None
    said = sandbox.ordinary_output(script, prefix=(str(launcher), *BLOCKED_HOST)).decode()
    refusal, rung = said.strip().splitlines()
    assert "To get it:" in refusal
    assert "rung c" in refusal
    assert rung in ("d", "process")


@needs_root
@pytest.mark.root
def test_a29_a_checkout_in_a_0700_home_works(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    request = RunRequest(argv=("python", "-c", "print(1)"))

    async def body() -> RunResult:
        async with SandboxHost.open(home / "state") as host:
            copied = host.runtime
            assert copied.launcher is not None
            bundle = copied.launcher.parent.parent.parent
            shutil.copytree(bundle, home / "launcher")
            inside = home / "launcher" / copied.launcher.relative_to(bundle)
            backend = backend_of(host, Rung.ROOT)
            box = await backend.create("box_home", Baseline(), policy_of(Rung.ROOT))
            # Off: what lies in the home itself is out of the leased uid's reach.
            for home_files in ({"launcher": inside}, {"python": home}):
                host.runtime = msgspec.structs.replace(copied, **home_files)
                with pytest.raises(BoxFailed, match="Permission denied"):
                    await box.run(request, timeout_seconds=30)
            host.runtime = copied
            try:
                return (await box.run(request, timeout_seconds=30)).result
            finally:
                await backend.close()
                assert host.leaked() == 0

    result = sandbox.run(body)
    assert result.stdout.kept == b"1\n", result.text
