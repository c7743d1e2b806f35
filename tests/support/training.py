"""A small run inside a trainer: tasks without tools, and an engine that the test holds."""

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import stoker
from stoker.coordinator.request import RunRequest
from stoker.coordinator.view import RunSnapshot
from stoker.model.generation import GenerateRequest, Generation, VersionSpan, pack_tokens
from stoker.model.ids import RunId

PROGRAM = """\
import stoker


@stoker.rollout(version="1", timeout="2m")
async def short(ctx, task):
    chat = ctx.chat("go")
    for _ in range(task.data.get("turns", 1)):
        turn = await ctx.generate(chat)
        chat.user("on")
    if turn.text == "fault":
        raise RuntimeError("the program broke")
    return float(len(turn.text))
"""


class Engine:
    """Answers at once, or when the gate of a call is opened; every token under ``version``."""

    def __init__(self, *, gated: bool = False, prompts: bool = True) -> None:
        self.version = 0
        self.prompts = prompts
        """Whether it says which ids it was asked with."""
        self.gated = gated
        self.asked: list[GenerateRequest] = []
        self.news = asyncio.Condition()
        self.gates: dict[str, asyncio.Event] = {}
        """Request id → the gate of a call under way."""
        self.says: dict[tuple[str, int], str] = {}
        """(task, index of its rollout in order of asking) → what it answers; else ``ok``."""
        self._places: dict[str, int] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked.append(request)
        began = self.version
        if self.gated:
            gate = self.gates[request.request_id] = asyncio.Event()
            await self._tell()
            try:
                await gate.wait()
            finally:
                self.gates.pop(request.request_id, None)
                await self._tell()
        text = self.says.get((request.task_id, self.place(request)), "ok")
        both = [(began, 0, 1), (self.version, 1, 2)] if began != self.version else [(began, 0, 2)]
        return Generation(
            text=text,
            prompt_ids=pack_tokens([1, 2] if self.prompts else []),
            token_ids=pack_tokens([3, 4]),
            spans=tuple(VersionSpan(*span) for span in both),
        )

    def place(self, request: GenerateRequest) -> int:
        """Return which rollout of its task asks, in order of their first calls."""
        known = [r for r in self._places if r.startswith(f"{request.task_id}/")]
        return self._places.setdefault(f"{request.task_id}/{request.rollout_id}", len(known))

    async def until(self, calls: int) -> list[str]:
        """Wait until so many calls are under way; return their ids in order of arrival."""
        async with asyncio.timeout(60), self.news:
            await self.news.wait_for(lambda: len(self.gates) == calls)
        return list(self.gates)

    async def until_turns(self, calls: int) -> None:
        """Wait until the calls under way are so many, all but one of them second turns."""
        async with asyncio.timeout(60), self.news:
            await self.news.wait_for(
                lambda: len(self.gates) == calls and len(self.asked) == 2 * calls - 1
            )

    async def _tell(self) -> None:
        async with self.news:
            self.news.notify_all()


class Looks:
    """Snapshots of a run as they come."""

    def __init__(self) -> None:
        self.all: list[RunSnapshot] = []
        self._news = asyncio.Event()

    def __call__(self, snapshot: RunSnapshot) -> None:
        self.all.append(snapshot)
        self._news.set()

    async def until(self, good: Callable[[RunSnapshot], bool], *, looks: int = 1) -> RunSnapshot:
        """Wait until ``looks`` snapshots in a row are ``good`` and alike in what has ended."""
        begin = len(self.all)
        async with asyncio.timeout(60):
            while True:
                last = self.all[begin:][-looks:]
                alike = {sum(one.outcomes.values()) for one in last}
                if len(last) == looks and all(map(good, last)) and len(alike) == 1:
                    return last[-1]
                self._news.clear()
                await self._news.wait()


def lay_out(folder: Path, tasks: Iterable[str], **data: object) -> None:
    """Write the program and a task file."""
    (folder / "program.py").write_text(PROGRAM)
    lines = (json.dumps({"task_id": name, "data": data}) for name in tasks)
    (folder / "tasks.jsonl").write_text("".join(line + "\n" for line in lines))


def request(folder: Path, *sets: str, run: str | None = None, **more: object) -> RunRequest:
    """Return the run of what is laid out in ``folder``; ``run``: begin or resume this one."""
    settings = ["workers.count=0", "program.hosts=1", "program.check_replays=0", *sets]
    return stoker.RunRequest(
        program=folder / "program.py",
        program_name=None,
        tasks=folder / "tasks.jsonl",
        model="callable:engine",
        settings=stoker.load_settings(sets=settings).settings,
        runs_directory=folder / "runs",
        run_id=RunId(run) if run is not None else None,
        **more,  # type: ignore[arg-type]
    )


def model_of(engine: Engine, window: int = 64) -> stoker.CallableModel:
    """Return ``engine`` as the model of a run."""
    return stoker.CallableModel(engine.generate, window=window, name="engine")
