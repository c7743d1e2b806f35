"""What a resume must agree with, and how a run is found."""

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from stoker.config.tree import Settings
from stoker.coordinator.agreement import differences
from stoker.coordinator.record import (
    RunRecord,
    changed_settings,
    find_run,
    require_same_tasks,
)
from stoker.errors import RunChanged, RunNotFound
from stoker.model.ids import RunId
from stoker.model.value import content_digest

RECORD = RunRecord(
    run_id=RunId("run_1"), stoker_version="0", created=0.0, program="p.py", program_name="p",
    program_version="1", program_digest="", model="sim:x", model_digest="",
    tasks_digest=content_digest(b"{}\n"), tasks_count=1, settings={}, settings_digest="",
)  # fmt: skip


def test_settings_that_differ_are_named_with_both_values() -> None:
    before = {"run": {"seed": 0}, "workers": {"classes": {"fast": {"slots": 2, "mounts": []}}}}
    now = {"run": {"seed": 0}, "workers": {"classes": {"fast": {"slots": 3, "mounts": []}}}}
    assert changed_settings(before, before) == []
    assert changed_settings(before, now) == [
        "workers.classes.fast.slots (recorded 2, given 3)",
    ]
    assert changed_settings({"a": 1}, {"a": 1, "b": {"c": 2}}) == ["b (given, not recorded)"]
    assert changed_settings({"b": {"c": 2}}, {}) == ["b (recorded, not given)"]


def test_other_tasks_are_refused_and_a_file_that_is_gone_is_not(tmp_path: Path) -> None:
    given = tmp_path / "tasks.jsonl"
    require_same_tasks(given, RECORD)
    given.write_bytes(b"{}\n")
    require_same_tasks(given, RECORD)
    given.write_bytes(b"{}\n{}\n")
    with pytest.raises(RunChanged, match=r"other tasks than .*tasks\.jsonl holds now; nothing was"):
        require_same_tasks(given, RECORD)


def test_the_latest_runs_are_those_begun_last_whatever_they_are_called(tmp_path: Path) -> None:
    for second, name in enumerate(["run_z", "run_d", "run_a", "run_c"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
        os.utime(tmp_path / name / "run.json", (second, second))
    with pytest.raises(RunNotFound, match=r"the latest there: run_c, run_a, run_d$"):
        find_run("nope", tmp_path)


def test_a_setting_that_came_since_is_no_difference_and_a_changed_one_is() -> None:
    tree = Settings().model_dump(mode="json")
    before = json.loads(json.dumps(tree))
    for one in before["workers"]["classes"].values():
        del one["service"]
    for one in before["sandbox"]["baselines"].values():
        del one["files"], one["setup"]
    was = replace(RECORD, settings=before, settings_digest="then")
    assert differences(was, replace(RECORD, settings=tree, settings_digest="now")) == []
    tree["run"]["seed"] = 7
    [said] = differences(was, replace(RECORD, settings=tree, settings_digest="now"))
    assert said.startswith("setting run.seed (recorded ")
    before["run"]["gone"] = 1
    both = differences(was, replace(RECORD, settings=tree, settings_digest="now"))
    assert "setting run.gone (recorded 1, given None)" in both
