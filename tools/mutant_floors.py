"""Quick floors, collected once: a fork of this process runs them on each mutant.

The parent has pytest, the package and the tests loaded. A child gives the changed functions their
other code, in place, so that every name bound to them has it; then it runs the tests that reach
them, those first that noticed such changes before, up to the first that fails. Once, on the
unchanged code, it is measured which functions each test reaches and what it costs.
"""

import gc
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import Phase, settings

PATIENCE, SPARE_SECONDS = 10, 5
"""A test may take so many times what it takes on the unchanged code, and this more."""

SAME = "the same"
"""The result of a change that the compiler undoes: no mutant at all."""

ENDLESS = 3
"""The status of a child that ran too long, or waited for what never came."""

Place = tuple[str, str, int]
"""A function: its file, its qualified name, its first line."""


class Verdict(NamedTuple):
    """What came of one mutant."""

    result: str
    """``killed``, ``endless`` (it ran far past the unchanged code's time), ``survived`` or
    ``SAME``."""
    by: str = ""
    """The first test that failed."""
    seconds: float = 0.0
    """Of CPU."""


class _Floor:
    """One test."""

    def __init__(self, item: pytest.Item) -> None:
        self.item = item
        self.reaches: frozenset[Place] = frozenset()
        self.cpu = 0.0
        self.wall = 0.0


class Floors:
    """The collected tests; one child at a time is a mutant's for each of ``jobs``."""

    def __init__(self, session: pytest.Session, files: Sequence[Path], scratch: Path) -> None:
        self._files = {str(file) for file in files}
        self._floors = [_Floor(item) for item in session.items]
        self._scratch = scratch
        self._kills: dict[Place, Counter[str]] = defaultdict(Counter)
        self._functions: dict[Place, list[FunctionType]] = defaultdict(list)
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and one.__code__.co_filename in self._files:
                self._functions[_place(one.__code__)].append(one)
        gc.freeze()

    def measure(self) -> float:
        """Run everything on the unchanged code; return seconds of CPU.

        Raises:
            RuntimeError: a test fails on it, so that nothing can be said of a mutant.
        """
        began = time.monotonic()
        found = self._forked(self._measured)
        content = found.said()
        if os.waitpid(found.pid, 0)[1]:
            raise RuntimeError(f"fails on the unchanged code: {content.decode()}")
        for floor, (cpu, wall, reaches) in zip(
            self._floors,
            msgspec.msgpack.decode(content, type=list[tuple[float, float, list[Place]]]),
            strict=True,
        ):
            floor.cpu, floor.wall, floor.reaches = cpu, wall, frozenset(reaches)
        print(f"{len(self._floors)} tests, {time.monotonic() - began:.0f} s watched", flush=True)
        return sum(floor.cpu for floor in self._floors)

    def changed(self, code: CodeType) -> dict[Place, CodeType]:
        """Return the living functions that ``code``, another file's body, gives other code."""
        found: dict[Place, CodeType] = {}
        for other in _codes(code):
            living = self._functions.get(_place(other), [])
            if any(function.__code__ != other for function in living):
                found[_place(other)] = other
        return found

    def tried(
        self, mutants: Iterator[tuple[str, CodeType]], jobs: int
    ) -> Iterator[tuple[str, Verdict]]:
        """Yield what comes of each mutant, in the order in which they end."""
        running: dict[int, tuple[str, _Child, tuple[Place, ...]]] = {}
        left = True
        while left or running:
            while left and len(running) < jobs:
                name, code = next(mutants, ("", None))
                left = code is not None
                if code is None:
                    continue
                changed = self.changed(code)
                floors = self._chosen(tuple(changed))
                if not changed or not floors:
                    yield name, Verdict("survived" if changed else SAME)
                    continue
                child = self._forked(partial(self._mutated, changed, floors))
                running[child.pid] = (name, child, tuple(changed))
            if running:
                pid, status, used = os.wait4(-1, 0)
                name, child, places = running.pop(pid)
                by = child.said().decode()
                for place in places if by else ():
                    self._kills[place][by] += 1
                    self._kills[(place[0], "", 0)][by] += 1
                yield name, Verdict(_verdict(status), by, used.ru_utime + used.ru_stime)

    def _chosen(self, places: tuple[Place, ...]) -> list[_Floor]:
        """Return the tests that reach a place: the best first, by what they noticed and cost."""
        floors = [floor for floor in self._floors if not floor.reaches.isdisjoint(places)]

        def rank(floor: _Floor) -> tuple[int, int, float]:
            name = floor.item.nodeid
            here = sum(self._kills[place][name] for place in places)
            near = sum(self._kills[(place[0], "", 0)][name] for place in places)
            return (-here, -near, floor.cpu)

        return sorted(floors, key=rank)

    # --- in the child

    def _forked(self, work: Callable[[], bytes]) -> "_Child":
        scratch = Path(tempfile.mkdtemp(dir=self._scratch))
        reads, writes = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writes)
            return _Child(pid, reads, scratch)
        code = 70
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2) if not os.environ.get("MUTANTS_LOUD") else ():
                os.dup2(nothing, descriptor)
            tempfile.tempdir = str(scratch)
            # pytest's own place for tmp_path, made anew for this child.
            factory: Any = self._floors[0].item.config._tmp_path_factory  # type: ignore[attr-defined]  # noqa: SLF001
            factory._basetemp = scratch  # noqa: SLF001
            self._ends = _Ends(writes)
            self._floors[0].item.config.pluginmanager.register(self._ends)
            said = work()
            while said:
                said = said[os.write(writes, said) :]
            code = 0
        finally:
            os._exit(code)

    def _limited(self, floor: _Floor) -> None:
        """Give one test its time; a process that hears no signal any more is killed outright."""
        cpu, wall = PATIENCE * floor.cpu + SPARE_SECONDS, PATIENCE * floor.wall + 4 * SPARE_SECONDS
        signal.setitimer(signal.ITIMER_PROF, cpu)
        signal.setitimer(signal.ITIMER_REAL, wall)
        used = math.ceil(time.process_time() + cpu) + SPARE_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (used, resource.RLIM_INFINITY))

        def too_long(*_: object) -> None:
            os.write(self._ends.writes, floor.item.nodeid.encode())
            os._exit(ENDLESS)

        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, too_long)

    def _mutated(self, changed: dict[Place, CodeType], floors: list[_Floor]) -> bytes:
        for place, code in changed.items():
            for function in self._functions[place]:
                function.__code__ = code
        for floor in floors:
            self._limited(floor)
            _run(floor.item)
        return b""

    def _measured(self) -> bytes:
        found: list[tuple[float, float, list[Place]]] = []
        shared: dict[Path, set[Place]] = defaultdict(set)
        reached: set[Place] = set()

        def watch(frame: FrameType, event: str, argument: object) -> None:  # noqa: ARG001
            code = frame.f_code
            if code.co_filename in self._files:
                reached.add(_place(code))

        for floor in self._floors:
            reached.clear()
            # What a test's fixtures reach may be kept for others of its file.
            self._ends.prepared = partial(shared[floor.item.path].update, reached)
            cpu, wall = time.process_time(), time.monotonic()
            sys.settrace(watch)
            _run(floor.item)
            sys.settrace(None)
            found.append((time.process_time() - cpu, time.monotonic() - wall, [*reached]))
        whole = [
            (cpu, wall, [*{*reaches, *shared[floor.item.path]}])
            for floor, (cpu, wall, reaches) in zip(self._floors, found, strict=True)
        ]
        return msgspec.msgpack.encode(whole)


class _Child(NamedTuple):
    pid: int
    reads: int
    scratch: Path

    def said(self) -> bytes:
        """Return what it said, once it has ended."""
        content = b"".join(iter(lambda: os.read(self.reads, 1 << 20), b""))
        os.close(self.reads)
        shutil.rmtree(self.scratch, ignore_errors=True)
        return content


class _Ends:
    """Ends the process at the first test that fails, and says which it was."""

    def __init__(self, writes: int) -> None:
        self.writes = writes
        self.prepared: Callable[[], None] = lambda: None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self.writes, report.nodeid.encode())
            os._exit(1)
        if report.when == "setup":
            self.prepared()


class _Plugin:
    def __init__(self, files: Sequence[Path], work: Callable[[Floors], int]) -> None:
        self._files, self._work = files, work
        self.code = 2

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
            self.code = self._work(Floors(session, self._files, Path(scratch)))
        return True


def collected(
    paths: Sequence[str], chosen: str, files: Sequence[Path], work: Callable[[Floors], int]
) -> int:
    """Collect the tests at ``paths`` that ``chosen`` names and hand them to ``work``."""
    settings.register_profile(
        "mutants",
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],  # a failure is enough: it need not be small
    )
    settings.load_profile("mutants")
    plugin = _Plugin(files, work)
    pytest.main(
        [
            "-q",
            "-s",
            "--assert=plain",
            "--tb=no",
            "-m",
            "not slow and not root",
            "-k",
            chosen,
            *paths,
        ],
        plugins=[plugin],
    )
    return plugin.code


def _run(item: pytest.Item) -> None:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)


def _place(code: CodeType) -> Place:
    return (code.co_filename, code.co_qualname, code.co_firstlineno)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes(one)


def _verdict(status: int) -> str:
    limited = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    if limited or (os.WIFEXITED(status) and os.WEXITSTATUS(status) == ENDLESS):
        return "endless"
    return "killed" if status else "survived"
