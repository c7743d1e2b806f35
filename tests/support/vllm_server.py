"""A real vLLM server as a process group of ours: started, frozen, killed, and gone afterwards.

Used by ``make rig-vllm`` and by the tests it runs. The group holds everything the server starts
(its engine and workers), so that a signal reaches all of it and nothing else. Weights are served
from a folder of hard links: a test that rewrites them changes the server's, never the cached ones.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import msgspec

NAME = "smol"
"""Served model name."""
START_SECONDS_MAX = 600.0
GONE_SECONDS_MAX = 30.0
FLAGS = (
    "--host", "127.0.0.1", "--served-model-name", NAME, "--dtype", "float32", "--enforce-eager",
    "--enable-prefix-caching",
)  # fmt: skip
"""float32, so that another engine can be compared token by token."""
MAIN = (
    "--max-model-len", "2048", "--max-num-seqs", "64", "--scheduling-policy", "priority",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out",
)  # fmt: skip
SMALL = ("--max-model-len", "512", "--max-num-seqs", "8", "--num-gpu-blocks-override", "10")
"""No tool parser, no priorities; with eight calls of two blocks its cache is too small."""
ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # threads that wait for each other on a busy machine cost tenfold
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class Rig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the real vLLM is; the tests are given it as JSON in ``STOKER_RIG_VLLM``."""

    python: str
    """Interpreter that has vLLM, torch and transformers."""
    model: str
    """Folder of the weights; never written to."""
    url: str
    """The main server."""
    pid: int
    """Its first process, which leads its group."""
    folder: str
    """The weights it serves; tests may rewrite them."""
    log: str
    versions: dict[str, str] = {}


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A server that was started here."""

    url: str
    pid: int
    folder: Path
    """The weights it serves."""
    log: Path

    def freeze(self) -> None:
        """Stop it where it stands: connections stay, nothing is answered."""
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End all of it at once, as the kernel does when memory runs out."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill_engine(self) -> None:
        """End what computes; what listens is left to notice."""
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in _group(self.pid)}
        (engine,) = (pid for pid, name in names.items() if name == "VLLM::EngineCor")
        os.kill(engine, signal.SIGKILL)

    def alive(self) -> bool:
        """Whether any process of it is left that is not a zombie."""
        return any(_group(self.pid))

    def get(self, path: str) -> str:
        """Return the text at ``path``."""
        with urlopen(self.url + path, timeout=GONE_SECONDS_MAX) as reply:
            return str(reply.read().decode())

    def post(self, path: str, body: object) -> dict[str, object]:
        """Return what it answers to ``body``."""
        asked = Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urlopen(asked, timeout=START_SECONDS_MAX) as reply:
            answered: dict[str, object] = json.loads(reply.read() or b"{}")
            return answered

    def figure(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def link_weights(model: Path, folder: Path) -> None:
    """Lay out ``model`` in ``folder`` without copying its weights, where the disk allows it."""
    folder.mkdir(parents=True)
    for path in model.iterdir():
        try:
            os.link(path, folder / path.name)
        except OSError:  # another file system
            shutil.copyfile(path, folder / path.name)


@contextmanager
def served(
    python: Path,
    model: Path,
    flags: tuple[str, ...],
    *,
    development: bool,
    port: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Server]:
    """Yield a server that is healthy and warm; leave nothing of it behind."""
    with tempfile.TemporaryDirectory(prefix="stoker-rig-") as place:
        folder, log = Path(place) / "model", Path(place) / "server.log"
        link_weights(model, folder)
        port = port or free_port()
        command: list[str | Path] = [
            python.parent / "vllm", "serve", folder, "--port", str(port), *FLAGS, *flags,
        ]  # fmt: skip
        environ = {**os.environ, **ENVIRON, "PYTHONWARNINGS": "ignore"}
        if development:
            environ["VLLM_SERVER_DEV_MODE"] = "1"
        with log.open("wb") as out:
            running = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ,
                start_new_session=True,
            )  # fmt: skip
        server = Server(url=f"http://127.0.0.1:{port}", pid=running.pid, folder=folder, log=log)
        try:
            _until_healthy(server, running, say)
            _warm(server, say)
            yield server
        finally:
            _ended(server, running)


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _until_healthy(
    server: Server, running: "subprocess.Popen[bytes]", say: Callable[[str], None]
) -> None:
    began = said = time.monotonic()
    while time.monotonic() - began < START_SECONDS_MAX:
        if running.poll() is not None:
            raise SystemExit(f"vLLM ended with {running.returncode}:\n{last_lines(server.log)}")
        with suppress(URLError, OSError):
            server.get("/health")
            say(f"healthy after {time.monotonic() - began:.0f} s")
            return
        if time.monotonic() - said > 10:
            said = time.monotonic()
            say(f"starting, {said - began:.0f} s: {last_lines(server.log, 1)[:100]}")
        time.sleep(0.5)
    raise SystemExit(f"vLLM is not healthy after {START_SECONDS_MAX:.0f} s:\n"
                     f"{last_lines(server.log)}")  # fmt: skip


def _warm(server: Server, say: Callable[[str], None]) -> None:
    """Sample once: the first call of a server makes its kernels, which takes seconds."""
    began = time.monotonic()
    body = {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 4, "logprobs": 0}
    server.post("/v1/completions", body)
    say(f"warm after {time.monotonic() - began:.0f} s more")


def _ended(server: Server, running: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        server.thaw()
        os.killpg(server.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        running.wait(timeout=GONE_SECONDS_MAX)
    server.kill()
    running.wait(timeout=GONE_SECONDS_MAX)
    until = time.monotonic() + GONE_SECONDS_MAX
    while server.alive():
        assert time.monotonic() < until, f"processes of vLLM are left: {list(_group(server.pid))}"
        time.sleep(0.05)


def _group(leader: int) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                yield int(entry.name)


def last_lines(log: Path, count: int = 30) -> str:
    """Return the end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
