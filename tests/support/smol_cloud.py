"""A stand-in for the cloud of Smol Machines: its HTTP API, on loopback, as the SDK calls it.

A machine is a directory, and the runner that was uploaded works in namespaces of its own with the
uploaded tree as its root; commands that carry its frames run here. What only a machine of its own
kernel has (control groups, a clock, branches of a box) is not there.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

KEY = "smk_secret_of_the_account"
_BEGUN_SECONDS = 60.0
_RUNNER = """
import os, socket
from stoker.sandbox import kernel
from stoker.sandbox.guest import carrier, counters, place, runner
class Place(place.SharedGuest):
    def renew(self, *, name, wall_ns, entropy): socket.sethostname(name)
    def furnish(self, limits):
        for target in place._SIZED:
            kernel.mount_tmpfs(target, f"size={limits.disk_bytes},uid=1000,gid=1000,mode=0700")
        return counters.Descendants()
def serve(port):
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    runner.Runner(port, Place(), ends=True).serve()
carrier.serve_guest = serve
carrier.main()
"""
_BEGIN = """set -e
mount --make-rprivate /
mount --bind "$0" "$0"
mount -t proc proc "$0/proc"; mount -t sysfs sys "$0/sys"; mount --rbind /dev "$0/dev"
mount -t tmpfs run "$0/run"; mkdir -m 700 "$0/run/stoker"; mount --bind "$1" "$0/run/stoker"
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH=/opt/guest PYTHONDONTWRITEBYTECODE=1 \\
  chroot "$0" /opt/python/bin/python -S -c "$2" /run/stoker
"""


class Trouble(NamedTuple):
    """What comes of the next request that fits, instead of its answer."""

    request: str
    """``METHOD PATH`` begins so (a regular expression)."""
    status: int
    """0: no answer at all, until the client is gone; 200: a stream that only tells an error."""
    after: bool = False
    """It is done all the same."""
    said: str = f"as asked, {KEY}"
    elsewhere: str = ""
    """Where a redirect leads."""


class Machine(msgspec.Struct, kw_only=True):
    """One row of the account."""

    id: str
    name: str
    labels: dict[str, str]
    folder: str
    root: str
    source: str = ""
    state: str = "created"
    body: dict[str, Any] = {}
    """What it was asked for with."""

    def here(self, text: str) -> str:
        """Return the words of a command with the machine's own folders in them."""
        return text.replace("/run/stoker", f"{self.folder}/link").replace(
            "/storage", f"{self.folder}/storage"
        )


class Cloud:
    """The account, and how it is served."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machines: dict[str, Machine] = {}
        self.troubles: list[Trouble] = []
        self.seen: list[str] = []
        self.ended = threading.Event()
        self._runners: dict[str, subprocess.Popen[bytes]] = {}
        self._count = 0
        self._making = threading.Lock()
        cloud = self

        class Handler(_Handler):
            served = cloud

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def serving(self) -> Iterator["Cloud"]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.ended.set()
            self._server.shutdown()
            self._server.server_close()
            for machine in list(self.machines.values()):
                self.remove(machine)

    def trouble(self, request: str) -> Trouble | None:
        for one in self.troubles:
            if re.match(one.request, request):
                self.troubles.remove(one)
                return one
        return None

    def add(self, body: dict[str, Any], source: Machine | None = None) -> Machine:
        with self._making:
            self._count += 1
            number = f"mach-{self._count}"
        folder = self.folder / number
        for part in ("link", "storage"):
            (folder / part).mkdir(parents=True)
        made = Machine(
            id=number, name=body["name"], labels=body.get("labels", {}), folder=str(folder),
            root=source.root if source else f"{folder}/storage/stoker",
            source=source.id if source else "", body=body,
        )  # fmt: skip
        self.machines[number] = made
        return made

    def begin(self, machine: Machine) -> subprocess.CompletedProcess[bytes]:
        """Do what the start of a runner does in a machine."""
        root, link = Path(machine.root), f"{machine.folder}/link"
        if not root.exists():
            root.mkdir()
            subprocess.run(["tar", "-xzf", f"{root}.tgz", "-C", root], check=True)
        os.mkfifo(f"{link}/orders", 0o600)
        self._runners[machine.id] = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "--uts", "--ipc",
             "sh", "-c", _BEGIN, root, link, _RUNNER],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + _BEGUN_SECONDS
        while not Path(link, "up").exists():
            assert time.monotonic() < end, "the runner of a stand-in machine did not begin"
            time.sleep(0.01)
        return subprocess.CompletedProcess([], 0, b"", b"")

    def command(self, machine: Machine, body: dict[str, Any]) -> list[str]:
        return [machine.here(word) for word in body["command"]]

    def remove(self, machine: Machine) -> None:
        self.machines.pop(machine.id, None)
        if (runner := self._runners.pop(machine.id, None)) is not None:
            runner.kill()
            runner.wait()
        shutil.rmtree(machine.folder)


class _Handler(BaseHTTPRequestHandler):
    served: Cloud
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _handle(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        content = self.rfile.read(length)
        request = f"{self.command} {self.path}"
        self.served.seen.append(request)
        if self.headers.get("authorization") != f"Bearer {KEY}":
            # A service that quotes what it was sent is the worst case for a log.
            self._say(401, {"code": "unauthorized", "detail": self.headers.get("authorization")})
            return
        trouble = self.served.trouble(request)
        if trouble is not None and not trouble.after:
            self._refuse(trouble)
            return
        try:
            status, answer = self._answer(request, content)
        except LookupError:
            status, answer = 404, {"code": "not_found"}
        if trouble is not None:
            self._refuse(trouble)
        elif status:
            self._say(status, answer)

    do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815 - names of the library

    def _refuse(self, trouble: Trouble) -> None:
        if not trouble.status:
            self.served.ended.wait()
            self.close_connection = True
            return
        if trouble.status == HTTPStatus.OK:
            self._begin_stream()
            self.wfile.write(f"event: error\ndata: {trouble.said}\n\n".encode())
            return
        answer = {"code": "trouble", "detail": trouble.said}
        self._say(trouble.status, answer, location=trouble.elsewhere)

    def _answer(self, request: str, content: bytes) -> tuple[int, Any]:  # noqa: PLR0911 - a table
        cloud = self.served
        rows = cloud.machines
        if request == "GET /v1/machines":
            return 200, {"machines": [_row(one) for one in rows.values()]}
        if request == "POST /v1/machines":
            return 201, _row(cloud.add(json.loads(content)))
        found = re.fullmatch(r"(\w+) /v1/machines/([^/?]+)(/[^?]*)?(\?.*)?", request)
        if found is None:
            raise LookupError
        method, machine, rest = found[1], rows[found[2]], found[3] or ""
        if method == "GET" and not rest:
            return 200, _row(machine)
        if method == "DELETE":
            if any(one.source == machine.id for one in rows.values()):
                return 409, {"code": "conflict", "detail": "delete descendants first"}
            cloud.remove(machine)
            return 204, None
        if method == "PUT" and rest.startswith("/files/"):
            Path(machine.here(rest.removeprefix("/files"))).write_bytes(content)
            return 204, None
        return self._acted(rest, machine, json.loads(content or b"{}"))

    def _acted(self, what: str, machine: Machine, body: dict[str, Any]) -> tuple[int, Any]:
        cloud = self.served
        if what == "/start":
            machine.state = "started"
            return 200, _row(machine)
        if what == "/branches":
            if machine.source or not machine.body["forkable"]:
                return 501, {"code": "not_here"}
            branch = cloud.add({**machine.body, **body}, machine)
            cloud.begin(branch)
            return 201, _row(branch)
        if what == "/exec":
            if "stoker.sandbox.guest.carrier" in body["command"][-1]:
                done = cloud.begin(machine)
            else:
                done = subprocess.run(
                    cloud.command(machine, body), input=body.get("stdin", "").encode(),
                    capture_output=True, check=False,
                )  # fmt: skip
            text, errors = (s.decode(errors="replace") for s in (done.stdout, done.stderr))
            return 200, {
                "exitCode": done.returncode, "stdout": text, "stderr": errors,
                "stdoutB64": base64.b64encode(done.stdout).decode(),
            }  # fmt: skip
        if what == "/exec/stream":
            self._streamed(cloud.command(machine, body))
            return 0, None
        raise LookupError

    def _begin_stream(self) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True

    def _streamed(self, command: list[str]) -> None:
        self._begin_stream()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                while data := os.read(process.stdout.fileno(), 65536):
                    lines = data.decode().split("\n")
                    self.wfile.write("".join(f"data: {x}\n" for x in lines).encode())
                    self.wfile.write(b"event: stdout\n\n")
                self.wfile.write(b'event: exit\ndata: {"exitCode": 0}\n\n')
            except OSError:
                process.kill()

    def _say(self, status: int, answer: object, *, location: str = "") -> None:
        content = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        if status in (429, 503):
            self.send_header("retry-after", "0")
        if location:
            self.send_header("location", location)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(content)


def _row(machine: Machine) -> dict[str, Any]:
    return {
        "id": machine.id, "name": machine.name, "state": machine.state, "ready": True,
        "labels": machine.labels, "forkable": True,
    }  # fmt: skip
