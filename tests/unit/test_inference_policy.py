from pathlib import Path

import pytest

from stoker.errors import ConfigInvalid, ProgramRaised
from stoker.inference.open import open_model
from stoker.inference.policy import Answer, AnswerCall, load_policy
from support.inference import request


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_jsonl_gives_a_turn_per_step_and_repeats_the_last(tmp_path: Path) -> None:
    policy = load_policy(
        _file(
            tmp_path,
            "p.jsonl",
            '{"task_id": "a", "turns": ["one", {"text": "two", "tool_calls": '
            '[{"name": "run", "arguments": {"x": 1}}, {"name": "run", "arguments": "{not json"}]}]}'
            '\n\n{"task_id": "*", "turns": ["any"]}\n',
        )
    )
    assert policy.answer(request(task="a")) == Answer(text="one")
    second = Answer(
        text="two",
        tool_calls=(
            AnswerCall(name="run", arguments={"x": 1}),
            AnswerCall(name="run", arguments="{not json"),
        ),
    )
    assert policy.answer(request(task="a", step=1)) == second
    assert policy.answer(request(task="a", step=7)) == second
    assert policy.answer(request(task="b")) == Answer(text="any")


def test_toml_and_python_say_the_same(tmp_path: Path) -> None:
    table = load_policy(
        _file(tmp_path, "p.toml", '"*" = ["x", {text = "y", tool_calls = [{name = "run"}]}]')
    )
    function = load_policy(
        _file(
            tmp_path,
            "p.py",
            "def answer(request):\n"
            "    return ['x', {'text': 'y', 'tool_calls': [{'name': 'run'}]}][request.step]\n",
        )
    )
    for step in (0, 1):
        assert table.answer(request(step=step)) == function.answer(request(step=step))


def test_a_task_without_turns_is_refused_by_name(tmp_path: Path) -> None:
    policy = load_policy(_file(tmp_path, "p.jsonl", '{"task_id": "a", "turns": ["one"]}'))
    with pytest.raises(ConfigInvalid, match="no turns for task 'b'"):
        policy.answer(request(task="b"))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.jsonl", '{"task_id": "a", "turns": ["x"]}\n{"task": 1}', "line 2"),
        ("p.jsonl", '{"task_id": "a", "turns": []}', "empty"),
        ("p.jsonl", '{"task_id": "a", "turns": ["x"]}\n{"task_id": "a", "turns": ["y"]}', "second"),
        ("p.toml", "a = [1]", "Expected"),
        ("p.toml", "a = [", "p.toml"),
        ("p.py", "x = 1", "no function answer"),
        ("p.py", "import nowhere_at_all", "ModuleNotFoundError"),
        ("p.yaml", "", "none of .py"),
        ("p.jsonl", '{"task_id": "a", "turns": [{"txt": "x"}]}', "txt"),
    ],
)
def test_an_unusable_file_says_where(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        load_policy(_file(tmp_path, name, text))


def test_a_policy_that_raises_fails_the_rollout_typed(tmp_path: Path) -> None:
    policy = load_policy(_file(tmp_path, "p.py", "def answer(request):\n    return 1 / 0\n"))
    with pytest.raises(ProgramRaised, match="ZeroDivisionError"):
        policy.answer(request())
    odd = load_policy(_file(tmp_path, "q.py", "def answer(request):\n    return 7\n"))
    with pytest.raises(ConfigInvalid, match="not usable"):
        odd.answer(request())


def test_open_model_names_what_exists(tmp_path: Path) -> None:
    _file(tmp_path, "p.jsonl", '{"task_id": "*", "turns": ["x"]}')
    _file(tmp_path, "d.toml", 'policy = "scripted:p.jsonl"\na = "25ms"\nwindow = 8\n')
    assert open_model("scripted:p.jsonl", base=tmp_path).info().name == "scripted:p.jsonl"
    info = open_model("sim:d.toml", base=tmp_path).info()
    assert (info.name, info.simulated, info.replicas[0].window) == ("sim:d", True, 8)
    for spec in ("scripted", "scripted:", "nonsense:p", "http"):
        with pytest.raises(ConfigInvalid, match=r"scripted:FILE .* sim:PROFILE .* http://HOST"):
            open_model(spec, base=tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("window = 1", "a: Field required"),
        ('a = "25 parsecs"\nwindow = 1', "no quantity"),
        ("a = 1\nwindow = 1\nwindows = 2", "unknown key 'windows'; allowed are a, "),
        ("a = 1\nwindow = 1\n[faults]\ntimeout = 1", "unknown key 'faults.timeout'; allowed are b"),
        ("a = 1\nwindow = 1\n[faults]\nhang = 0.6\nlate = 0.6", "more than 1"),
    ],
)
def test_an_unusable_profile_names_the_key(tmp_path: Path, text: str, says: str) -> None:
    path = _file(tmp_path, "d.toml", f'policy = "scripted:p.jsonl"\n{text}\n')
    with pytest.raises(ConfigInvalid, match=says):
        open_model(f"sim:{path.name}", base=tmp_path)


def test_a_scaled_clock_stands_in_the_name(tmp_path: Path) -> None:
    _file(tmp_path, "p.jsonl", '{"task_id": "*", "turns": ["x"]}')
    _file(tmp_path, "d.toml", 'policy="scripted:p.jsonl"\na=1\nwindow=1\ntime_scale=0.1\n')
    assert open_model("sim:d.toml", base=tmp_path).info().name == "sim:d (time x0.1)"
