"""Warm boxes: python actions forked in the box are what fresh ones are, and as well contained."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stoker.errors import BoxFailed
from stoker.model.execution import Baseline, ExecutionPolicy, Rung
from stoker.model.tools import LimitKind, RunRequest, RunResult
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBox
from stoker.sandbox.warm import is_warm_form
from stoker.worker.boxes import Boxes, Chosen
from stoker.worker.ready import Ahead
from support import attacks, sandbox
from support.sandbox import MARK, PATIENCE, SMALL, backend_of, needs_root, policy_of
from support.worker_boxes import quiet_log

ROOTED = [needs_root, pytest.mark.root]
WARM = msgspec.structs.replace(policy_of(Rung.ROOT), warm=True)
MODULES = ("json", "decimal", "random", "logging", "asyncio", "concurrent.futures.thread")
LOADED = msgspec.structs.replace(WARM, preload=MODULES)

FILES = {
    "show.py": b"import sys, os\nprint(sys.argv, sys.path[0], __name__, __file__, os.getcwd())\n"
    b"print(sorted(globals()), type(__loader__).__name__, __spec__, __package__)\n",
    "sub/sibling.py": b"import beside\nprint(beside.VALUE, beside.__file__)\n",
    "sub/beside.py": b"VALUE = 'beside'\n",
    "package/__init__.py": b"",
    "package/__main__.py": b"import sys\nprint(sys.argv, __name__, __spec__.name, sys.path[0])\n",
    "raises.py": b"def f():\n    raise ValueError('no')\n\n\nf()\n",
    "broken.py": b"x = 1\ny = = 2\n",
    "latin.py": b"# coding: latin-1\nprint('\xe9'.encode())\n",
    "beside_me.py": b"class B:\n    def __del__(self):\n        print('b', B)\n\n\nb = B()\n",
    "folder/__main__.py": b"import sys\nprint('a folder', sys.argv)\n",
}
SAME = {
    "arguments and place": (
        ("python", "-c", "import sys,os; print(sys.argv, sys.path, os.getcwd())", "a", "-b"),
    ),
    "interpreter": (
        (
            "python", "-c",
            "import sys; print(sys.flags, sys.executable, sys.prefix, sys.orig_argv, sys.version)",
        ),
        ("python3", "-c", "import sys; print(sys.orig_argv)"),
    ),
    "variables": (("python", "-c", "import os; print(sorted(os.environ.items()))"),),
    "the main module": (
        ("python", "-c", "print(sorted(globals()), __loader__, __spec__, __package__, __doc__)"),
    ),
    "streams": (
        (
            "python", "-c",
            ("import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n"
            "    print(s, s.line_buffering, s.newlines, s.seekable(), s.isatty(), s.buffer.raw)"),
        ),
        ("python", "-c", "import sys; print(ascii(sys.stdin.read()))"),
        ("python", "-c", "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"),
    ),
    "files": (
        ("python", "show.py", "1", "--two"),
        ("python", "./sub/sibling.py"),
        ("python", "latin.py"),
        ("python", "folder", "x"),
        ("python", "missing.py"),
        ("python", "/workspace/show.py"),
    ),
    "modules": (
        ("python", "-m", "package", "1"),
        ("python", "-m", "json.tool", "missing.json"),
        ("python", "-m", "nothing_of_this_name"),
    ),
    "exceptions": (
        ("python", "-c", "1/0"),
        ("python", "raises.py"),
        ("python", "./raises.py"),
        ("python", "sub/../raises.py"),
        ("python", "broken.py"),
        ("python", "-c", "x = = 1"),
        ("python", "-m", "raises"),
        ("python", "-c", "import sys; sys.excepthook = lambda *a: print('hook', a[0]); 1/0"),
    ),
    "endings": (
        ("python", "-c", "raise SystemExit"),
        ("python", "-c", "raise SystemExit(7)"),
        ("python", "-c", "raise SystemExit('said')"),
        ("python", "-c", "import os; os._exit(9)"),
        ("python", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        ("python", "-c", "import os; os.abort()"),
        (
            "python", "-c",
            ("import atexit, threading\natexit.register(print, 'at exit')\n"
            "threading.Thread(target=lambda: print('thread')).start()\nprint('main')"),
        ),
    ),
    "what is left at the end": (
        ("python", "-c", "class A:\n    def __del__(self): print('gone', A.__name__)\na = A()"),
        ("python", "-c", "f = open('left.txt', 'w')\nf.write('unflushed')"),
        ("python", "-c", "print(open('left.txt').read())"),
        ("python", "-c", "import beside_me\nprint('end')"),
        (
            "python", "-c",
            (
                "import json, sys\ndel sys.modules['json'], sys.modules['codecs']\n"
                "import json, beside_me\nprint('end')"
            ),
        ),
        ("python", "-c", "import sys\nsys.stdout.write('x')\nsys.stdout = None"),
        ("python", "-c", "import sys\nsys.stdout.close()"),
        ("python", "-c", "raise KeyboardInterrupt"),
        ("python", "-c", "raise BaseException('base')"),
        ("python", "-c", "import os\npid = os.fork()\nif pid: os.wait()\nprint(pid > 0)"),
        (
            "python", "-c",
            (
                "import threading, time\nt = threading.Thread(target=time.sleep, args=(99,))\n"
                "t.daemon = True\nt.start()\nprint('main')"
            ),
        ),
        (
            "python", "-c",
            (
                "import atexit\nclass F:\n    def __repr__(self): return 'F'\n"
                "    def __call__(self): 1 / 0\natexit.register(F())"
            ),
        ),
        ("python", "-c", "a = []\na.append(a)\nclass C:\n    pass\nprint('cycle')"),
    ),
    "modules loaded ahead": (
        ("python", "-c", "import json; print(json.dumps({'a': [1]}), json.__file__)"),
        (
            "python", "-c",
            (
                "import decimal as d\nprint(d.Decimal(1) / 3)\n"
                "d.getcontext().prec = 5\nprint(d.Decimal(1) / 3)"
            ),
        ),
        ("python", "-c", "import random; random.seed(7); print(random.random())"),
        ("python", "-c", "import logging; logging.basicConfig(); logging.warning('w')"),
        ("python", "-c", "import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))"),
        (
            "python", "-c",
            (
                "import concurrent.futures as c\nwith c.ThreadPoolExecutor(2) as p:\n"
                "    print(list(p.map(abs, [-1, 2])))"
            ),
        ),
        ("python", "-m", "decimal"),
    ),
    "processes": (
        ("python", "-c", "import os; print(os.getuid(), os.getgid(), os.getgroups())"),
        ("python", "-c", "import subprocess; print(subprocess.check_output(['id', '-u']))"),
        (
            "python", "-c",
            ("import multiprocessing as m\nif __name__ == '__main__':\n"
            "    with m.Pool(2) as p: print(p.map(abs, [-1, 2]))"),
        ),
        ("python", "-c", "import signal; print([signal.getsignal(n) for n in (2, 13, 17, 25)])"),
        ("python", "-c", "import resource as r; print([r.getrlimit(n) for n in (0, 1, 4, 7)])"),
        ("python", "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))"),
        ("python", "-c", "import os, socket; print(socket.gethostname(), os.umask(0))"),
        (
            "python", "-c",
            (
                "import re\nlines = re.sub('[ug]id=[0-9]+', '', open('/proc/mounts').read())\n"
                "print(*sorted(lines.splitlines()), sep='\\n')"
            ),
        ),
    ),
}  # fmt: skip


INPUT = "é\r\n\0z".encode()


async def result_of(
    box: LocalBox, argv: tuple[str, ...], seconds: float = PATIENCE, stdin: bytes = INPUT
) -> RunResult:
    request = RunRequest(argv=argv, stdin=stdin)
    return (await box.run(request, timeout_seconds=seconds)).result


def in_warm_box(state: Path, body: Callable[[LocalBox], object], policy: object = WARM) -> None:
    async def whole() -> None:
        async with SandboxHost.open(state) as host:
            backend = backend_of(host, Rung.ROOT)
            box = await backend.create("box_warm", Baseline(), policy)  # type: ignore[arg-type]
            await body(box)  # type: ignore[misc]
            await backend.close()
            assert host.leaked() == 0
        assert sandbox.marked_pids() == []

    sandbox.run(whole)


@needs_root
@pytest.mark.root
@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        *((kind, WARM) for kind in SAME),
        *((k, LOADED) for k in ("modules loaded ahead", "endings", "what is left at the end")),
    ],
)
def test_a_forked_program_is_what_a_fresh_one_is(
    tmp_path: Path, kind: str, policy: ExecutionPolicy
) -> None:
    async def body(warm: LocalBox) -> None:
        fresh = await warm.backend.create("box_fresh", Baseline(), policy_of(Rung.ROOT))
        for box in (warm, fresh):
            await box.write_files(FILES)
        for argv in SAME[kind]:
            for given in (INPUT, b"") if kind == "streams" else (INPUT,):
                expected = await result_of(fresh, argv, stdin=given)
                assert await result_of(warm, argv, stdin=given) == expected, (argv, given)
        assert warm.server is not None
        assert not warm.server.dead
        assert fresh.server is None

    in_warm_box(tmp_path, body, policy)


@needs_root
@pytest.mark.root
def test_actions_share_files_and_nothing_else(tmp_path: Path) -> None:
    async def body(box: LocalBox) -> None:
        first = await result_of(
            box,
            ("python", "-c", (f"import os, random\nopen('/tmp/kept', 'w').write('x')\n"
             f"if os.fork() == 0:\n    os.setsid()\n    os.execvp('sleep', ['sleep', '{MARK}'])\n"
             "print(random.random(), os.urandom(8), os.listdir('/tmp'))")),
        )  # fmt: skip
        assert sandbox.marked_pids() == []
        second = await result_of(
            box,
            ("python", "-c", ("import os, random\nprint(random.random(), os.urandom(8), "
             "os.listdir('/tmp'))\nprint(sorted(p for p in os.listdir('/proc') if p.isdigit()))")),
        )  # fmt: skip
        kept, pids = second.stdout.kept.splitlines()
        assert kept != first.stdout.kept.strip()
        assert kept.endswith(b"['kept']")
        assert pids == b"['1', '2']"
        told = await result_of(box, ("sh", "-c", "cat /tmp/kept"))  # by a launcher, in between
        assert told.stdout.kept == b"x"
        # The child that waited for this one was killed when the shell's was cleared away.
        server = box.server
        for _ in range(2):
            assert (await result_of(box, ("python", "-c", "print(1)"))).ok
        assert box.server is server

    in_warm_box(tmp_path, body)


@needs_root
@pytest.mark.root
def test_what_a_box_would_run_at_an_interpreter_s_start_never_runs_in_the_server(
    tmp_path: Path,
) -> None:
    trap = b"import os, sys; sys.stderr.write('%d\\n' % os.getuid())"
    site = f".local/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"

    async def body(box: LocalBox) -> None:
        for _ in range(2):
            await box.write_files(
                {f"{site}/usercustomize.py": trap, "json.py": trap, "encodings.py": trap}
            )
            seen = await result_of(box, ("python", "-c", "print(1)"))
            assert (seen.stdout.kept, seen.stderr.kept) == (b"1\n", b"1000\n")
            assert box.server is not None
            await box.server.close()  # the next one starts among these files

    in_warm_box(tmp_path, body)


@needs_root
@pytest.mark.root
def test_limits_and_deadlines_hold_and_the_box_goes_on(tmp_path: Path) -> None:
    async def body(box: LocalBox) -> None:
        spin = ("python", "-c", "while True: pass")
        late = await result_of(box, ("python", "-c", "import signal; signal.pause()"), seconds=0.3)
        assert (late.timed_out, late.limit) == (True, None)
        for argv, limit in (
            (spin, LimitKind.CPU),
            (("python", "-c", attacks.HOG), LimitKind.MEMORY),
            (("python", "-c", "while True: print('x' * 9999)"), LimitKind.OUTPUT),
            (("python", "-c", attacks.BOMB), LimitKind.PROCESSES),
        ):
            seen = await result_of(box, argv)
            assert seen.limit is limit, (argv, seen)
            on = await result_of(box, ("python", "-c", "print('on')"))
            assert on.stdout.kept == b"on\n"

    limits = msgspec.structs.replace(SMALL, cpu_seconds=0.6)
    in_warm_box(tmp_path, body, msgspec.structs.replace(WARM, limits=limits))


@needs_root
@pytest.mark.root
def test_a_warm_box_made_ahead_has_its_interpreter_waiting(tmp_path: Path) -> None:
    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            backend = backend_of(host, Rung.ROOT)

            async def choose(_policy: ExecutionPolicy) -> Chosen:
                return Chosen(backend, await backend.offer())

            boxes = Boxes(choose, quiet_log())
            boxes.ready.ahead = {"fast": Ahead(1, 60.0)}
            await boxes.create(Baseline(), WARM, worker_class="fast")
            await boxes.ready.settled()
            box = await boxes.create(Baseline(), WARM, worker_class="fast")
            assert isinstance(box, LocalBox)
            server = box.server
            assert server is not None
            assert not server.dead
            ran = await result_of(box, ("python", "-c", "import os; print(os.listdir())"))
            assert ran.text == "[]", "nothing of its warming up is left"
            assert box.server is server
            await boxes.close()
            assert host.leaked() == 0

    sandbox.run(body)


@needs_root
@pytest.mark.root
def test_a_killed_worker_s_warm_box_is_swept(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
from pathlib import Path
from security import test_warm as t
async def main():
    async with t.SandboxHost.open(Path(sys.argv[1])) as host:
        box = await t.backend_of(host, t.Rung.ROOT).create("box_1", t.Baseline(), t.WARM)
        code = "import os; print('ready'); os.execvp('sleep', ['sleep', '{MARK}'])"
        await asyncio.gather(t.result_of(box, ("python", "-c", code), 600), told())
async def told():
    while not t.sandbox.marked_pids():
        await asyncio.sleep(0.01)
    print("ready", flush=True)
t.sandbox.MARK = "{MARK}"
asyncio.run(main())
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert holder.stdout is not None
    with holder.stdout:
        try:
            assert holder.stdout.readline() == b"ready\n"
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait(30)

    async def body() -> None:
        async with SandboxHost.open(tmp_path) as host:
            assert await host.sweep() == 1
            assert host.leaked() == 0

    sandbox.run(body)
    assert sandbox.marked_pids() == []


@pytest.mark.parametrize(
    ("argv", "given", "warm"),
    [
        (("python", "-c", "1"), {}, True),
        (("python3", "x.py", "-v"), {}, True),
        (("python", "-m", "m"), {"A": "b"}, True),
        (("python",), {}, False),
        (("python", "-c"), {}, False),
        (("python", "-"), {}, False),
        (("python", ""), {}, False),
        (("python", "-u", "x.py"), {}, False),
        (("python", "-cpass"), {}, False),
        (("/usr/bin/python", "x.py"), {}, False),
        (("sh", "-c", "python x.py"), {}, False),
        (("python", "x.py"), {"PYTHONHASHSEED": "0"}, False),
        (("python", "x.py"), {"PATH": "/workspace"}, False),
        (("python", "x.py"), {"LC_ALL": "C"}, False),
        (("python", "x.py"), {"HOME": "/tmp"}, False),
        (("python", "x.py"), {"LD_PRELOAD": "x"}, False),
    ],
)
def test_only_plain_starts_of_the_interpreter_are_forked(
    argv: tuple[str, ...],
    given: dict[str, str],
    warm: bool,  # noqa: FBT001 - a table's column
) -> None:
    assert is_warm_form(argv, {}, given) is warm
    assert is_warm_form(argv, given, {}) is warm


@needs_root
@pytest.mark.root
def test_a_warm_box_that_gets_one_uid_of_two_gives_it_back(tmp_path: Path) -> None:
    async def work() -> None:
        async with SandboxHost.open(tmp_path, uid_base=1_899_000_017, uid_count=1) as host:
            backend = backend_of(host, Rung.ROOT)
            for _ in range(2):
                with pytest.raises(BoxFailed, match="taken"):
                    await backend.create("box_warm", Baseline(), WARM)
            box = await backend.create("box_cold", Baseline(), policy_of(Rung.ROOT))
            await box.destroy()

    asyncio.run(work())
