"""Attack programs, each run twice: the naive way, where it succeeds, and in a box, where it fails.

Survivors sleep ``MARK`` seconds, by which they are found. Every program is bounded by itself or by
its test: run without a defence it must not harm the host.
"""

from support.sandbox import MARK

Command = tuple[str, ...]


def shell(script: str) -> Command:
    return ("sh", "-c", script)


def python(script: str) -> Command:
    return ("python", "-c", script)


BACKGROUND_CHILD = shell(f"(sleep {MARK}; echo late) & echo now")
TWICE_FORKED = shell(f"setsid sh -c 'setsid sleep {MARK} & exit' & sleep 0.2; exit 0")
IGNORES_TERM = shell(f"trap '' TERM INT HUP; sleep {MARK}")
STOPS_ITSELF = shell(f"sleep {MARK} & kill -STOP $! $$; sleep {MARK}")
KILLS_EVERYTHING = python(
    "import os, signal, subprocess, time\n"
    "if os.getuid() == 0: raise SystemExit('never as root')\n"
    f"subprocess.Popen(['sleep', '{MARK}'])\n"
    "os.kill(-1, signal.SIGKILL)\nprint('killed', flush=True)\ntime.sleep(1000)"
)
HOG_MEBIBYTES = 256
HOG = f'x = []\nfor _ in range({HOG_MEBIBYTES}): x.append(bytearray(1 << 20))\nprint("had it all")'
HOG_IN_A_CHILD = shell(f"python -c '{HOG}'; exit 0")
SPIN = "while True: pass"
REFORK = """
import os, time
while True:
    child = os.fork()
    if child == 0:
        while time.process_time() < 0.2: pass
        os._exit(0)
    os.waitpid(child, 0)
"""
BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
SHELL_BOMB = shell("b() { b | b & }; b; sleep 1000")
FLOODS = {
    "lines": shell("yes"),
    "binary": shell("cat /dev/urandom"),
    "stderr": shell("yes >&2"),
    "no newline": shell("head -c 100000000 /dev/zero"),
}
EVERY_BYTE = python(
    "import sys\n"
    "every = bytes(range(256))\n"
    "sys.stdout.buffer.write(every + b'\\xed\\xa0\\x80' + b'\\x1b[31m' + b'\\xe2\\x82')"
)
EVERY_BYTE_WRITES = bytes(range(256)) + b"\xed\xa0\x80\x1b[31m\xe2\x82"
PARTIAL_OUTPUT = shell(f"echo first; echo second >&2; sleep {MARK}")
WANTS_STDIN = shell("cat; echo done")
NEVER_READS = ("echo", "done")

WRITE_BACK = """
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory"):
    try:
        with open(path, "r+b", buffering=0) as file: file.write(file.read())
        print("possible")
    except OSError:
        print("refused")
"""
ENVIRONMENTS = """
import os
for entry in os.listdir("/proc"):
    if entry.isdigit():
        for name in ("environ", "cmdline"):
            try: print(open(f"/proc/{entry}/{name}", "rb").read())
            except OSError: pass
"""


def both_streams(size: int) -> Command:
    """Write ``size`` bytes to each stream at the same time."""
    return python(f"""
import sys, threading
def write(stream, letter):
    data = b"".join(b"%s%07d" % (letter, n) for n in range({size} // 8 + 1))[:{size}]
    stream.buffer.write(data); stream.flush()
other = threading.Thread(target=write, args=(sys.stderr, b"e"))
other.start(); write(sys.stdout, b"o"); other.join()
""")


def whole_stream(letter: bytes, size: int) -> bytes:
    """Return what ``both_streams`` writes to one of them."""
    return b"".join(b"%s%07d" % (letter, n) for n in range(size // 8 + 1))[:size]
