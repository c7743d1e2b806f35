"""Power cuts at every sync and every reply of a real process, and what must be left on the disk.

The ledger's recording is one seeded workload over three lives of its owner: killed, ended in order,
killed. Each check is first shown to fail: a process that leaves out one sync is caught.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from stoker.broker.base import CompleteRequest, EventsReply, Request
from stoker.broker.place import owner_pid
from stoker.broker.service import Reply
from stoker.broker.spawn import OwnerSettings
from stoker.model.ids import ActionId
from support import disk_files
from support.disk_images import ALL_THERE, Disk, Image, boundary, put
from support.disk_strace import COMMAND, read_strace
from support.disk_trace import Event, Mark, Receive, Send, Sync, Write, read_trace
from support.ledger_process import (
    OWNER,
    RawPeer,
    end_owners,
    start_owner,
    wait_for_end,
    wait_until_published,
)
from support.power import LIMITS, WAL, Conversation, Promises, Reader, Workload, must_be_synced
from support.runs import tell

TESTS = Path(__file__).resolve().parent.parent
ROUNDS = 14
VARIANTS = 4


@pytest.fixture
def quick() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of images are written and synced."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)
        end_owners()


def recorder(trace: Path, root: Path, fault: str) -> tuple[str, ...]:
    python = ("env", f"PYTHONPATH={TESTS}", sys.executable, "-m", "support.disk_recorder")
    return (*python, str(trace), str(root), fault)


def record_ledger(folder: Path, seed: int, fault: str = "none") -> list[Event]:
    place, trace = folder / "ledger", folder / "trace"
    place.mkdir()
    program = (*recorder(trace, place, fault), "stoker.broker.owner")
    workload = Workload(seed)
    settings = OwnerSettings(limits=LIMITS, idle_exit_seconds=60.0)
    for life, end in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)):
        owner = start_owner(place, settings=settings, program=program)
        wait_until_published(place, owner)
        peer = RawPeer(place)
        if life == 0:
            workload.enter(peer, "first")
        else:
            workload.wake(peer)
        for _ in range(ROUNDS):
            workload.round(peer)
        workload.rest(peer)
        peer.close()
        owner.send_signal(end)
        assert wait_for_end(owner) == (0 if end is signal.SIGTERM else -signal.SIGKILL)
    return list(read_trace(trace))


def cut_everywhere(
    events: list[Event], judge: Callable[[int, str, Image], str | None], seed: int, variants: int
) -> Iterator[str]:
    """Cut the power before every sync and every reply; yield what is wrong, one a cut."""
    disk, chance = Disk(), random.Random(seed)
    for at, event in enumerate(events):
        if boundary(event):
            for how, image in disk.images(chance, variants):
                complaint = judge(at, how, image)
                if complaint is not None:
                    yield f"cut before event {at} ({type(event).__name__}), {how}: {complaint}"
                    break
        disk.feed(event)
    yield from ()


class LedgerJudge:
    """Judges images of a ledger against what had been replied before the cut."""

    def __init__(self, folder: Path, events: list[Event]) -> None:
        self.reader = Reader()
        self.whole: set[bytes] = set()
        """States that a commit left."""
        self.cuts: set[int] = set()
        self._place = folder / "image"
        self._replies = list(replies(events))
        self._promises = Promises()

    def __call__(self, at: int, how: str, image: Image) -> str | None:
        self.cuts.add(at)
        while self._replies and self._replies[0][0] < at:
            _, request, reply = self._replies.pop(0)
            self._promises.add(request, reply)
        self._place.mkdir()
        try:
            put(image, self._place)
            digest, state = self.reader.read(self._place)
        except (AssertionError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(self._place)
        if how == ALL_THERE:
            self.whole.add(digest)
        elif digest not in self.whole and state.epoch:
            return "it holds half a commit"
        return next(self._promises.broken(state), None)


def replies(events: list[Event]) -> Iterator[tuple[int, Request, Reply]]:
    """Yield every reply with the place in the trace at which it left."""
    conversation = Conversation()
    for at, event in enumerate(events):
        if isinstance(event, Receive | Send):
            for request, reply in conversation.hear(event):
                yield at, request, reply


def judge_ledger(
    folder: Path, seed: int, fault: str = "none", variants: int = VARIANTS
) -> list[str]:
    events = record_ledger(folder, seed, fault)
    restarts = sum(isinstance(e, Write) and e.path == WAL and e.offset == 0 for e in events)
    assert restarts > 3, "the log never started over: checkpoints are not tried"
    judge = LedgerJudge(folder, events)
    wrong = list(cut_everywhere(events, judge, seed, variants))
    tell(
        f"seed {seed}, {fault}: {len(judge.cuts)} cuts, {judge.reader.opened} images, "
        f"{len(judge.whole)} states"
    )
    assert len(judge.cuts) > 100, "the workload is too small to show anything"
    return wrong


def test_every_image_of_a_cut_holds_what_was_replied_and_nothing_by_halves(quick: Path) -> None:
    assert judge_ledger(quick, seed=1) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_every_image_of_many_workloads(quick: Path, seed: int) -> None:
    assert judge_ledger(quick, seed, variants=12) == []


@pytest.mark.parametrize("fault", ["no_sync", "late_sync", "epoch"])
def test_a_ledger_that_leaves_out_a_sync_is_caught(quick: Path, fault: str) -> None:
    wrong = judge_ledger(quick, seed=1, fault=fault, variants=0)
    tell(f"{fault}: {len(wrong)} cuts show it, for instance {wrong[:1]}")
    assert wrong


def judge_files(folder: Path, fault: str, variants: int = VARIANTS) -> list[str]:
    root, trace, place = folder / "run", folder / "trace", folder / "image"
    root.mkdir()
    command = (*recorder(trace, root, fault), "support.disk_files", str(root))
    subprocess.run(command, check=True, timeout=60)
    events = list(read_trace(trace))
    marks = [(at, event.what) for at, event in enumerate(events) if isinstance(event, Mark)]

    def judge(at: int, _how: str, image: Image) -> str | None:
        place.mkdir()
        put(image, place)
        try:
            return disk_files.judge(place, [what for when, what in marks if when < at])
        finally:
            shutil.rmtree(place)

    return list(cut_everywhere(events, judge, seed=1, variants=variants))


def test_artifacts_and_the_runs_record_are_whole_or_absent_and_kept_once_promised(
    quick: Path,
) -> None:
    assert judge_files(quick, "none", variants=8) == []


@pytest.mark.parametrize("fault", ["no_file_sync", "no_directory_sync"])
def test_files_that_leave_out_a_sync_are_caught(quick: Path, fault: str) -> None:
    assert judge_files(quick, fault)


class Order:
    """Which replies must follow a sync, and of which of those a byte left before it."""

    def __init__(self) -> None:
        self.count = 0
        self.early: list[str] = []
        self._written = self._synced = 0
        self._completed: dict[ActionId, int] = {}
        """How much had been written when an action's completion came."""

    def add(self, conversation: Conversation, event: Event) -> None:
        if isinstance(event, Write) and event.path == WAL:
            self._written += 1
        elif isinstance(event, Sync) and event.path == WAL:
            self._synced = self._written
        elif isinstance(event, Receive | Send):
            for request, reply in conversation.hear(event):
                if must_be_synced(request, reply):
                    self._judge(reply)
            for request in conversation.asked:
                if isinstance(request, CompleteRequest):
                    self._completed |= {c.action_id: self._written for c in request.completions}

    def _judge(self, reply: Reply) -> None:
        self.count += 1
        needed = self._written
        if isinstance(reply, EventsReply):
            # Of what came before, by itself: nothing that others wrote since has to be synced.
            told = [self._completed.get(event.action_id, -1) for event in reply.events]
            needed = max(told) + 1
        if self._synced < needed:
            self.early.append(f"{type(reply).__name__} before {needed - self._synced} writes' sync")


def early_replies(events: Sequence[Event]) -> tuple[int, list[str]]:
    """Count replies that must follow a sync, and name those of which a byte left before it."""
    conversation, order = Conversation(), Order()
    for event in events:
        order.add(conversation, event)
    return order.count, order.early


@pytest.mark.parametrize(("fault", "caught"), [("none", False), ("late_sync", True)])
def test_no_reply_leaves_before_its_sync_by_the_recorders_order(
    quick: Path, fault: str, *, caught: bool
) -> None:
    recorded = record_ledger(quick, seed=1, fault=fault)
    count, early = early_replies(recorded)
    assert count > 20
    assert bool(early) is caught, early
    unsynced = [event for event in recorded if not isinstance(event, Sync)]
    kinds = {each.split()[0] for each in early_replies(unsynced)[1]}
    assert {"AppendBatchReply", "CompleteReply", "CancelReply", "EventsReply"} <= kinds


@pytest.mark.parametrize("fault", ["", "no_sync", "late_sync"])
def test_no_reply_leaves_before_its_sync_by_the_kernels_order(quick: Path, fault: str) -> None:
    """The owner as shipped, watched from outside; and two that the same eye must catch."""
    if shutil.which("strace") is None:
        pytest.skip(
            "strace is not installed; apt-get install strace (the recorder's own order ran)"
        )
    place, trace = quick / "ledger", quick / "strace"
    place.mkdir()
    watched = tuple(word.format(trace=trace) for word in COMMAND)
    program = (*recorder(quick / "trace", place, fault), OWNER[-1]) if fault else OWNER
    if subprocess.run([*watched, "true"], check=False, capture_output=True).returncode:
        pytest.skip("strace may not trace here; allow ptrace (the recorder's own order ran)")
    settings = OwnerSettings(limits=LIMITS)
    watching = start_owner(place, settings=settings, program=(*watched, *program))
    wait_until_published(place, watching)
    workload = Workload(seed=1)
    peer = RawPeer(place)
    workload.enter(peer, "first")
    for _ in range(ROUNDS):
        workload.round(peer)
    peer.close()
    owner = owner_pid(place)
    assert owner is not None
    os.kill(owner, signal.SIGKILL)
    wait_for_end(watching)
    count, early = early_replies(list(read_strace(trace, place)))
    tell(f"{count} replies of synced verbs, {len(early)} early")
    assert count > 10
    assert bool(early) is bool(fault), early
