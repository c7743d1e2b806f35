"""The process in which the SDK of Smol Machines runs, for one worker.

    python -m stoker.sandbox.smol.engine_main                 # descriptor 0: a socket to the worker
    python -m stoker.sandbox.smol.engine_main URL KEY_FILE    # machines of a cloud's account

The SDK blocks, reads its place from ``HOME`` and its target from the environment, and machines die
with the process that made them. So it has a process of its own, with an environment of our making,
which can be ended when a call does not return. Requests are lines of JSON, each answered by one
with the same ``id``; ``attach`` comes with a descriptor, which is joined with a machine's runner.
"""

import base64
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import smol

from stoker.sandbox import kernel

LINK = "/run/stoker"
"""Where a machine has the pipes of its runner."""
_MAKES = ("create", "branch", "restore")
_READ_BYTES = 192 * 1024
_ORDER = f"cat >{LINK}/orders"
_LISTEN = 'mkfifo -m 600 "$0/$1" && echo "@$1" >"$0/orders" && exec cat "$0/$1"'


class Engine:
    """Answers requests; every call on a thread of its own."""

    def __init__(self, worker: socket.socket, target: smol.ConnectOptions) -> None:
        self._worker = worker
        self._target = target
        self._saying = threading.Lock()
        self._machines: dict[str, smol.Machine] = {}
        self._making: dict[str, threading.Thread] = {}
        """What makes, or made, the machine of a name."""

    def serve(self) -> None:
        """Work until the worker is gone."""
        buffer = b""
        descriptors: list[int] = []
        while True:
            data, passed, _, _ = socket.recv_fds(self._worker, 65536, 8)
            if not data:
                return
            descriptors += passed
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                request = json.loads(line)
                if request["verb"] == "attach":
                    request["descriptor"] = descriptors.pop(0)
                thread = threading.Thread(target=self._answer, args=(request,), daemon=True)
                if request["verb"] in _MAKES:
                    self._making[request["name"]] = thread
                thread.start()

    def _answer(self, request: dict[str, Any]) -> None:
        number, verb = request.pop("id"), request.pop("verb")
        answer: dict[str, Any] = {"id": number}
        try:
            answer["value"] = getattr(self, "_do_" + verb)(**request)
        except Exception as error:  # noqa: BLE001 - the worker makes a typed error of it
            answer["error"] = self._struck(str(error))[:2000] or type(error).__name__
            answer["code"] = str(getattr(error, "code", ""))
        line = json.dumps(answer).encode() + b"\n"
        with self._saying, contextlib.suppress(OSError):
            self._worker.sendall(line)

    def _struck(self, text: str) -> str:
        """Take the key out: what a service says may quote what it was sent."""
        key = self._target.api_key
        return text.replace(key, "…") if key else text

    def _do_probe(self) -> list[str]:
        if self._target.target == "cloud":
            smol.Machine.list(self._target)
            return []
        available, code, reason = smol.local_availability()
        return [] if available else [str(code), str(reason)]

    def _do_create(self, *, name: str, labels: dict[str, str], memory_mb: int, cuda: bool,
                   image: str | None, ready_seconds: float,
                   begin: dict[str, str]) -> None:  # fmt: skip
        config = smol.MachineConfig(
            name=name,
            image=image,
            labels=labels,
            resources=smol.ResourceSpec(
                cpus=1,
                memory_mb=memory_mb,
                network=False,
                disk_durability="deferred",
                cuda=cuda or None,
            ),
            branchable=True,
            ready_timeout_seconds=ready_seconds,
        )
        self._machines[name] = smol.Machine.create(config, self._target)
        if image is not None:  # else there is the machine's own disk
            self._exec(name, ["/bin/mkdir", "-p", str(Path(begin["place"]).parent)])
        self._machine(name).write_file(begin["place"], Path(begin["archive"]).read_bytes())
        said = self._exec(name, ["/bin/sh", "-c", begin["script"]], timeout=ready_seconds)
        if said.exit_code:
            raise RuntimeError(f"its runner was not started: {said.output[-500:]}")

    def _do_branch(self, *, source: str, name: str, frozen: bool, leaf: bool) -> None:
        self._machines[name] = self._machine(source).branch(
            name, branchable=not leaf, freeze_source=frozen
        )

    def _do_attach(self, *, name: str, pipe: str, descriptor: int) -> None:
        end = socket.socket(fileno=descriptor)
        command = ["/bin/sh", "-c", _LISTEN, LINK, pipe]
        stream = self._machine(name).exec_stream(command)
        heard = threading.Event()
        threading.Thread(target=self._hear, args=(stream, end, heard), daemon=True).start()
        heard.wait()
        threading.Thread(target=self._tell, args=(name, end), daemon=True).start()

    def _hear(self, stream: Any, end: socket.socket, heard: threading.Event) -> None:  # noqa: ANN401 - an iterator of dicts
        """Carry what the runner says to the worker; ``heard``: it speaks to us, or never will."""
        rest = ""
        with contextlib.suppress(Exception):  # an end of whatever kind is an end of the link
            for event in stream:
                if event["kind"] != "stdout":
                    sys.stderr.write(self._struck(f"{event}\n"))
                    continue
                *said, rest = (rest + event["data"]).split(".")
                for words in said:
                    heard.set()
                    end.sendall(base64.b64decode(words))
        heard.set()
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(Exception):
            stream.kill()

    def _tell(self, name: str, end: socket.socket) -> None:
        """Carry what the worker says to the runner."""
        with contextlib.suppress(Exception):
            while data := end.recv(_READ_BYTES):
                order = base64.b64encode(data).decode() + "\n"
                self._exec(name, ["/bin/sh", "-c", _ORDER], stdin=order)
        end.close()

    def _exec(self, name: str, command: list[str], **options: Any) -> Any:  # noqa: ANN401 - the SDK's
        return self._machine(name).exec(command, smol.ExecOptions(**options))

    def _machine(self, name: str) -> smol.Machine:
        if name not in self._machines and self._target.target == "cloud":
            # It was made by the engine before this one.
            self._machines[name] = smol.Machine.connect(name, self._target)
        return self._machines[name]

    def _do_checkpoint(self, *, name: str, path: str) -> None:
        self._machine(name).checkpoint(path)

    def _do_restore(self, *, name: str, path: str) -> None:
        self._machines[name] = smol.Machine.restore_checkpoint(path, name, self._target)

    def _do_delete(self, *, name: str) -> None:
        making = self._making.pop(name, None)
        if making is not None:  # else a machine whose worker gave up would come after its deletion
            making.join()
        self._machines.pop(name, None)
        try:
            smol.Machine.delete_by_name(name, self._target)
        except smol.SmolError as error:
            if error.code != "NOT_FOUND":  # a cloud's answer where this host's SDK has none
                raise

    def _do_list(self) -> dict[str, int | None]:
        return {m.name: m.pid for m in smol.Machine.list(self._target)}


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow none: it is an error, as any other answer that does not serve."""


def main() -> None:
    """Serve descriptor 0."""
    # A call may hang and hold the interpreter: then nobody here would see that the worker is gone.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    target = smol.ConnectOptions(target="local")
    if len(sys.argv) > 1:
        url, key_file = sys.argv[1:]
        key = Path(key_file).read_text(encoding="ascii").strip()
        target = smol.ConnectOptions(target="cloud", base_url=url, api_key=key)
        # The SDK follows a redirect with the key in its hand, to wherever that leads.
        urllib.request.install_opener(urllib.request.build_opener(_Stay))
    Engine(socket.socket(fileno=os.dup(0)), target).serve()
    os._exit(0)  # machines end with us; threads may hang in one


if __name__ == "__main__":
    main()
