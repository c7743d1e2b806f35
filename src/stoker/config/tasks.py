"""Read a task file: JSON lines, one immutable task each. A bad line is refused by number.

A line is ``{"task_id": …, "data": {…}, "seed": …}`` or a bare object, which is then the data of a
task named after its ``task_id`` or its line. Nothing is written, so the rest stays untouched.
"""

import json
from pathlib import Path
from typing import Any

from stoker.errors import TaskInvalid
from stoker.model.task import Task

_TASK_KEYS = {"task_id", "data", "seed"}
_SEED_MAX = 2**63 - 1


def read_tasks(path: Path, limit: int | None = None) -> tuple[Task, ...]:
    """Return the first ``limit`` tasks of ``path``, or all; blank lines are skipped.

    Raises:
        TaskInvalid: the caller's: the file cannot be read, a line is not a task, two tasks have
            one name, or there is none.
    """
    tasks: dict[str, Task] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        if limit is not None and len(tasks) >= limit:
            break
        if not line.strip():
            continue
        task = _task(path, number, line)
        if task.task_id in tasks:
            where = lines[task.task_id]
            raise _bad(path, number, f"task_id {task.task_id!r} was used on line {where} already")
        tasks[task.task_id] = task
        lines[task.task_id] = number
    if not tasks:
        raise TaskInvalid(f"The task file {path} holds no task.")
    return tuple(tasks.values())


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except OSError as error:
        raise TaskInvalid(f"The task file {path} cannot be read: {error.strerror}.") from error


def _task(path: Path, number: int, line: bytes) -> Task:
    try:
        value = json.loads(line, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _bad(path, number, f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise _bad(path, number, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _bad(path, number, f"a task is a JSON object, this is {_kind(value)}")
    wrapped = "data" in value and value.keys() <= _TASK_KEYS
    task_id = value.get("task_id", f"line-{number}")
    if not isinstance(task_id, str) or not task_id:
        raise _bad(path, number, "task_id must be a text that is not empty")
    if not wrapped:
        return Task(task_id=task_id, data=value)
    return Task(task_id=task_id, data=_data(path, number, value), seed=_seed(path, number, value))


def _data(path: Path, number: int, value: dict[str, Any]) -> dict[str, Any]:
    data = value["data"]
    if not isinstance(data, dict):
        raise _bad(path, number, f"data must be an object, this is {_kind(data)}")
    return data


def _seed(path: Path, number: int, value: dict[str, Any]) -> int:
    seed = value.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= _SEED_MAX:
        raise _bad(path, number, "seed must be a whole number from 0 to 2**63 - 1")
    return seed


def _bad(path: Path, number: int, why: str) -> TaskInvalid:
    return TaskInvalid(f"{path}:{number}: not a task: {why}.", line=number)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON value")


def _kind(value: object) -> str:
    names = {"list": "an array", "str": "a text", "NoneType": "null", "bool": "a truth value"}
    return names.get(type(value).__name__, "a number")
