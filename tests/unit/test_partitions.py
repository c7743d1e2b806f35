"""Into what a run is divided, and what its coordinators share."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.config.tree import AdmissionSettings, LedgerSettings, Settings
from stoker.coordinator.admission import Admission
from stoker.coordinator.agreement import require_same_run, require_usable
from stoker.coordinator.common import CommonLedger
from stoker.coordinator.divided import execute_all, resumable
from stoker.coordinator.partition import Partition, divided, partition_of
from stoker.coordinator.record import RunDirectory
from stoker.coordinator.request import Observer, RunReport, RunRequest
from stoker.coordinator.sharing import Membership, Part, is_running
from stoker.coordinator.view import RunSnapshot
from stoker.coordinator.whole import merged
from stoker.errors import BadInput, ConfigInvalid, LedgerUnavailable, RunChanged, RunOwned
from stoker.model.ids import RunId
from stoker.model.task import Task
from stoker.testing.virtual_clock import VirtualClock
from support.records import RECORD
from support.snapshots import LANE, SNAPSHOT

RUN = RunId("run_1")
BOUND = 60.0


@given(
    names=st.lists(st.text(min_size=1), unique=True, max_size=40),
    count=st.integers(1, 8),
    run=st.text(min_size=1).map(RunId),
)
def test_every_group_is_dealt_to_one_partition_and_no_two_differ_by_more_than_one(
    names: list[str], count: int, run: RunId
) -> None:
    tasks = tuple(Task(task_id=name, data={}) for name in names)
    hands = [one.hand(run, tasks) for one in divided(count)]
    dealt = [task.task_id for hand in hands for task in hand]
    assert sorted(dealt) == sorted(names)
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    for one, hand in zip(divided(count), hands, strict=True):
        assert list(hand) == [task for task in tasks if task in hand], "in the order of the file"
        again = {task.task_id for task in one.hand(run, tasks[::-1])}
        assert again == {task.task_id for task in hand}, "whatever the order of the file"


def test_the_hand_is_the_same_in_every_release() -> None:
    """A run that was begun by an older version is resumed by a newer one."""
    tasks = tuple(Task(task_id=f"t{number}", data={}) for number in range(6))
    hands = [[task.task_id for task in one.hand(RUN, tasks)] for one in divided(2)]
    assert hands == [["t2", "t3", "t5"], ["t0", "t1", "t4"]]


@given(total=st.integers(0, 1000), count=st.integers(1, 20))
def test_shares_make_the_whole(total: int, count: int) -> None:
    shares = [one.share(total) for one in divided(count)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


def test_each_coordinator_of_a_host_has_its_own_metrics_port() -> None:
    assert [one.port(9000) for one in divided(3)] == [9000, 9001, 9002]
    assert [one.port(0) for one in divided(3)] == [0, 0, 0], "any free one"
    with pytest.raises(BadInput, match="metrics port 65536"):
        Partition(1, 2).port(65_535)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1", "write INDEX/COUNT"),
        ("a/4", "write INDEX/COUNT"),
        ("-1/4", "write INDEX/COUNT"),
        ("4/4", "those of 4 are 0/4 to 3/4"),
        ("0/0", "1 to 1024 partitions, not 0"),
        ("0/1025", "1 to 1024 partitions, not 1025"),
    ],
)
def test_what_is_no_partition_is_refused(text: str, said: str) -> None:
    assert partition_of("1/4") == Partition(1, 4)
    with pytest.raises(BadInput, match=said):
        partition_of(text)


def request(folder: Path, **fields: Any) -> RunRequest:
    asked = RunRequest(
        program=folder / "p.py", program_name=None, tasks=folder / "t.jsonl", model="sim:x",
        settings=Settings(), runs_directory=folder,
    )  # fmt: skip
    return msgspec.structs.replace(asked, **fields)


def test_a_part_needs_a_run_to_be_part_of(tmp_path: Path) -> None:
    part = Partition(1, 2)
    require_usable(request(tmp_path, partition=part, run_id=RUN))
    require_usable(request(tmp_path, partition=part, resume=RUN))
    with pytest.raises(BadInput, match=r"of which run.*--run-id RUN"):
        require_usable(request(tmp_path, partition=part))
    for name in ("", "a/b", "..", "-x", "x" * 65, "a\nb"):
        with pytest.raises(BadInput, match="cannot be the id of a run"):
            require_usable(request(tmp_path, run_id=RunId(name)))


def test_another_number_of_partitions_is_another_run(tmp_path: Path) -> None:
    record = msgspec.structs.replace(RECORD, partitions=2)
    require_same_run(request(tmp_path, partition=Partition(1, 2)), record)
    with pytest.raises(RunChanged, match=r"made with 2 partitions, not with 3.*--partition 0/2"):
        require_same_run(request(tmp_path, partition=Partition(1, 3)), record)
    with pytest.raises(RunChanged, match=r"made with 2 partitions, not with 1"):
        require_same_run(request(tmp_path), record)
    with pytest.raises(RunChanged, match=r"made with 1 partition, not with 2.*name none"):
        require_same_run(request(tmp_path, partition=Partition(1, 2)), RECORD)


def test_the_record_of_an_undivided_run_does_not_speak_of_partitions() -> None:
    assert b"partitions" not in msgspec.json.encode(RECORD)
    assert RECORD.partition_count == 1
    assert b"partition" not in msgspec.json.encode(SNAPSHOT)


def test_boxes_are_divided_and_a_share_that_is_too_small_is_told() -> None:
    settings = AdmissionSettings(boxes_max=5)
    first, second = (Admission(settings, VirtualClock(), one) for one in divided(2))
    first.require_fit(3)
    with pytest.raises(ConfigInvalid, match=r"of which partition 1/2 has 2.*boxes_max to 6 or"):
        second.require_fit(3)
    assert second.may_admit(0, boxes_reserved=0, boxes_needed=2) is None
    held = second.may_admit(1, boxes_reserved=2, boxes_needed=1)
    assert held is not None
    assert "2 of 2 boxes" in held


def test_the_last_to_leave_ends_what_was_shared_and_holds_off_who_comes_next(
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path / "runs" / RUN)

    async def scenario() -> None:
        first, second, third = (Membership(run, one) for one in divided(3))
        await first.join()
        await second.join()
        assert not first.leave()
        assert second.leave()
        assert not first.leave(), "asked again, the answer is the same"
        joining = asyncio.create_task(third.join())
        done, _ = await asyncio.wait({joining}, timeout=0.2)
        assert not done, "the last one is still tidying up"
        second.close()
        async with asyncio.timeout(BOUND):
            await joining
        assert third.leave()
        third.close()
        first.close()

    asyncio.run(scenario())


def test_who_waits_for_a_run_that_was_removed_makes_it_anew(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / RUN)

    async def scenario() -> None:
        first, second = (Membership(run, one) for one in divided(2))
        await first.join()
        assert first.leave()
        joining = asyncio.create_task(second.join())
        await asyncio.sleep(0)
        (run.path / "run.lock").unlink()
        async with asyncio.timeout(BOUND):
            await joining  # not held off by a lock on a file that is gone
        first.close()
        assert second.leave()
        second.close()

    asyncio.run(scenario())


def test_the_record_is_settled_by_one_at_a_time(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / RUN)
    inside: list[int] = []

    async def settle(number: int, one: Partition) -> None:
        member = Membership(run, one)
        await member.join()
        async with member.turn():
            inside.append(number)
            assert len(inside) == 1, "alone with the record"
            await asyncio.sleep(0)
            inside.remove(number)
        member.close()

    async def scenario() -> None:
        async with asyncio.timeout(BOUND):
            await asyncio.gather(*(settle(n, one) for n, one in enumerate(divided(5))))

    asyncio.run(scenario())


def test_each_part_has_one_owner_also_within_one_process(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / RUN)
    run.create()
    part, other = (Part(run, one) for one in divided(2))
    with part.owned(), other.owned():
        assert part.holder()
        with pytest.raises(RunOwned, match=r"partition 0/2 of the run in .* living process \d+"):
            Part(run, Partition(0, 2)).owned().__enter__()
    assert not part.holder()


def test_a_member_names_the_others_that_live(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / RUN)
    run.create()
    mine, theirs = divided(2)
    with Part(run, mine).owned():
        assert Membership(run, mine).others() == []
        with Part(run, theirs).owned():
            (said,) = Membership(run, mine).others()
            assert said.startswith("1/2 (process ")


def test_coordinators_that_begin_a_run_agree_on_whose_ledger_it_is(tmp_path: Path) -> None:
    """The first one gave no shared ledger and has made the directories; there is no record yet."""
    run = RunDirectory(tmp_path / "runs" / RUN)
    place = str(tmp_path / "place")
    settings = Settings(ledger=LedgerSettings(directory=place))
    shared = CommonLedger.of(run, settings, fresh=True)
    assert shared.place is not None
    again = CommonLedger.of(run, settings, fresh=True)
    assert again.place is not None
    assert (shared.place.path, again.place.path) == (Path(place), Path(place))
    other = RunDirectory(tmp_path / "runs" / "other")
    other.create()
    with pytest.raises(RunChanged, match="has a ledger of its own"):
        CommonLedger.of(other, settings, fresh=True)


def test_a_resume_of_all_takes_the_parts_that_nobody_runs(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / RUN)
    run.create()
    run.write_record(msgspec.structs.replace(RECORD, partitions=2))
    first, second = divided(2)
    assert (resumable(run), is_running(run)) == ((first, second), False)
    with Part(run, first).owned():
        assert (resumable(run), is_running(run)) == ((second,), True)
        with (
            Part(run, second).owned(),
            pytest.raises(RunOwned, match=r"all .* are owned: 0/2 by process \d+, 1/2 by process"),
        ):
            resumable(run)


def test_a_part_that_breaks_does_not_end_those_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    async def executed(asked: RunRequest, *, observer: Observer, stop: None) -> RunReport:
        assert stop is None
        if asked.partition.index == 0:
            raise LedgerUnavailable("gone")
        await asyncio.sleep(0)
        observer(SNAPSHOT)
        ended.append(str(asked.partition))
        return RunReport(snapshot=SNAPSHOT, resumable=False)

    monkeypatch.setattr("stoker.coordinator.divided.execute", executed)
    seen: list[RunSnapshot] = []
    with pytest.raises(LedgerUnavailable):
        asyncio.run(execute_all(request(tmp_path), divided(3), observer=seen.append))
    assert ended == ["1/3", "2/3"]
    assert [one.rollouts_total for one in seen] == [164, 328], "of all parts so far"


def test_snapshots_of_parts_make_one_of_the_run() -> None:
    """Half the figures in each, so that the whole can be told from either."""
    other = msgspec.structs.replace(
        SNAPSHOT,
        partition="1/2",
        state="finished",
        outcomes={"completed": 2},
        reward_mean=0.0,
        lane=msgspec.structs.replace(LANE, window=0, running=1, calls=5),
        latency_ms_p99=None,
        rollouts_total=4,
        faults={"box_failed": 1, "tool_failed": 1},
    )
    whole = merged([other, SNAPSHOT])
    assert (whole.state, whole.rollouts_total) == ("running", SNAPSHOT.rollouts_total + 4)
    assert whole.outcomes == {"completed": 100, "failed": 2, "truncated": 20}
    assert whole.reward_mean == pytest.approx(0.8125 * 0.98)
    assert whole.lane.calls == LANE.calls + 5
    assert whole.lane.active_share == pytest.approx(LANE.active_share), "weighted by window"
    assert whole.latency_ms_p99 == SNAPSHOT.latency_ms_p99
    assert whole.faults == {"box_failed": 3, "tool_failed": 1}
    assert whole.classes == SNAPSHOT.classes, "the workers are the run's, seen by each part alike"
    assert whole.partition == ""
    assert merged([other, other]).state == "finished"
