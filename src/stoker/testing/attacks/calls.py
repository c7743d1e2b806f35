"""System calls that a box has no business with (CASES A16, A27); numbers are those of x86_64.

Many need a privilege that a user namespace of one's own gives: those begin with ``alone``.
"""

from stoker.testing.attacks.attack import Attack, Off

_NEWNS, _NEWUTS, _NEWIPC, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x40000000
_CALLS = {
    "rings of io_uring": "say(call(425, 8, ctypes.create_string_buffer(256)) >= 0)",
    "faults handled in user space": "say(call(323, 1) >= 0)",
    "a key in a keyring": "say(call(248, b'user', b'name', b'value', 5, -2) >= 0)",
    "the session's keyring": "say(call(250, 0, -3, 1) >= 0)",
    "a file handle": (
        "b = ctypes.create_string_buffer(struct.pack('Ii', 128, 0), 256)\n"
        "say(call(303, -100, b'/usr', b, ctypes.byref(ctypes.c_int()), 0) >= 0)"
    ),
    "being traced": "say(call(101, 0, 0, 0, 0) >= 0)",
    "tracing a child": (
        "child = os.fork()\n"
        "if child == 0: time.sleep(5); os._exit(0)\n"
        "got = call(101, 16, child, 0, 0); os.kill(child, 9); say(got >= 0)"
    ),
    "comparing kernel objects": "say(call(312, os.getpid(), os.getpid(), 0, 0, 1) >= 0)",
    "reading another process's memory": (
        "b = ctypes.create_string_buffer(8); v = struct.pack('QQ', ctypes.addressof(b), 8)\n"
        "say(call(310, os.getpid(), v, 1, v, 1, 0) == 8)"
    ),
    "writing another process's memory": (
        "b = ctypes.create_string_buffer(8); v = struct.pack('QQ', ctypes.addressof(b), 8)\n"
        "say(call(311, os.getpid(), v, 1, v, 1, 0) == 8)"
    ),
    "taking another process's descriptor": (
        "say(call(438, os.pidfd_open(os.getpid()), 0, 0) >= 0)"
    ),
    "a socket to the hypervisor": "tried(lambda: socket.socket(40, socket.SOCK_STREAM))",
    "a socket to device events": "tried(lambda: socket.socket(16, 3, 15))",
    "a socket to security decisions": "tried(lambda: socket.socket(16, 3, 7))",
    "memory hidden from the kernel": "say(call(447, 0) >= 0)",
    "a cloned user namespace": (
        "got = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)\n"
        "if got == 0: os._exit(0)\n"
        "say(got > 0)"
    ),
    "a user namespace by clone3": (
        "a = struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0)\n"
        "got = libc.syscall(435, a, len(a))\n"
        "if got == 0: os._exit(0)\n"
        "say(got > 0)"
    ),
    "a user namespace by unshare": "say(alone(0))",
    "where memory lies": "say(call(239, 0, 0, 0, 0, 0) == 0)",
    "moving memory": "say(call(279, 0, 0, 0, 0, 0, 0) == 0)",
    "watching a file system": "say(call(300, 0x200, 0) >= 0)",
    "a descriptor table of the processor's": (
        "say(call(154, 0, ctypes.create_string_buffer(64), 64) >= 0)"
    ),
    "memory that runs whatever it holds": "say(call(135, 0x0400000) >= 0)",
    "the kernel's log": "say(call(103, 10, 0, 0) >= 0)",
    "counts of the processor's": (
        "a = ctypes.create_string_buffer(struct.pack('IIQ', 1, 128, 0), 128)\n"
        "a[40:48] = struct.pack('Q', 1 | 1 << 5 | 1 << 6)\n"
        "say(call(298, a, 0, -1, -1, 0) >= 0)"
    ),
    "statistics of a device": (
        "say(call(136, os.stat('/usr').st_dev, ctypes.create_string_buffer(64)) == 0)"
    ),
    "the list of file systems": "say(call(139, 3, 0, 0) > 0)",
    "the list of mounts": (
        "r = struct.pack('IIQQ', 24, 0, 0xffffffffffffffff, 0)\n"
        "say(call(458, r, ctypes.create_string_buffer(800), 100, 0) >= 0)"
    ),
    "the list of security modules": (
        "n = ctypes.c_uint(800); b = ctypes.create_string_buffer(800)\n"
        "say(call(461, b, ctypes.byref(n), 0) >= 0)"
    ),
    "a mount": f"say(alone({_NEWNS}) and libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0)",
    "an unmount": (
        f"say(alone({_NEWNS}) and libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0\n"
        "    and libc.umount2(b'/tmp', 2) == 0)"
    ),
    "another root": "say(alone(0) and call(161, b'/usr') == 0)",
    "another host name": f"say(alone({_NEWUTS}) and call(170, b'mine', 4) == 0)",
    "entering a namespace": (
        f"say(alone({_NEWNET}) and call(308, os.open('/proc/self/ns/net', 0), 0) == 0)"
    ),
    "raw packets in a network of its own": (
        f"tried(lambda: alone({_NEWNET}) and socket.socket(17, socket.SOCK_RAW, 3) and None)"
    ),
    "a new file system": f"say(alone({_NEWNS}) and call(430, b'tmpfs', 0) >= 0)",
    "changed flags of a mount": (
        f"say(alone({_NEWNS}) and libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0 and\n"
        "    call(442, -100, b'/tmp', 0, struct.pack('QQQQ', 2, 0, 0, 0), 32) == 0)"
    ),
    "calls of the x32 kind": "say(call(0x40000000 | 39) != -errno.ENOSYS or True)",
    "a terminal's input": (
        "import fcntl, pty\n"
        "child, ours = pty.fork()\n"
        "if child == 0:\n"
        "    try: fcntl.ioctl(0, 0x5412, b'x'); os._exit(0)\n"
        "    except OSError: os._exit(1)\n"
        "say(os.waitpid(child, 0)[1] == 0)"
    ),
}

CALLS = tuple(
    Attack(name=name, case="A27", off=Off.FILTER, program=program)
    for name, program in _CALLS.items()
)
