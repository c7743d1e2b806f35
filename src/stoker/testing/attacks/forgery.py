"""Answers that want a score they have not earned (CASES A28).

Off means a harness as most are written: tests in the answer's own process, judged by its exit code,
by a line on stdout or by what comes over a descriptor it inherited.
"""

import msgspec

CHECK = """
def check(candidate):
    assert candidate([1, 2, 3]) == 6
    assert candidate([]) == 0
    for _ in range(3):
        assert candidate([5]) == 5
"""
VERDICT = b'{"passed": true}'
"""What the naive harness takes for the tests' word, on descriptor 3."""
_EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
"""
_WRONG = "def total(n):\n    return -1\n"


class Forgery(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    name: str
    answer: str


FORGERIES = tuple(
    Forgery(name=f"a score by {name}", answer=answer)
    for name, answer in {
        "exit(0) while loading": "exit(0)",
        "os._exit(0) while loading": "import os\nos._exit(0)",
        "exit(0) in the call": "def total(n):\n    exit(0)",
        "os._exit(0) in the call": "import os\ndef total(n):\n    os._exit(0)",
        "ending the process from a thread": (
            "import os, threading, time\n"
            "def total(n):\n"
            "    threading.Timer(0.05, os._exit, (0,)).start()\n    time.sleep(1)\n    return -1"
        ),
        "exit(0) at a signal": (
            "import os, signal\n"
            "signal.signal(signal.SIGALRM, lambda *_: os._exit(0)); signal.setitimer(0, 0.05)\n"
            "def total(n):\n    import time; time.sleep(1); return -1"
        ),
        "becoming another program": "import os\ndef total(n):\n    os.execv('/bin/true', ['true'])",
        "lines of success": "def total(n):\n    print('1 passed in 0.01s', flush=True); return -1",
        "an exit handler": ("import atexit, os\natexit.register(os._exit, 0)\n" + _WRONG),
        "an exception hook": ("import os, sys\nsys.excepthook = lambda *_: os._exit(0)\n" + _WRONG),
        "a frame of the harness": (
            "import sys\n"
            "def total(n):\n"
            "    f = sys._getframe(1)\n"
            "    while f: f.f_globals['check'] = lambda c: None; f = f.f_back\n"
            "    raise SystemExit(0)"
        ),
        "a trace that skips the tests": (
            "import sys\ndef total(n):\n    sys.settrace(None); sys.exit(0)"
        ),
        "an object equal to everything": _EQUAL + "def total(n):\n    return Equal()",
        "a number equal to everything": (
            _EQUAL + "class Int(Equal, int):\n    pass\ndef total(n):\n    return Int(41)"
        ),
        "a word on every descriptor": (
            "import os\n"
            "for n in range(3, 64):\n"
            f"    try: os.write(n, {VERDICT!r})\n"
            "    except OSError: pass\n" + _WRONG
        ),
        "a word through /proc/self/fd": (
            "import os\n"
            "for n in os.listdir('/proc/self/fd'):\n"
            "    try:\n"
            "        with open('/proc/self/fd/' + n, 'wb', buffering=0) as f:\n"
            f"            f.write({VERDICT!r} if int(n) > 2 else b'')\n"
            "    except (OSError, ValueError): pass\n" + _WRONG
        ),
    }.items()
)
