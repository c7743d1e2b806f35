"""Every code block in the documents runs, or says why not and is counted among the skips."""

import shutil
from pathlib import Path

import pytest

from support.command import wait_until_quiet
from support.docs import Block, blocks, pages, run
from support.source import ROOT

LEFT_OUT = [block for page in pages() for block in blocks(page) if block.not_run]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_the_documents_show_works(page: Path, tmp_path: Path) -> None:
    examples = ROOT / "examples"
    if examples.is_dir():
        shutil.copytree(examples, tmp_path / "examples")
    try:
        for block in blocks(page):
            if not block.not_run:
                run(block, tmp_path)
    finally:
        wait_until_quiet(tmp_path)


@pytest.mark.parametrize("number", range(max(1, len(LEFT_OUT))))
def test_blocks_that_are_not_run_are_counted(number: int) -> None:
    if LEFT_OUT:
        block = LEFT_OUT[number]
        pytest.skip(f"the code block {block.where} is not run: {block.not_run}")


def test_blocks_are_found_and_told_apart(tmp_path: Path) -> None:
    page = ROOT / "docs" / "glossary.md"
    sample = tmp_path / "page.md"
    sample.write_text(
        "```python title=p.py\nx = 1\n```\n\n<!-- not run: needs a GPU -->\n\n"
        "  ```sh\n  ls\n  ```\n"
        "<!-- not run: stale -->\nwords\n```text\na\n```\n"
    )
    one, two, three = blocks(sample)
    assert (one.language, one.title, one.text) == ("python", "p.py", "x = 1\n")
    assert (two.text, two.not_run) == ("ls\n", "needs a GPU")
    assert not three.not_run
    assert list(blocks(page)) == []


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "raise SystemExit(3)\n"),
        ("sh", "false\n"),
        ("toml", "[run]\nsead = 1\n"),
        ("", ""),
    ],
)
def test_a_block_that_does_not_work_is_found(language: str, text: str, tmp_path: Path) -> None:
    block = Block(ROOT / "README.md", 1, language, "", text, "")
    with pytest.raises(AssertionError, match=r"README\.md:1"):
        run(block, tmp_path)
