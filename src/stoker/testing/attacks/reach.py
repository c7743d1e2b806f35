"""Reaching what is outside the box: the network, the host's files, processes and settings.

CASES A15, A16, A18.
"""

from stoker.testing.attacks.attack import Attack, Off

_NETWORK = {
    "a port of the host": "tried(lambda: socket.create_connection(('127.0.0.1', P['tcp']), 5))",
    "a port of the host over IPv6": (
        "tried(lambda: socket.create_connection(('::1', P['tcp6']), 5))"
    ),
    "a datagram to the host": (
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)\n"
        "tried(lambda: (s.sendto(b'hello', ('127.0.0.1', P['udp'])), s.recv(9) == b'hello')[1])"
    ),
    "an abstract socket of the host": (
        "tried(lambda: socket.socket(socket.AF_UNIX).connect('\\0' + P['abstract']))"
    ),
    "which ports the host listens on": ("say(('%04X' % P['tcp']) in open('/proc/net/tcp').read())"),
    "which abstract sockets the host has": "say(P['abstract'] in open('/proc/net/unix').read())",
    "the host's network itself": "say(os.readlink('/proc/self/ns/net') == P['network'])",
}
_SETTINGS = ("kernel/core_pattern", "kernel/modprobe", "vm/overcommit_memory", "fs/file-max")
_MASKED = ("keys", "key-users", "kallsyms", "config.gz", "timer_list", "vmallocinfo")
_OUTSIDE = {
    "a readable file of the host": "tried(lambda: P['secret'] in open(P['file']).read())",
    "a file in the host's /tmp": "say(os.path.exists(P['tmp']))",
    "the host's processes": "say(os.path.exists(f\"/proc/{P['process']}\"))",
    "the host's arguments": (
        "found = False\n"
        "for p in os.listdir('/proc'):\n"
        "    try: found |= P['name'][::-1] in open(f'/proc/{p}/cmdline').read()\n"
        "    except OSError: pass\n"
        "say(found)"
    ),
    "an environment that was handed down": "say(P['secret'] in os.environ.get('SECRET', ''))",
    "a descriptor that was handed down": (
        "tried(lambda: P['secret'].encode() in os.pread(P['descriptor'], 99, 0))"
    ),
    "ending a process of the host": "tried(lambda: os.kill(P['process'], 0))",
    "a unix socket in a directory": (
        "tried(lambda: socket.socket(socket.AF_UNIX).connect(P['socket']))"
    ),
    "memory shared under a key": "say(libc.shmget(P['shared'], 0, 0) >= 0)",
    "the host's name": "say(socket.gethostname() == P['host'])",
    "privileges by way of a setuid program": (
        "say('NoNewPrivs:\\t0' in open('/proc/self/status').read())"
    ),
    "directories of the host": (
        "say(any(os.path.exists(p) for p in ('/root', '/home', '/var/lib')))"
    ),
    "writing outside the workspace": (
        "path = P['writable'] + '/planted'\ntried(lambda: open(path, 'w').close())"
    ),
    "the host's devices": "say(len(os.listdir('/dev')) > 20)",
    "the host's control groups": "say(os.path.isdir('/sys/fs/cgroup'))",
    "who else is on the host": "say(open('/etc/passwd').read().count('\\n') > 5)",
}

REACH = (
    *(
        Attack(name=name, case="A15", off=Off.NETWORK, program=program)
        for name, program in _NETWORK.items()
    ),
    *(
        Attack(
            name=f"changing {setting}",
            case="A16",
            off=Off.UID,
            program=(
                f"def same():\n"
                f"    with open('/proc/sys/{setting}', 'r+b', buffering=0) as f:\n"
                f"        f.write(f.read())\n"
                f"tried(same)"
            ),
        )
        for setting in _SETTINGS
    ),
    *(
        Attack(
            name=f"reading /proc/{name}",
            case="A16",
            off=Off.MASKS,
            program=f"tried(lambda: open('/proc/{name}', 'rb').read(64) != b'')",
        )
        for name in _MASKED
    ),
    *(
        Attack(name=name, case="A16", off=Off.EVERYTHING, program=program)
        for name, program in _OUTSIDE.items()
    ),
)
