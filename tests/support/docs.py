"""Code blocks of the documents: found, told apart, and run as a reader would.

A block says its language. ``python title=program.py`` is saved under that name for the blocks
after it; a block after ``<!-- not run: reason -->`` is not run and is counted.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support.source import ROOT

SECONDS_MAX = 120
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
_MARK = re.compile(r"<!--\s*not run:\s*(?P<reason>.+?)\s*-->")
SHOWN = {"text", "mermaid", "console"}
"""Languages that are looked at, not run."""


class Block(NamedTuple):
    """One fenced block."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    not_run: str
    """Why it is not run; empty when it is."""

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Return every document."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of ``page``."""
    mark = ""
    opened: tuple[int, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if opened is not None:
            if fence is None:
                body.append(line.removeprefix(opened[2]))
                continue
            start, info, _ = opened
            words = info.split()
            title = next((w.removeprefix("title=") for w in words if w.startswith("title=")), "")
            language = words[0] if words else ""
            yield Block(page, start, language, title, "\n".join(body) + "\n", mark)
            opened, body, mark = None, [], ""
        elif fence is not None:
            opened = (number, fence["info"], fence["indent"])
        elif found := _MARK.search(line):
            mark = found["reason"]
        elif line.strip():
            mark = ""


def run(block: Block, folder: Path) -> None:
    """Run ``block`` in ``folder``; an ``AssertionError`` shows what went wrong."""
    if block.title:
        (folder / block.title).write_text(block.text, encoding="utf-8")
    elif block.language == "python":
        execute([sys.executable, "-c", block.text], block, folder)
    elif block.language in {"sh", "bash"}:
        execute(["bash", "-euo", "pipefail", "-c", block.text], block, folder)
    elif block.language == "toml":
        tomllib.loads(block.text)
        settings = folder / "block.toml"
        settings.write_text(block.text, encoding="utf-8")
        execute(["stoker", "config", "check", str(settings)], block, folder)
    else:
        assert block.language in SHOWN, f"{block.where}: say its language, or that it is text"


def execute(command: list[str], block: Block, folder: Path) -> None:
    """Run one command with the environment of a reader who has installed Stoker."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path, "NO_COLOR": "1"},
        capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.where}\n{block.text}\n{done.stdout}{done.stderr}"
