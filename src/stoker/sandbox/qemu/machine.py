"""One emulator process: how it is started, confined, spoken to and ended.

It runs under bubblewrap as a leased uid (or the user's own), in namespaces of its own with no
network and of the host's files only ``/usr``, a disk and its memory; its own filter lets it start
nothing. Memory comes as a descriptor: the guest that is booted writes to it, a fork maps it
privately, so that pages are shared until they are written. What it says is not believed: only the
link to the runner is listened to, and the state it migrates.
"""

import asyncio
import contextlib
import json
import os
import resource
import socket
from collections.abc import Sequence
from enum import StrEnum

from stoker.errors import BoxFailed
from stoker.sandbox import kernel
from stoker.sandbox.cgroups import Group
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.maker_client import Started
from stoker.sandbox.making import WorkOrder
from stoker.sandbox.qemu.image import PORT_NAME, GuestFiles
from stoker.sandbox.qemu.parts import Parts
from stoker.sandbox.qemu.ticks import kilohertz
from stoker.sandbox.vm.link import GuestLink

OVERHEAD_BYTES = 256 * 1024 * 1024
"""What the emulator needs beside its guest's memory, its translated code included."""
_OPTIONS_AT, _LINK_AT, _CONTROL_AT, _MEMORY_AT = 3, 4, 5, 6
_DESCRIPTORS_MAX = 256
_SAID_BYTES_MAX = 64 * 1024
_TRANSLATED_MEBIBYTES = 64
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_ON_MACHINE = "microvm,acpi=on,pit=off,pic=off,rtc=off,isa-serial=on,memory-backend=memory"
_KERNEL_LINE = (
    "console=ttyS0 quiet panic=-1 reboot=t mitigations=off nokaslr random.trust_cpu=on "
    "cgroup_no_v1=all "
)
_EMULATED_LINE = "tsc=reliable no_timer_check tsc_early_khz="
"""An emulated machine has no clock by which the kernel could find the speed of another."""
_SHARED_KEPT = {"capability": "x-ignore-shared", "state": True}


class Start(StrEnum):
    """What an emulator does with its memory."""

    BOOT = "boot"
    """Starts a kernel, and writes to it."""
    CHANGE = "change"
    """Waits for a state to be told, and writes to it."""
    FORK = "fork"
    """Waits for a state to be told, and maps it privately."""


class Machine:
    """A running emulator and the link to its guest's runner."""

    def __init__(
        self,
        started: Started,
        link: GuestLink,
        control: socket.socket,
        said: int,
        host: SandboxHost,
    ) -> None:
        self.link = link
        self._started = started
        self._control = control
        self._said = said
        self._host = host

    def complaint(self) -> str:
        """Return what the emulator or the guest's kernel said last."""
        with contextlib.suppress(OSError):
            os.set_blocking(self._said, False)
            return os.read(self._said, _SAID_BYTES_MAX).decode(errors="replace").strip()[-500:]
        return ""

    def tell(self, *commands: tuple[str, dict[str, object]], passing: int) -> None:
        """Give orders to the emulator, the descriptor ``passing`` with them as ``state``."""
        given = [("qmp_capabilities", {}), ("getfd", {"fdname": "state"}), *commands]
        text = "".join(json.dumps({"execute": n, "arguments": a}) + "\n" for n, a in given)
        with contextlib.suppress(OSError):  # it is gone; whoever waits for its guest hears that
            socket.send_fds(self._control, [text.encode()], [passing])

    async def end(self) -> None:
        """Kill it and wait until it is dead. Safe to repeat."""
        self.link.close()
        self._control.close()
        with contextlib.suppress(BoxFailed):  # a maker that died has taken it along
            await self._host.maker().kill(self._started)
            await asyncio.wait([self._started.exited])
        if self._said >= 0:
            os.close(self._said)
            self._said = -1


def migrating(name: str) -> tuple[tuple[str, dict[str, object]], ...]:
    """Return the orders for ``migrate`` or ``migrate-incoming``, which leave shared memory out."""
    return (
        ("migrate-set-capabilities", {"capabilities": [_SHARED_KEPT]}),
        (name, {"uri": "fd:state"}),
    )


async def start(
    host: SandboxHost,
    parts: Parts,
    files: GuestFiles,
    memory: int,
    *,
    how: Start,
    uid: int | None,
    group: Group | None,
) -> Machine:
    """Start an emulator on the memory of descriptor ``memory``, which stays the caller's.

    Raises:
        BoxFailed: it could not be started.
    """
    size = os.fstat(memory).st_size
    ours, theirs = socket.socketpair()
    control, their_control = socket.socketpair()
    said, their_said = os.pipe2(os.O_CLOEXEC)
    options = kernel.memory_file("options", b"".join(map(_ended, _view(files, parts))))
    joins = group.join_descriptors() if group is not None else []
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    passed = [options, theirs.fileno(), their_control.fileno(), memory]
    command = [str(host.runtime.launcher), "--args", str(_OPTIONS_AT), "--", parts.emulator]
    order = WorkOrder(
        argv=[os.fsencode(a) for a in (*command, *_arguments(parts, size, how))],
        rlimits={
            resource.RLIMIT_CORE: (0, 0),
            resource.RLIMIT_NOFILE: (_DESCRIPTORS_MAX, _DESCRIPTORS_MAX),
        },
        cgroups=len(joins),
        targets=[_OPTIONS_AT, _LINK_AT, _CONTROL_AT, _MEMORY_AT],
        identity=uid,
        refuse_root=uid is not None,
    )
    try:
        started = await host.maker().spawn(
            order, [nothing, their_said, their_said], [*joins, *passed]
        )
    except BaseException:
        for end in (ours, control):
            end.close()
        os.close(said)
        raise
    finally:
        for descriptor in (options, nothing, their_said, *joins):
            os.close(descriptor)
        theirs.close()
        their_control.close()
    control.setblocking(False)
    return Machine(started, GuestLink(ours), control, said, host)


def _view(files: GuestFiles, parts: Parts) -> Sequence[str]:
    """Return the launcher's options: what the emulator sees of the host."""
    options = [
        "--unshare-all", "--die-with-parent", "--new-session", "--hostname", "vmm", "--clearenv",
        "--setenv", "PATH", "/usr/bin:/bin", "--ro-bind", "/usr", "/usr",
        "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
        "--symlink", "usr/bin", "/bin", "--dev", "/dev", "--proc", "/proc",
        "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
        "--ro-bind-try", "/etc/alternatives", "/etc/alternatives",
        "--ro-bind", files.disk, "/guest/disk", "--ro-bind", files.kernel, "/guest/kernel",
        "--ro-bind", files.initial, "/guest/initial",
    ]  # fmt: skip
    if parts.accelerator == "kvm":
        options += ["--dev-bind", "/dev/kvm", "/dev/kvm"]
    return [*options, "--remount-ro", "/", "--chdir", "/"]


def _arguments(parts: Parts, size: int, how: Start) -> Sequence[str]:
    emulated = parts.accelerator == "tcg"
    accelerator = f"tcg,tb-size={_TRANSLATED_MEBIBYTES}" if emulated else "kvm"
    shared = "off" if how is Start.FORK else "on"
    memory = f"memory-backend-file,id=memory,size={size},mem-path=/proc/self/fd/{_MEMORY_AT}"
    given = [
        "-M", _ON_MACHINE, "-accel", accelerator, "-cpu", "max" if emulated else "host",
        "-m", f"{size}b", "-smp", "1", "-object", f"{memory},share={shared}",
        "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-sandbox", _SANDBOX,
        "-drive", "file=/guest/disk,format=raw,if=none,id=disk,read-only=on,file.locking=off",
        "-device", "virtio-blk-device,drive=disk", "-device", "virtio-serial-device",
        "-chardev", f"socket,id=link,fd={_LINK_AT}",
        "-device", f"virtserialport,chardev=link,name={PORT_NAME}",
        "-chardev", f"socket,id=control,fd={_CONTROL_AT}", "-mon", "chardev=control,mode=control",
    ]  # fmt: skip
    if how is Start.BOOT:
        line = _KERNEL_LINE + (f"{_EMULATED_LINE}{kilohertz()}" if emulated else "")
        return [*given, "-kernel", "/guest/kernel", "-initrd", "/guest/initial", "-append", line,
                "-serial", "stdio"]  # fmt: skip
    return [*given, "-serial", "null", "-incoming", "defer"]


def _ended(option: str) -> bytes:
    return os.fsencode(option) + b"\0"
