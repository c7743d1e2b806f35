"""The brokers: Redis, PostgreSQL, each on loopback, durable, to be killed and started again."""

import contextlib
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 60.0


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def programs(site: Path, program: str) -> Path:
    """Return the folder in which a wheel, or the system, has put a server's programs."""
    for found in [*sorted(site.glob(f"**/bin/{program}")), shutil.which(program)]:
        if found:
            return Path(found).parent
    raise FileNotFoundError(f"no {program}; make bench-peers installs it")


class Server:
    """One server process over one folder."""

    settings = ""
    program = ""

    def __init__(self, folder: Path, site: Path, port: int | None = None) -> None:
        self.folder = folder
        self.programs = programs(site, self.program)
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    @contextlib.contextmanager
    def over(cls, folder: Path, port: int) -> Iterator[None]:
        """Run one for the block, with the programs of this Python's own environment."""
        server = cls(folder, Path(sysconfig.get_path("purelib")), port)
        server.start()
        try:
            yield
        finally:
            server.kill()

    def command(self) -> list[str]:
        """Return how it is started."""
        raise NotImplementedError

    def start(self, **more: object) -> None:
        """Start it and wait until it takes connections."""
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, **more)  # type: ignore[call-overload]
        deadline = time.monotonic() + START_SECONDS
        while not listens(self.port):
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()[-2000:]
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill it without a word."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()


class Redis(Server):
    """Redis with every write synced."""

    program = "redis-server"
    settings = "Redis appendonly yes, appendfsync always"

    def command(self) -> list[str]:
        """Return how it is started."""
        return [
            str(self.programs / "redis-server"), "--port", str(self.port), "--bind", "127.0.0.1",
            "--dir", str(self.folder), "--appendonly", "yes", "--appendfsync", "always",
        ]  # fmt: skip

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"redis://127.0.0.1:{self.port}/0"


class Postgres(Server):
    """PostgreSQL as it comes: every commit synced. Runs as an ordinary user where we are root."""

    program = "initdb"
    settings = "PostgreSQL fsync on, synchronous_commit on"

    def __init__(self, folder: Path, site: Path, port: int | None = None) -> None:
        super().__init__(folder, site, port)
        self._as = {"user": "nobody", "group": "nogroup"} if os.geteuid() == 0 else {}
        self._data = folder / "data"

    def command(self) -> list[str]:
        """Return how it is started."""
        return [
            str(self.programs / "postgres"), "-D", str(self._data), "-p", str(self.port),
            "-h", "127.0.0.1", "-k", "",
        ]  # fmt: skip

    def start(self, **_: object) -> None:
        """Make the cluster where there is none, start it, wait."""
        if not self._data.exists():
            self._data.mkdir(mode=0o700)
            if self._as:
                shutil.chown(self._data, "nobody", "nogroup")
            subprocess.run(
                [str(self.programs / "initdb"), "-D", str(self._data), "-U", "faults", "-A", "trust"],  # noqa: E501
                check=True, capture_output=True, **self._as,
            )  # type: ignore[call-overload]  # fmt: skip
        super().start(**self._as, cwd="/")
        time.sleep(2.0)  # it listens before it has recovered

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"postgresql://faults@127.0.0.1:{self.port}/postgres"
