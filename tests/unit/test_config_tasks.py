from pathlib import Path

import pytest

from stoker.config.tasks import read_tasks
from stoker.errors import TaskInvalid
from stoker.model.task import Task


def file_of(folder: Path, *lines: str | bytes) -> Path:
    file = folder / "tasks.jsonl"
    file.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return file


def refusal(folder: Path, *lines: str | bytes) -> str:
    with pytest.raises(TaskInvalid) as caught:
        read_tasks(file_of(folder, *lines))
    assert "\n" not in caught.value.message
    return caught.value.message


def test_both_forms_and_blank_lines(tmp_path: Path) -> None:
    tasks = read_tasks(
        file_of(
            tmp_path,
            '{"task_id": "a", "data": {"n": 1}, "seed": 7}',
            "",
            '{"n": 2}',
            '{"task_id": "c", "prompt": "p"}',
            '{"data": {"n": 3}}\r',
        )
    )
    assert tasks == (
        Task(task_id="a", data={"n": 1}, seed=7),
        Task(task_id="line-3", data={"n": 2}),
        Task(task_id="c", data={"task_id": "c", "prompt": "p"}),
        Task(task_id="line-5", data={"n": 3}),
    )


def test_the_limit_stops_before_later_lines_are_judged(tmp_path: Path) -> None:
    file = file_of(tmp_path, '{"n": 1}', "not json")
    assert len(read_tasks(file, limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{oops", "not JSON"),
        ('"text"', "this is a text"),
        ("[1]", "this is an array"),
        ('{"n": NaN}', "NaN is not a JSON value"),
        ('{"task_id": 7, "data": {}}', "task_id must be a text"),
        ('{"task_id": "b", "data": 3}', "data must be an object, this is a number"),
        ('{"task_id": "b", "data": {}, "seed": -1}', "seed must be a whole number"),
        ('{"task_id": "a"}', "was used on line 1 already"),
        (b'{"n": "\xff\xfe"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named_by_number_and_the_file_stays(
    tmp_path: Path, line: str | bytes, why: str
) -> None:
    message = refusal(tmp_path, '{"task_id": "a"}', line, '{"task_id": "z"}')
    assert "tasks.jsonl:2: not a task: " in message
    assert why in message
    assert list(tmp_path.iterdir()) == [tmp_path / "tasks.jsonl"]


def test_no_task_and_no_file(tmp_path: Path) -> None:
    assert "holds no task" in refusal(tmp_path, "", "  ")
    with pytest.raises(TaskInvalid, match="cannot be read"):
        read_tasks(tmp_path / "absent.jsonl")
