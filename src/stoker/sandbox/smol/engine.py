"""The worker's end of the process in which Smol Machines' SDK runs (``engine_main``).

A call that does not answer in time is a failure of its box; what it was to make is deleted by name,
and when even that does not answer the process is ended, and every machine with it.

**Cancellation:** a call goes on in the engine; whoever cancelled it deletes what it was to make.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import stoker
from stoker.sandbox.smol.target import CloudTarget

_END_SECONDS = 10.0
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE")
"""Of the worker's environment; no other reaches the engine: ``SMOL_CLOUD_TOKEN`` would choose where
machines are made."""


class EngineError(Exception):
    """A call failed, or the engine is gone; nothing is known of what it was to do."""


class Engine:
    """One engine process; made by ``start``."""

    def __init__(self, process: "subprocess.Popen[bytes]", end: socket.socket) -> None:
        self._process = process
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self.dead = False
        self._loop.add_reader(end.fileno(), self._readable)

    @classmethod
    def start(cls, home: Path, cloud: CloudTarget | None = None) -> "Engine":
        """Start an engine whose machines live in ``home``, or in the ``cloud``."""
        home.mkdir(parents=True, exist_ok=True, mode=0o755)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        paths = [str(Path(stoker.__file__).parent.parent), *filter(None, sys.path)]
        command = [sys.executable, "-m", "stoker.sandbox.smol.engine_main"]
        if cloud is not None:
            command += [cloud.url, cloud.key_file]
        with theirs, (home / "engine.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                cwd="/",
                env={
                    "HOME": str(home),
                    "PATH": os.defpath,
                    "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
                    **{n: os.environ[n] for n in _KEPT_VARIABLES if n in os.environ},
                },
                start_new_session=True,
            )
        return cls(process, ours)

    async def call(self, verb: str, *, seconds: float, **given: object) -> Any:  # noqa: ANN401 - JSON of ours
        """Have something done.

        Raises:
            EngineError: it failed, did not end in time, or the engine is gone.
        """
        return await self._called(verb, seconds, given, None)

    async def attach(self, name: str, pipe: str, *, seconds: float) -> socket.socket:
        """Return a socket that is joined with the runner of a machine, over a pipe of that name."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                given = {"name": name, "pipe": pipe}
                await self._called("attach", seconds, given, theirs.fileno())
            except BaseException:
                ours.close()
                raise
        return ours

    async def _called(
        self, verb: str, seconds: float, given: dict[str, Any], descriptor: int | None
    ) -> Any:  # noqa: ANN401 - as above
        if self.dead:
            raise EngineError("the engine of Smol Machines is gone")
        self._count += 1
        number = self._count
        future = self._calls[number] = self._loop.create_future()
        line = json.dumps({"id": number, "verb": verb, **given}).encode() + b"\n"
        try:
            async with asyncio.timeout(seconds):
                if descriptor is None:
                    await self._loop.sock_sendall(self._end, line)
                else:  # a short line, which a socket takes whole
                    socket.send_fds(self._end, [line], [descriptor])
                return await future
        except TimeoutError:
            raise EngineError(f"{verb} did not end within {seconds:.0f} s") from None
        except OSError as error:
            self._gone()
            raise EngineError(f"the engine of Smol Machines is gone ({error})") from error
        finally:
            self._calls.pop(number, None)

    def _readable(self) -> None:
        try:
            data = self._end.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._gone()
            return
        self._buffer += data
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            answer = json.loads(line)
            future = self._calls.get(answer["id"])
            if future is None or future.done():
                continue
            if "error" in answer:
                code = f"{answer['code']}: " if answer["code"] else ""
                future.set_exception(EngineError(f"{code}{answer['error']}"))
            else:
                future.set_result(answer["value"])

    def _gone(self) -> None:
        if not self.dead:
            self.dead = True
            self._loop.remove_reader(self._end.fileno())
            self._end.close()
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(EngineError("the engine of Smol Machines is gone"))

    def kill(self) -> None:
        """End it at once, and every machine of it."""
        self._process.kill()
        self._gone()

    async def close(self) -> None:
        """End it; machines that were not deleted end with it."""
        self._gone()
        try:
            await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _END_SECONDS)
