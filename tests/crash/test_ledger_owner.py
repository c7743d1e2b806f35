"""The owner process, really killed: every fault point, bad frames, full disk, second owners."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stoker.broker.owner
from stoker.broker.base import (
    CapabilitiesRequest,
    CompleteDisposition,
    JournalRequest,
    LedgerLimits,
)
from stoker.broker.client import connect, owner_pid
from stoker.broker.place import socket_path
from stoker.broker.spawn import OwnerSettings, spawn_owner
from stoker.errors import LedgerStorageFailed, LedgerUnavailable, RunDirectoryUnusable
from stoker.model.action import Effect
from stoker.model.completion import CompletionStatus
from stoker.model.ids import ActionId, Fence
from stoker.seams.faultpoints import TRIED
from support.ledger import BOUND_SECONDS, ROLLOUT, RUN, WORKER, Harness, act, action
from support.ledger_process import (
    RawPeer,
    end_owners,
    refuses_bad_frames,
    start_owner,
    wait_for_end,
    wait_until_published,
)

assert stoker.broker.owner  # importing it declares the owner's fault points

LEDGER_POINTS = sorted(
    name
    for name, tried in TRIED.items()
    if name.startswith("ledger.") and "kill" in tried and name != "ledger.close.before"
)
OPENING = {"ledger.open.before", "ledger.open.after", "ledger.publish"}
CYCLES = 6
FOREIGNER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
try:
    sock.connect(sys.argv[1])
except PermissionError:
    os._exit(8)
os._exit(7 if b"wire_violation" in sock.recv(4096) else 9)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A ledger's directory whose daemon, if any is left, is ended afterwards."""
    yield tmp_path
    end_owners()
    pid = owner_pid(tmp_path)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)


def talk(place: Path, scenario: Callable[[Harness], Awaitable[None]]) -> None:
    async def whole() -> None:
        harness = Harness("owner", place, LedgerLimits())
        await harness.open()
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                await harness.attach()
                await harness.enroll()
                await scenario(harness)
        finally:
            await harness.ledger.close()

    asyncio.run(whole())


class Promises:
    """What the clients were told."""

    def __init__(self) -> None:
        self.accepted: list[ActionId] = []
        self.done: list[ActionId] = []
        self.fences: list[Fence] = []
        self.entries = 0


async def work(h: Harness, promises: Promises) -> None:
    """Run whole cycles, noting each promise the moment it is made."""
    for number in range(CYCLES):
        [disposition] = await h.submit(action(number, effect=Effect.EXTERNAL))
        assert disposition in ("accepted", "duplicate")
        promises.accepted.append(act(number))
        promises.entries = h.seqs[ROLLOUT]
        [lease] = await h.lease(slots=1)
        promises.fences.append(lease.fence)
        await h.start(lease)
        [said] = await h.complete(lease)
        assert said in (CompleteDisposition.OK, CompleteDisposition.ALREADY)
        promises.done.append(act(number))


@pytest.mark.parametrize(
    ("point", "nth"),
    # An owner opens once: its opening points have no sixth or ninth time.
    [(p, nth) for p in LEDGER_POINTS for nth in (1, 6, 9) if p not in OPENING or nth == 1],
)
def test_b6_the_owner_killed_at_every_point_keeps_what_it_promised(
    place: Path, point: str, nth: int
) -> None:
    owner = start_owner(place, f"{point}=kill@{nth}")
    opening = nth == 1 and not point.startswith(
        "ledger.reply."
    )  # reached before anybody can connect
    if not opening:
        wait_until_published(place, owner)
    promises = Promises()

    async def scenario(h: Harness) -> None:
        await work(h, promises)
        results = await h.completed()
        assert sorted(results) == sorted(promises.done) == sorted(promises.accepted)
        assert {r.status for r in results.values()} == {CompletionStatus.OK}
        journal = await h.ledger.journal(JournalRequest(run_id=RUN, rollout_id=ROLLOUT))
        assert len(journal.events) == promises.entries == CYCLES
        assert promises.fences == sorted(set(promises.fences)), "fences never come back"
        assert await h.lease() == [], "nothing is run twice"
        stats = await h.ledger.stats()
        assert stats.attempts_total == CYCLES

    if opening:
        assert wait_for_end(owner) == -signal.SIGKILL, f"{point} was never reached"
        talk(place, scenario)
    else:
        talk(place, scenario)
        assert wait_for_end(owner) == -signal.SIGKILL, f"{point} was never reached"


def test_an_owner_killed_while_it_closes_loses_nothing(place: Path) -> None:
    owner = start_owner(place, "ledger.close.before=kill")
    wait_until_published(place, owner)

    async def before(h: Harness) -> None:
        await h.submit(action(1), action(2))
        [lease] = await h.lease(slots=1)
        await h.start(lease)
        await h.complete(lease)

    talk(place, before)
    owner.terminate()
    assert wait_for_end(owner) == -signal.SIGKILL, "ledger.close.before was never reached"

    async def after(h: Harness) -> None:
        assert list(await h.completed()) == [act(1)]
        [lease] = await h.lease(slots=2)
        assert lease.action.action_id == act(2)

    talk(place, after)


@pytest.mark.parametrize("fault", ["ledger.reply.send=torn@5", "ledger.reply.lost=lost@5"])
def test_b6_replies_that_are_torn_or_lost_are_asked_for_again(place: Path, fault: str) -> None:
    owner = start_owner(place, fault)
    wait_until_published(place, owner)
    promises = Promises()

    async def scenario(h: Harness) -> None:
        await work(h, promises)
        assert sorted(await h.completed()) == sorted(promises.done) == sorted(promises.accepted)
        assert (await h.ledger.stats()).attempts_total == CYCLES

    talk(place, scenario)
    if "torn" in fault:
        assert wait_for_end(owner) == -signal.SIGKILL, f"{fault} was never reached"


def test_killed_at_random_moments_while_many_requests_are_under_way(place: Path) -> None:
    async def scenario(h: Harness) -> None:
        fences: set[Fence] = set()
        done: set[ActionId] = set()
        number = 0
        for _ in range(5):
            submits = [action(number + n) for n in range(20)]
            number += 20
            [pid] = [owner_pid(place)]
            appending = asyncio.create_task(h.append(*submits))
            leasing = asyncio.create_task(h.lease(slots=64))
            await asyncio.sleep(0)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            await appending
            leases = await leasing + await h.lease(slots=64)
            assert not fences & {lease.fence for lease in leases}
            fences |= {lease.fence for lease in leases}
            await h.start(*leases)
            assert len(leases) == 20
            await h.complete(*leases)
            done |= {lease.action.action_id for lease in leases}
        assert set(await h.completed()) == done
        assert len(done) == number

    talk(place, scenario)


def test_b14_bad_frames_close_their_connection_with_a_typed_error_and_the_owner_lives(
    place: Path,
) -> None:
    owner = start_owner(place)
    wait_until_published(place, owner)
    refuses_bad_frames(place)
    owner.terminate()
    assert wait_for_end(owner) == 0


def test_b14_replayed_frames_are_answered_and_applied_once(place: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        [lease] = await h.lease()
        for _ in range(2):
            assert [str(v) for v in await h.start(lease)] == ["ok"]
        assert [str(d) for d in await h.complete(lease)] == ["ok"]
        assert [str(d) for d in await h.complete(lease)] == ["already"]

    talk(place, scenario)


@pytest.mark.root
def test_b14_a_foreign_user_is_refused(place: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become another user; run as root")
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        Path(runtime).chmod(0o755)
        owner = start_owner(place, runtime=runtime)
        wait_until_published(place, owner)
        mine = RawPeer(place)
        published = socket_path(place, {"XDG_RUNTIME_DIR": runtime})
        foreigner = [sys.executable, "-c", FOREIGNER, str(published)]
        assert subprocess.run(foreigner, check=False).returncode == 8, "the directory lets it in"
        published.parent.chmod(0o755)  # the second door: the peer's credentials
        published.chmod(0o777)
        assert subprocess.run(foreigner, check=False).returncode == 7, "no typed refusal"
        assert mine.ask(CapabilitiesRequest()).reply is not None
        mine.close()
        owner.terminate()
        assert wait_for_end(owner) == 0


def test_a_second_owner_ends_quietly(place: Path) -> None:
    owner = start_owner(place)
    wait_until_published(place, owner)
    second = start_owner(place)
    assert wait_for_end(second) == 0
    assert owner_pid(place) == owner.pid
    spawn_owner(place, OwnerSettings())
    assert owner_pid(place) == owner.pid
    owner.terminate()
    assert wait_for_end(owner) == 0
    assert owner_pid(place) is None


def test_an_owner_killed_as_it_starts_is_started_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the soak (seed 11): the blow hit the starter and ended the coordinator."""
    true, starts = subprocess.run, []

    def killed_once(command: list[str], **more: Any) -> Any:
        starts.append(command)
        if len(starts) == 1:
            return subprocess.CompletedProcess(command, -signal.SIGKILL, b"", b"")
        return true(command, **more)

    monkeypatch.setattr("stoker.broker.spawn.subprocess.run", killed_once)

    async def scenario(h: Harness) -> None:
        assert await h.submit(action(1)) == ["accepted"]

    talk(place, scenario)
    assert len(starts) > 1


def test_an_owner_nobody_uses_ends_by_itself(place: Path) -> None:
    owner = start_owner(place, settings=OwnerSettings(idle_exit_seconds=0.2))
    assert wait_for_end(owner) == 0


@pytest.mark.parametrize(
    ("nth", "verb"), [(5, "submit"), (6, "lease"), (7, "complete"), (12, "lease")]
)
def test_b12_a_full_disk_rejects_the_group_and_the_owner_goes_on(
    place: Path, nth: int, verb: str
) -> None:
    owner = start_owner(place, f"ledger.commit.before=disk_full@{nth}")
    wait_until_published(place, owner)
    rejected: list[tuple[str, str]] = []

    async def until_done(verb: str, do: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                return await do()
            except LedgerStorageFailed as error:
                rejected.append((verb, str(error)))

    async def scenario(h: Harness) -> None:
        for number in range(6):
            await until_done("submit", lambda n=number: h.submit(action(n)))  # type: ignore[misc]
            leases = await until_done("lease", h.lease)
            await until_done("complete", lambda held=leases: h.complete(*held))  # type: ignore[misc]
        assert await h.lease() == []
        journal = await h.ledger.journal(JournalRequest(run_id=RUN, rollout_id=ROLLOUT))
        assert len(journal.events) == 6, "nothing half-written"

    talk(place, scenario)
    [(refused, said)] = rejected
    assert refused == verb
    assert "full" in said, "with the reason"
    assert owner.poll() is None, "the owner lives"
    owner.terminate()
    assert wait_for_end(owner) == 0


@pytest.mark.root
def test_b12_a_really_full_disk(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small tmpfs; run as root with CAP_SYS_ADMIN")
    try:
        ballast = place / "ballast"
        ballast.write_bytes(bytes(700_000))

        async def scenario(h: Harness) -> None:
            accepted: list[ActionId] = []
            number = 0
            while True:
                try:
                    await h.submit(action(number, bytes(16_000)))
                except LedgerStorageFailed:
                    break
                accepted.append(act(number))
                number += 1
                assert number < 1_000, "the disk never filled up"
            ballast.unlink()
            assert await h.submit(action(number, bytes(16_000))) == ["accepted"]
            leases = await h.lease(slots=1_000)
            assert [one.action.action_id for one in leases] == [*accepted, act(number)]
            journal = await h.ledger.journal(JournalRequest(run_id=RUN, rollout_id=ROLLOUT))
            assert len(journal.events) == len(accepted) + 1

        talk(place, scenario)
    finally:
        pid = owner_pid(place)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_b16_the_start_of_an_external_action_is_synced_before_its_reply(place: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2, effect=Effect.EXTERNAL))
        plain, external = await h.lease()
        before = (await h.ledger.stats()).syncs_total
        await h.start(plain)
        between = (await h.ledger.stats()).syncs_total
        await h.start(external)
        after = (await h.ledger.stats()).syncs_total
        assert (between - before, after - between) == (0, 1)
        await h.start(external)
        assert (await h.ledger.stats()).syncs_total == after, "a repetition needs no sync"

    talk(place, scenario)


def test_without_an_owner_a_client_that_may_not_spawn_gives_up(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.broker.client.RECONNECT_SECONDS", 0.2)

    async def scenario() -> None:
        with pytest.raises(LedgerUnavailable):
            await connect(place, role="test", spawn=False)

    asyncio.run(scenario())
    assert list(place.iterdir()) == []


def test_a_place_that_cannot_hold_a_ledger_is_refused_at_once() -> None:
    async def scenario() -> None:
        with pytest.raises(RunDirectoryUnusable):
            await connect(Path("/proc/stoker"), role="test")

    asyncio.run(scenario())


def test_the_worker_keeps_its_lease_while_the_owner_is_replaced(place: Path) -> None:
    async def scenario(h: Harness) -> None:
        await h.submit(action(1))
        [lease] = await h.lease()
        await h.start(lease)
        first = owner_pid(place)
        await h.crash()
        assert [str(v) for v in await h.heartbeat(lease)] == ["ok"]
        assert owner_pid(place) not in (None, first)
        assert [str(d) for d in await h.complete(lease, worker=WORKER)] == ["ok"]

    talk(place, scenario)


def test_leases_whose_reply_was_lost_are_delivered_again_under_their_fence(place: Path) -> None:
    # Commits: opening, capabilities, attach, enroll, append; the sixth grants the lease.
    owner = start_owner(place, "ledger.commit.after=kill@6")
    wait_until_published(place, owner)

    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        granted = await h.lease(slots=2)
        assert [one.action.action_id for one in granted] == [act(1), act(2)]
        assert {one.delivery for one in granted} == {1}, "the same delivery, not another one"
        assert {str(verdict) for verdict in await h.start(*granted)} == {"ok"}

    talk(place, scenario)
    assert wait_for_end(owner) == -signal.SIGKILL
