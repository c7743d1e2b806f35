import json
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.cli.export import Agreement, Format, _opener
from stoker.errors import BadInput
from stoker.export.files import replacing
from stoker.export.rows import FinishedRollout, Row, read_rollout
from stoker.model.events import Admitted
from stoker.model.generation import Generation, ToolCall
from stoker.model.tools import RunResult, Stream
from support.exports import Asked, fetch, rows, sampled
from support.journals import WHOLE

BYTES = bytes(range(256)) + "½".encode()[:1] + b"\x1b[2J\xed\xa0\x80"
"""Every byte value, half a character, an escape sequence, an encoded surrogate."""


def awkward() -> list[Row]:
    seen = RunResult(exit_code=0, stdout=Stream(kept=BYTES, total_bytes=len(BYTES))).text
    answer = Generation(
        text="\0 \x1b[31m \u2028 \U0001f600",
        prompt_ids=b"\1\0\0\0",
        token_ids=b"\2\0\0\0",
        tool_calls=(
            ToolCall(call_id="c", name="t", arguments={"x": float("nan")}, raw='{"x": NaN}'),
            ToolCall(call_id="d", name="t", arguments={"y": "\0½"}),
            ToolCall(call_id="e", name="t", error="not JSON", raw="{"),
        ),
    )
    first = rows([Asked("0", None, sampled([5, 6], [7])), Asked("1", "0", answer, said=seen)])
    odd = msgspec.structs.replace(first[0], logprobs=array("f", [0.0, 0.0, float("-inf")]))
    return [odd, *first[1:]]


def write(path: Path, kind: Format, content: list[Row]) -> None:
    with replacing(path) as file, closing(_opener(kind)(file)) as writer:
        for row in content:
            writer.write(row)


def read_lines(path: Path) -> list[Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = path.read_bytes().decode("utf-8").split("\n")
    return [json.loads(line, parse_constant=refuse) for line in lines if line]


def read_parquet(path: Path) -> list[Any]:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'stoker[export]'")
    maps = ("metrics", "policy_digests", "baseline_digests")
    return [
        row | {name: dict(row[name]) for name in maps}
        for row in parquet.read_table(path).to_pylist()
    ]


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_a10_any_bytes_a_tool_wrote_load_again_as_json_lines(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", Format.JSONL, awkward())
    first, second = read_lines(tmp_path / "rows.jsonl")
    assert first["logprobs"] == [0.0, 0.0, None]
    said, answer = second["messages"][-2:]
    assert "\0\x01\x02" in said["content"]
    assert "\ufffd" in said["content"], "what is not UTF-8 is marked, not dropped"
    assert answer["content"] == "\0 \x1b[31m \u2028 \U0001f600"
    calls = answer["tool_calls"]
    assert [call["arguments"] for call in calls] == ['{"x": NaN}', '{"y": "\\u0000\\u00bd"}', "{}"]
    assert calls[2]["error"] == "not JSON"


def test_a10_parquet_holds_what_json_lines_hold(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", Format.JSONL, awkward())
    pytest.importorskip("pyarrow", reason="pip install 'stoker[export]'")
    write(tmp_path / "rows.parquet", Format.PARQUET, awkward())
    assert read_parquet(tmp_path / "rows.parquet") == read_lines(tmp_path / "rows.jsonl")


def test_parquet_is_written_in_groups_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("stoker.export.parquet", reason="pip install 'stoker[export]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(module, "GROUP_ROWS", 4)
    (row,) = rows([Asked("0", None, sampled([1], [2]))])
    write(tmp_path / "rows.parquet", Format.PARQUET, [row] * 10)
    file = parquet.ParquetFile(tmp_path / "rows.parquet")
    assert file.metadata.num_rows == 10
    assert file.metadata.num_row_groups == 3
    assert file.schema_arrow.metadata[b"stoker.export"] == b"1"


def test_a_run_without_rows_is_a_readable_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'stoker[export]'")
    write(tmp_path / "rows.parquet", Format.PARQUET, [])
    assert read_parquet(tmp_path / "rows.parquet") == []


def test_without_pyarrow_a_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "stoker.export.parquet", None)
    with pytest.raises(BadInput, match=r"pip install pyarrow"):
        _opener(Format.PARQUET)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "rows.jsonl"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(target) as file:
        file.write(b"half" * (1 // 0))
    assert target.read_text() == "old"
    with replacing(target) as file:
        file.write(b"new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert names(tmp_path) == ["rows.jsonl"], "no draft is left"


def test_a_failing_disk_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "rows.jsonl"
    target.write_text("old")
    with pytest.raises(OSError, match="nothing was written"), replacing(target):
        raise OSError(28, "No space left on device")
    assert target.read_text() == "old"
    assert names(tmp_path) == ["rows.jsonl"]


def test_a_link_keeps_being_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "there" / "rows.jsonl")
    with replacing(tmp_path / "rows.jsonl") as file:
        file.write(b"new")
    assert (tmp_path / "rows.jsonl").is_symlink()
    assert (tmp_path / "there" / "rows.jsonl").read_text() == "new"


@pytest.mark.parametrize(
    "target", ["nowhere/rows.jsonl", "file/rows.jsonl", "folder", "/dev/null", "loop", "/proc/rows"]
)
def test_a_target_that_cannot_be_written_is_named(target: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = names(tmp_path)
    with (
        pytest.raises(BadInput, match=r"cannot be written .*; nothing was exported"),
        replacing(tmp_path / target),
    ):
        pass
    assert names(tmp_path) == before
    assert Path("/dev/null").is_char_device()


def changed(**fields: Any) -> FinishedRollout:
    admitted = WHOLE[0]
    assert isinstance(admitted, Admitted)
    other = msgspec.structs.replace(admitted, rollout_id="rol_other", **fields)
    return read_rollout([other, *WHOLE[1:]], fetch)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (changed(program_digest="cd" * 32), "program repair is abababab"),
        (changed(policy_digests={"fast": "2"}), "execution policy of class fast is 1 in"),
        (
            msgspec.structs.replace(changed(), baselines={"python": "other"}),
            "baseline python is b in",
        ),
    ],
)
def test_mixed_digests_are_refused_with_both_sides(other: FinishedRollout, what: str) -> None:
    agreement = Agreement()
    agreement.require(changed(policy_digests={"fast": "1"}))
    agreement.require(changed(policy_digests={"fast": "1"}))
    agreement.require(changed(policy_digests={"slow": "3"}))  # a class it did not have is no change
    with pytest.raises(BadInput, match=what) as refused:
        agreement.require(other)
    assert "--mixed" in refused.value.message
    assert "rol_other" in refused.value.message
