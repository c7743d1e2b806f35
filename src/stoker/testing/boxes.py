"""An in-memory sandbox backend: files in a dictionary, programs as scripted functions.

It satisfies ``sandbox.base`` in full, so that worker logic and environments can be tested without
processes. A *script* decides what a program does: an asynchronous function of the box and the
request. The one given here understands a few words (``echo``, ``cat``, ``sleep``, ``hang``, …).

It isolates nothing and never claims to: its offer says ``process`` and it refuses untrusted work.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from stoker.errors import ArtifactDamaged, BoxFailed, IsolationUnavailable, ToolRefused
from stoker.model.checkpoint import Checkpoint
from stoker.model.completion import Usage
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Rung, Trust
from stoker.model.tools import (
    ExportResult,
    LimitKind,
    ReadResult,
    RunRequest,
    RunResult,
    Stream,
    Tests,
    Verdict,
)
from stoker.model.value import canonical_bytes, content_digest
from stoker.sandbox.base import Backend, Box, BoxOffer, BoxRun, Branch, not_offered
from stoker.seams.entropy import fresh_id

Script = Callable[["MemoryBox", RunRequest], Awaitable[RunResult]]
"""What a program does. It is cancelled when its time is up or its action is."""
Judge = Callable[[Mapping[str, bytes], Tests], Verdict]
"""What a judge decides."""


def output(text: str, *, exit_code: int = 0) -> RunResult:
    """Return the result of a program that printed ``text``."""
    content = text.encode()
    stream = Stream(kept=content, total_bytes=len(content))
    return RunResult(exit_code=exit_code, stdout=stream)


async def small_shell(box: "MemoryBox", request: RunRequest) -> RunResult:
    """Do what the first word of ``argv`` says (``WORDS``); another exits 127, like a shell."""
    word, *rest = request.argv
    doing = WORDS.get(word)
    if doing is None:
        return output(f"{word}: not found\n", exit_code=127)
    return await doing(box, request, rest)


async def _echo(_box: "MemoryBox", _request: RunRequest, rest: list[str]) -> RunResult:
    return output(" ".join(rest) + "\n")


async def _cat(box: "MemoryBox", _request: RunRequest, rest: list[str]) -> RunResult:
    content = box.files.get(rest[0])
    if content is None:
        return output(f"cat: {rest[0]}: no such file\n", exit_code=1)
    return RunResult(exit_code=0, stdout=Stream(kept=content, total_bytes=len(content)))


async def _write(box: "MemoryBox", _request: RunRequest, rest: list[str]) -> RunResult:
    box.files[rest[0]] = rest[1].encode()
    return output("")


async def _sleep(_box: "MemoryBox", _request: RunRequest, rest: list[str]) -> RunResult:
    await asyncio.sleep(float(rest[0]))
    return output("")


async def _hang(_box: "MemoryBox", _request: RunRequest, _rest: list[str]) -> RunResult:
    await asyncio.Event().wait()
    return output("never printed")


async def _exit(_box: "MemoryBox", _request: RunRequest, rest: list[str]) -> RunResult:
    return output("", exit_code=int(rest[0]))


async def _env(_box: "MemoryBox", request: RunRequest, rest: list[str]) -> RunResult:
    return output(request.environment.get(rest[0], ""))


async def _hog(_box: "MemoryBox", _request: RunRequest, _rest: list[str]) -> RunResult:
    return RunResult(signal=9, limit=LimitKind.MEMORY)


async def _break(box: "MemoryBox", _request: RunRequest, _rest: list[str]) -> RunResult:
    raise BoxFailed(f"box {box.box_id} broke, as scripted", box=box.box_id)


async def _vanish(box: "MemoryBox", _request: RunRequest, _rest: list[str]) -> RunResult:
    box.lost = True
    return RunResult(signal=9)


WORDS: dict[str, Callable[["MemoryBox", RunRequest, list[str]], Awaitable[RunResult]]] = {
    "echo": _echo,  # WORDS
    "cat": _cat,  # PATH
    "write": _write,  # PATH TEXT
    "sleep": _sleep,  # SECONDS
    "hang": _hang,
    "exit": _exit,  # STATUS
    "env": _env,  # NAME
    "hog": _hog,  # ends by the memory limit
    "break": _break,  # the box fails
    "vanish": _vanish,  # the box is lost
}
"""What the small shell understands."""


class MemoryBox:
    """One box that exists only as a dictionary."""

    def __init__(
        self, backend: "MemoryBackend", box_id: str, baseline: Baseline, policy: ExecutionPolicy
    ) -> None:
        self.box_id = box_id
        self.baseline = baseline
        self.policy = policy
        self.files: dict[str, bytes] = {}
        self.runs = 0
        """Programs begun."""
        self.killed = 0
        """Programs that were cut short."""
        self.lost = False
        self.interrupted = False
        """A program was cut short here; told to every later one."""
        self.began_from = baseline.digest
        """Digest of the state it began from."""
        self.generation = 0
        self._backend = backend
        self._busy = False

    async def run(self, request: RunRequest, *, timeout_seconds: float) -> BoxRun:
        """Run the backend's script for at most ``timeout_seconds``."""
        assert not self._busy, f"two actions at once in box {self.box_id}"
        assert self.box_id in self._backend.boxes, f"box {self.box_id} is gone"
        self._busy = True
        self.runs += 1
        try:
            async with asyncio.timeout(timeout_seconds):
                result = await self._backend.script(self, request)
        except TimeoutError:
            self.killed += 1
            result = RunResult(signal=9, timed_out=True)
        except asyncio.CancelledError:
            self.killed += 1
            self.interrupted = True
            raise
        finally:
            self._busy = False
        result = msgspec.structs.replace(result, interrupted_before=self.interrupted)
        self.interrupted = self.interrupted or result.timed_out or result.limit is not None
        written = result.stdout.total_bytes + result.stderr.total_bytes
        return BoxRun(result=result, usage=Usage(output_bytes=written), box_lost=self.lost)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Keep ``files``; a path that leaves the workspace is refused and nothing is written."""
        for path in files:
            if path.startswith("/") or ".." in path.split("/"):
                raise ToolRefused(f"{path!r} leaves the workspace; nothing was written")
        self.files.update(files)

    async def read_file(self, path: str, *, bytes_max: int) -> ReadResult:
        """Return one file."""
        content = self.files.get(path)
        if content is None:
            return ReadResult(refused="not found")
        return ReadResult(content=content[:bytes_max], total_bytes=len(content))

    async def export(self, paths: tuple[str, ...], *, bytes_max: int) -> ExportResult:
        """Return the files beneath ``paths`` while they fit, and why others do not."""
        files: dict[str, bytes] = {}
        refused = {path: "not found" for path in paths if path != "." and path not in self.files}
        for path, content in sorted(self.files.items()):
            if "." not in paths and path not in paths:
                continue
            if sum(map(len, files.values())) + len(content) > bytes_max:
                refused[path] = f"over the limit of {bytes_max} bytes together"
            else:
                files[path] = content
        return ExportResult(files=files, refused=refused)

    async def checkpoint(self, directory: Path) -> Checkpoint:
        """Write the dictionary down under its digest."""
        assert not self._busy, f"a checkpoint of box {self.box_id} while an action runs"
        content = canonical_bytes(self.files)
        digest = content_digest(content)
        file = directory / digest
        file.write_bytes(content)
        return Checkpoint(
            digest=digest,
            parent=self.began_from,
            generation=self.generation,
            size_bytes=len(content),
            file=str(file),
        )

    async def branch(self, count: int) -> tuple[Branch, ...]:
        """Make boxes with the same files."""
        assert not self._busy, f"a branch of box {self.box_id} while an action runs"
        digest = content_digest(canonical_bytes(self.files))
        made: list[MemoryBox] = []
        try:
            for _ in range(count):
                box_id = fresh_id("box_")
                box = self._backend.make(box_id, self.baseline, self.policy)
                box.begin_from(self.files, digest, self.generation)
                made.append(box)
        except BoxFailed:
            for box in made:
                await box.destroy()
            raise
        return tuple(Branch(box, digest, self.began_from, box.generation) for box in made)

    def begin_from(self, files: Mapping[str, bytes], digest: str, generation: int) -> None:
        """Take the state of a box of ``generation``."""
        self.files = dict(files)
        self.began_from = digest
        self.generation = generation + 1

    async def destroy(self) -> None:
        """Be gone."""
        if self._backend.destroy_fails > 0:
            self._backend.destroy_fails -= 1
            raise BoxFailed(f"box {self.box_id} could not be removed, as scripted")
        self._backend.boxes.pop(self.box_id, None)


class MemoryBackend:
    """Makes memory boxes and judges by a function."""

    def __init__(self, script: Script = small_shell, judge: Judge | None = None) -> None:
        self.script = script
        self.boxes: dict[str, Box] = {}
        self.made: list[MemoryBox] = []
        """Every box ever made, for tests to look at."""
        self.create_fails = 0
        """So many of the next boxes cannot be made."""
        self.destroy_fails = 0
        """So many of the next removals fail."""
        self.leftovers = 0
        """Boxes of dead incarnations, for ``sweep`` to find."""
        self.closed = False
        self._judge = judge

    async def offer(self) -> BoxOffer:
        """Say that nothing is isolated."""
        return BoxOffer(
            isolation=Isolation.PROCESS, rung=Rung.PROCESS, available=True, shared_kernel=True
        )

    def check(self, policy: ExecutionPolicy) -> None:
        """Refuse nothing."""

    async def create(self, box_id: str, baseline: Baseline, policy: ExecutionPolicy) -> Box:
        """Make a box; untrusted work is refused, since a dictionary holds nobody."""
        return self.make(box_id, baseline, policy)

    def make(self, box_id: str, baseline: Baseline, policy: ExecutionPolicy) -> MemoryBox:
        """Make a box, or fail as scripted."""
        if baseline.build is not msgspec.UNSET:
            raise not_offered("baselines with files or setup", "memory")
        if baseline.root is not msgspec.UNSET:
            raise not_offered("baselines with a root of their own", "memory")
        if baseline.packages is not msgspec.UNSET:
            raise not_offered("baselines with packages", "memory")
        if policy.trust is not Trust.TRUSTED:
            raise IsolationUnavailable(
                "memory boxes isolate nothing and are for trusted work only; not made"
            )
        if self.create_fails > 0:
            self.create_fails -= 1
            raise BoxFailed(f"box {box_id} could not be made, as scripted", box=box_id)
        box = MemoryBox(self, box_id, baseline, policy)
        self.boxes[box_id] = box
        self.made.append(box)
        return box

    async def restore(
        self, box_id: str, baseline: Baseline, policy: ExecutionPolicy, checkpoint: Checkpoint
    ) -> Box:
        """Make a box with the files of a checkpoint."""
        content = _content(checkpoint)
        box = self.make(box_id, baseline, policy)
        files = msgspec.msgpack.decode(content, type=dict[str, bytes])
        box.begin_from(files, checkpoint.digest, checkpoint.generation)
        return box

    async def judge(
        self,
        box_id: str,
        files: Mapping[str, bytes],
        tests: Tests,
        *,
        policy: ExecutionPolicy,  # noqa: ARG002 - nothing is isolated, whatever it says
        timeout_seconds: float,
    ) -> tuple[Verdict, Usage]:
        """Ask the judge function; without one, pass what has the solution's file."""
        assert timeout_seconds > 0, f"judge of {box_id} was given no time"
        if self._judge is not None:
            return self._judge(files, tests), Usage()
        passed = tests.solution in files
        return Verdict(passed=passed, detail="" if passed else "no solution"), Usage()

    async def sweep(self) -> int:
        """Remove what ``leftovers`` says was left."""
        found, self.leftovers = self.leftovers, 0
        return found

    async def close(self) -> None:
        """Destroy every box."""
        self.boxes.clear()
        self.closed = True


def _content(checkpoint: Checkpoint) -> bytes:
    try:
        content = Path(checkpoint.file).read_bytes()
    except OSError as error:
        raise ArtifactDamaged(f"{checkpoint.file} cannot be read: {error.strerror}") from error
    if content_digest(content) != checkpoint.digest:
        raise ArtifactDamaged(f"{checkpoint.file} is not {checkpoint.digest}; nothing was made")
    return content


def _satisfies(backend: MemoryBackend) -> Backend:
    """Hold the class to the protocol: the type checker reads this."""
    return backend
