"""Taking more than a box's share (CASES A3 to A8), and outliving it (A1, A2).

With the limits off each gets what it wants and says so; in a box it is held or ended first.
"""

import msgspec

from stoker.model.execution import Limits
from stoker.testing.attacks.attack import TIGHT, Attack, Off

_SHORT = msgspec.structs.replace(TIGHT, cpu_seconds=0.6)
_WAIT_SECONDS = 1.0
"""Less than what is waited; with the limits off ten times that, and more."""
_FILL = """
done = 0
for n in range(24):
    with open(f"{place}/{n}", "wb") as f: done += f.write(bytes(1 << 20))
say(done == 24 << 20)
"""
_MEMORY = {
    "memory": "x = [bytearray(1 << 20) for _ in range(200)]; say(True)",
    "memory of a child whose parent ends well": (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    x = [bytearray(1 << 20) for _ in range(200)]; say(True); os._exit(0)\n"
        "os.waitpid(child, 0); sys.exit(0)"
    ),
    "memory of many children together": (
        "children = []\n"
        "for _ in range(8):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        x = bytearray(24 << 20); time.sleep(1.5); os._exit(0)\n"
        "    children.append(child)\n"
        "say(all(os.waitpid(c, 0)[1] == 0 for c in children))"
    ),
    "memory by mapping": (
        "import mmap\n"
        "m = mmap.mmap(-1, 200 << 20)\n"
        "for at in range(0, 200 << 20, 4096): m[at] = 1\n"
        "say(True)"
    ),
}
_PROCESSES = {
    "processes": (
        "made = 0\n"
        "try:\n"
        "    for _ in range(120):\n"
        "        if os.fork() == 0: time.sleep(3); os._exit(0)\n"
        "        made += 1\n"
        "except OSError: pass\n"
        "say(made == 120)"
    ),
    "threads": (
        "try:\n"
        "    for _ in range(120):\n"
        "        threading.Thread(target=time.sleep, args=(3,), daemon=True).start()\n"
        "    say(True)\n"
        "except RuntimeError: say(False)"
    ),
    "processes of a shell": (
        "script = 'n=0; for i in $(seq 120); do sleep 2 & n=$((n+1)); done; echo $n'\n"
        "r = subprocess.run(['sh', '-c', script], stdout=subprocess.PIPE)\n"
        "say(r.stdout.split()[:1] == [b'120'])"
    ),
}
_DISK = {
    "the workspace": _FILL.replace("{place}", "."),
    "/tmp": _FILL.replace("{place}", "/tmp"),  # noqa: S108 - a path inside
    "/dev/shm": _FILL.replace("{place}", "/dev/shm"),  # noqa: S108 - a path inside
    "one large file": (
        "with open('f', 'wb') as f:\n    for _ in range(24): f.write(bytes(1 << 20))\nsay(True)"
    ),
    "many empty files": ("for n in range(3000): open(f'f{n}', 'w').close()\nsay(True)"),
    "many directories": ("for n in range(3000): os.mkdir(f'd{n}')\nsay(True)"),
    "many links": ("for n in range(3000): os.symlink('x', f'l{n}')\nsay(True)"),
    "a deleted file that is held open": (
        "f = open('f', 'wb'); os.unlink('f')\n"
        "for _ in range(24): f.write(bytes(1 << 20))\n"
        "f.flush(); say(True)"
    ),
    "a file reserved at once": "os.posix_fallocate(os.open('f', 66), 0, 24 << 20); say(True)",
}
_TIME = {
    "time of the processor": (
        "end = time.process_time() + 2\nwhile time.process_time() < end: pass\nsay(True)"
    ),
    "time of the processor, by forking on": (
        "for _ in range(12):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        while time.process_time() < 0.2: pass\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "say(True)"
    ),
    "time of the processor, by a child": (
        "spin = 'import time\\nwhile time.process_time() < 2: pass'\n"
        "r = subprocess.run([sys.executable, '-c', spin])\n"
        "say(r.returncode == 0)"
    ),
}
_WAITS = {
    "waiting": "time.sleep(2.5); say(True)",
    "waiting without heeding SIGTERM": (
        "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(2.5); say(True)"
    ),
    "waiting in a child of its own session": (
        "r = subprocess.run(['sleep', '2.5'], start_new_session=True); say(r.returncode == 0)"
    ),
}
_FLOODS = {
    "output": "sys.stdout.write('x\\n' * 2_000_000); sys.stdout.flush(); print(); say(True)",
    "output without a line's end": "sys.stdout.write('x' * 4_000_000); print(); say(True)",
    "output to stderr": "sys.stderr.write('x\\n' * 2_000_000); sys.stderr.flush(); say(True)",
    "output of a child": (
        "subprocess.run(['head', '-c', '4000000', '/dev/zero']); print(); say(True)"
    ),
}


_LEAVES = {
    "a child in the background": "subprocess.Popen(['sleep', P['mark']])",
    "a child of a session of its own": (
        "subprocess.Popen(['sleep', P['mark']], start_new_session=True)"
    ),
    "a twice forked child": (
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: os.execvp('sleep', ['sleep', P['mark']])\n"
        "    os._exit(0)\n"
        "os.wait()"
    ),
    "a child that heeds no signal": (
        "def deaf():\n"
        "    for n in (1, 2, 3, 13, 14, 15): signal.signal(n, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', P['mark']], preexec_fn=deaf, start_new_session=True)"
    ),
    "a child that is stopped": (
        "child = subprocess.Popen(['sleep', P['mark']], start_new_session=True)\n"
        "child.send_signal(signal.SIGSTOP)"
    ),
    "many children": (
        "for _ in range(20): subprocess.Popen(['sleep', P['mark']], start_new_session=True)"
    ),
}


def _taking(programs: dict[str, str], case: str, limits: Limits = TIGHT) -> list[Attack]:
    return [
        Attack(name=f"taking {name}", case=case, off=Off.LIMITS, program=program, limits=limits)
        for name, program in programs.items()
    ]


EXCESS = (
    *_taking(_MEMORY, "A5"),
    *_taking(_PROCESSES, "A6"),
    *_taking(_DISK, "A7"),
    *_taking(_TIME, "A4", _SHORT),
    *_taking(_FLOODS, "A8"),
    *(
        Attack(name=name, case="A3", off=Off.LIMITS, program=program, timeout_seconds=_WAIT_SECONDS)
        for name, program in _WAITS.items()
    ),
    *(
        Attack(name=f"leaving {name}", case="A2", off=Off.EVERYTHING, program=program, leaves=True)
        for name, program in _LEAVES.items()
    ),
)
