"""Scores that cannot be forged: the answer runs in one box, the tests in another.

The judge's box runs ``Tests.source`` from the baseline interpreter and never sees a file of the
solution's. The solution's box serves calls over a private socket pair; only plain data crosses.
The verdict comes over a descriptor that only the judge's box has, and answers a nonce the judge is
told only after ``check`` returned. So neither exit codes, nor output, nor anything the answer does
to its own process can make a pass.

Whose fault it is: what the solution does, limits and time included, is a failed verdict; what goes
wrong before it is let in, or in the judge's own process, is ``BoxFailed`` and never a verdict.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

import msgspec

from stoker.errors import BoxFailed, ToolRefused
from stoker.model.completion import Usage
from stoker.model.execution import Baseline, ExecutionPolicy
from stoker.model.tools import RunRequest, Tests, Verdict
from stoker.sandbox.base import Box, BoxRun
from stoker.seams.entropy import nonce

BOOT_SECONDS = 60.0
"""For both boxes to stand; generous, since a loaded host must not become a verdict."""
_CONFIRM_SECONDS = 10.0
_GONE_SECONDS = 2.0
_LINE_BYTES_MAX = 256 * 1024
_JUDGE_CHANNELS = 2


class JudgingBox(Box, Protocol):
    """A box that passes private descriptors to its program."""

    async def run_with(
        self, request: RunRequest, *, timeout_seconds: float, channels: tuple[int, ...] = ()
    ) -> BoxRun:
        """Run with ``channels`` as descriptors 3, 4 …; they are closed here."""
        ...


class JudgingBackend(Protocol):
    """What the judge needs of a backend."""

    async def create(self, box_id: str, baseline: Baseline, policy: ExecutionPolicy) -> Any:  # noqa: ANN401 - a JudgingBox; backends return their own class
        """Make a box."""
        ...

    def inside_paths(self) -> tuple[str, str]:
        """Return interpreter and script directory as a box sees them."""
        ...


async def judge_in(
    backend: JudgingBackend,
    box_id: str,
    files: Mapping[str, bytes],
    tests: Tests,
    *,
    policy: ExecutionPolicy,
    timeout_seconds: float,
) -> tuple[Verdict, Usage]:
    """Grade ``files`` against ``tests`` in two fresh boxes, which are gone afterwards.

    Raises:
        BoxFailed: an infrastructure fault; never a verdict.
        ToolRefused: the tests or the files cannot be used as they are.

    **Cancellation:** both boxes are removed first.
    """
    alone = msgspec.structs.replace(policy, mounts=(), network=(), credentials=())
    boxes: list[JudgingBox] = []
    try:
        ends = await asyncio.gather(
            backend.create(f"{box_id}.judge", Baseline(), alone),
            backend.create(f"{box_id}.answer", Baseline(), policy),
            return_exceptions=True,
        )
        boxes = [end for end in ends if not isinstance(end, BaseException)]
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        await boxes[1].write_files(files)
        sitting = _Sitting(boxes[0], boxes[1], tests, backend.inside_paths(), timeout_seconds)
        return await sitting.run()
    finally:
        await asyncio.gather(*(box.destroy() for box in boxes))


class _Sitting:
    """One grading, from start to verdict."""

    def __init__(
        self,
        judge: JudgingBox,
        answer: JudgingBox,
        tests: Tests,
        paths: tuple[str, str],
        timeout_seconds: float,
    ) -> None:
        self._judge_box = judge
        self._answer_box = answer
        self._tests = tests
        self._python, self._scripts = paths
        self._timeout = timeout_seconds
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._buffer = b""

    async def run(self) -> tuple[Verdict, Usage]:
        judge, answer = self._start()
        try:
            verdict = await self._converse(judge, answer)
        finally:
            for task in (judge, answer):
                task.cancel()
            await asyncio.wait([judge, answer])
            self._ours.close()
        return verdict, _both(judge, answer)

    def _start(self) -> "tuple[asyncio.Task[BoxRun], asyncio.Task[BoxRun]]":
        left, right = socket.socketpair()
        whole = BOOT_SECONDS + self._timeout + _CONFIRM_SECONDS
        judge = self._judge_box.run_with(
            self._request("judge_main.py", source=self._tests.source),
            timeout_seconds=whole,
            channels=(left.detach(), self._theirs.detach()),
        )
        answer = self._answer_box.run_with(
            self._request("solution_server.py", path=self._tests.solution),
            timeout_seconds=whole,
            channels=(right.detach(),),
        )
        return asyncio.ensure_future(judge), asyncio.ensure_future(answer)

    def _request(self, script: str, **config: str) -> RunRequest:
        config["entry_point"] = self._tests.entry_point
        return RunRequest(
            argv=(self._python, "-I", f"{self._scripts}/{script}"),
            stdin=json.dumps(config).encode(),
        )

    async def _converse(
        self, judge: "asyncio.Task[BoxRun]", answer: "asyncio.Task[BoxRun]"
    ) -> Verdict:
        ready = await self._event(BOOT_SECONDS)
        if ready is None or ready["event"] != "ready":
            raise await self._not_ready(ready, judge, answer)
        try:
            checked = await self._event(self._timeout)
        except TimeoutError:
            return Verdict(passed=False, detail=f"timed out after {self._timeout:g} s")
        if checked is None:
            return await self._judge_ended(judge)
        if checked["event"] == "unusable":
            raise ToolRefused(f"{checked['detail']}; nothing was graded")
        secret = nonce()
        await asyncio.get_running_loop().sock_sendall(
            self._ours, json.dumps({"nonce": secret}).encode() + b"\n"
        )
        try:
            said = await self._event(_CONFIRM_SECONDS)
        except TimeoutError:
            said = None
        if said is None or said.get("nonce") != secret or not isinstance(said.get("passed"), bool):
            raise BoxFailed("the judge did not confirm its verdict; nothing was graded")
        run = await judge
        detail = str(said.get("detail", ""))
        if not said["passed"]:
            detail = await self._explained(detail, answer)
        return Verdict(passed=said["passed"], detail=detail, run=run.result)

    async def _not_ready(
        self,
        said: dict[str, Any] | None,
        judge: "asyncio.Task[BoxRun]",
        answer: "asyncio.Task[BoxRun]",
    ) -> Exception:
        if said is not None and said["event"] == "unusable":
            return ToolRefused(f"{said['detail']}; nothing was graded")
        why = []
        for name, task in (("judge", judge), ("solution's server", answer)):
            ended = await _within(_GONE_SECONDS, task)
            if ended is not None and not ended.result.ok:
                why.append(f"{name}: {ended.result.text[-500:]}")
        return BoxFailed(
            f"the judge could not begin ({'; '.join(why) or said}); nothing was graded"
        )

    async def _judge_ended(self, judge: "asyncio.Task[BoxRun]") -> Verdict:
        run = await judge
        if run.result.limit is not None:
            # Only the solution's data could make the same tests need so much.
            detail = f"checking its result reached the judge's {run.result.limit} limit"
            return Verdict(passed=False, detail=detail, run=run.result)
        raise BoxFailed(
            f"the judge ended without a verdict ({run.result.text[-500:]}); nothing was graded"
        )

    async def _explained(self, detail: str, answer: "asyncio.Task[BoxRun]") -> str:
        """Say which limit ended the solution, where one did."""
        if "process ended" not in detail:
            return detail
        ended = await _within(_GONE_SECONDS, answer)
        broken = answer.exception() if answer.done() and not answer.cancelled() else None
        if isinstance(broken, BoxFailed) or (ended is not None and ended.box_lost):
            raise BoxFailed(
                f"the solution's box was lost while it was graded ({broken or detail}); nothing "
                "was graded"
            )
        if ended is None:
            return detail
        result = ended.result
        if result.limit is not None:
            return f"{detail}\nIt was stopped at the {result.limit} limit."
        code = result.exit_code if result.signal is None else f"signal {result.signal}"
        return f"{detail}\nIt ended with {code}."

    async def _event(self, seconds: float) -> dict[str, Any] | None:
        """Return the judge's next message, ``None`` when it is gone.

        Raises:
            TimeoutError: it said nothing in time.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(seconds):
            while b"\n" not in self._buffer:
                data = await loop.sock_recv(self._ours, _LINE_BYTES_MAX)
                if not data or len(self._buffer) > _LINE_BYTES_MAX:
                    return None
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json.loads(line)
        return message if isinstance(message, dict) and "event" in message else None


async def _within(seconds: float, task: Awaitable[BoxRun]) -> BoxRun | None:
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.shield(task)
    except (TimeoutError, BoxFailed):
        return None


def _both(*tasks: "asyncio.Task[BoxRun]") -> Usage:
    runs = [t.result() for t in tasks if not t.cancelled() and t.exception() is None]
    return Usage(
        cpu_seconds=sum(run.usage.cpu_seconds or 0.0 for run in runs),
        memory_peak_bytes=max((run.usage.memory_peak_bytes or 0 for run in runs), default=None),
        output_bytes=sum(run.usage.output_bytes for run in runs),
    )
