"""The proxy's process: ``python -m stoker.sandbox.egress.main FD``, standard library alone.

It runs under a uid of its own, from a copy every uid can read, and is told everything over one
packet socket: JSON, one object a packet. ``{"open": n, "rules": […]}`` comes with one end of a
socket pair whose other end the box has; over that the box sends the socket it listens on, made in
the box's own network namespace, so that nothing in the box has to forward anything. With ``handed``
the worker keeps that end, and sends a connection at a time. ``{"close": n}`` ends all
connections of that gate and is answered with what was carried. Each decision is told as it falls.
At end of file, when the worker is gone, it ends.
"""

import asyncio
import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import socket
import ssl
import sys
from collections.abc import Coroutine
from typing import Any

from stoker.sandbox.egress.inject import Injection
from stoker.sandbox.egress.proxy import Decision, Gate, Rule

_PACKET_BYTES_MAX = 64 * 1024
_STREAM_BYTES = 64 * 1024
_WAITING_MAX = 1000
"""Decisions not yet read by the worker; more are dropped, and counted in the gate's figures."""
_PR_SET_DUMPABLE = 4
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SHORTAGE_SECONDS = 0.1


class _Opened:
    """One gate, and the socket its box listens on once that has come."""

    def __init__(self, channel: socket.socket, gate: Gate) -> None:
        self.channel: socket.socket | None = channel
        self.gate = gate
        self.serving: asyncio.Task[None] | None = None
        self.served = True
        """Whether each connection that was handed over could be taken."""
        self._beginning: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Have a connection served."""
        task = asyncio.ensure_future(work)
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def begun(self) -> None:
        """Wait for those that were handed over."""
        await asyncio.gather(*self._beginning, return_exceptions=True)


class Process:
    """Gates by number, as the worker opens and closes them."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._gates: dict[int, _Opened] = {}
        self._out: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def run(self) -> None:
        """Serve until the worker is gone."""
        sending = self._loop.create_task(self._send())
        over = asyncio.Event()
        self._loop.add_reader(self._control.fileno(), self._told, over)
        await over.wait()
        sending.cancel()

    async def _send(self) -> None:
        while True:
            packet = json.dumps(await self._out.get()).encode()
            await self._loop.sock_sendall(self._control, packet)

    def _told(self, over: asyncio.Event) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, _PACKET_BYTES_MAX, 4)
        except BlockingIOError:
            return
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            self._loop.remove_reader(self._control.fileno())
            over.set()
            return
        message = json.loads(packet)
        if "open" in message:
            self._open(message, socket.socket(fileno=descriptors[0]))
        else:
            self._loop.create_task(self._close(message["close"]))

    def _open(self, message: dict[str, Any], channel: socket.socket) -> None:
        number = message["open"]
        channel.setblocking(False)
        rules = tuple(Rule(host, port, private) for host, port, private in message["rules"])
        gate = Gate(
            rules,
            lambda decision: self._decided(number, decision),
            injections={(c["host"], c["port"]): _injection(c) for c in message["credentials"]},
        )
        opened = _Opened(channel, gate)
        self._gates[number] = opened
        comes = self._handed if message.get("handed") else self._listener
        self._loop.add_reader(channel.fileno(), comes, opened)

    def _decided(self, number: int, decision: Decision) -> None:
        if self._out.qsize() < _WAITING_MAX:
            self._out.put_nowait({"decided": number, **decision._asdict()})

    def _listener(self, opened: _Opened) -> None:
        channel = opened.channel
        assert channel is not None, "read after it was closed"
        descriptors: list[int] = []
        with contextlib.suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(channel, 16, 4)
        self._forget(opened)
        for descriptor in descriptors:
            listening = _listening(descriptor) if opened.serving is None else None
            if listening is None:
                os.close(descriptor)
            else:
                opened.serving = self._loop.create_task(_accept(opened.gate, listening))

    def _handed(self, opened: _Opened) -> None:
        assert opened.channel is not None, "read after it was closed"
        content, descriptors = b"", list[int]()
        with contextlib.suppress(OSError):
            content, descriptors, _, _ = socket.recv_fds(opened.channel, 1, 1)
        if not content:
            self._forget(opened)
        elif not descriptors:  # we are out of them: what the program sees is our fault
            opened.served = False
        for descriptor in descriptors:
            opened.begin(_serve(opened.gate, socket.socket(fileno=descriptor)))

    def _forget(self, opened: _Opened) -> None:
        if opened.channel is not None:
            self._loop.remove_reader(opened.channel.fileno())
            opened.channel.close()
            opened.channel = None

    async def _close(self, number: int) -> None:
        opened = self._gates.pop(number, None)
        if opened is None:  # we could not open it: no figures, and the worker knows whose fault
            self._out.put_nowait({"closed": number})
            return
        gate = opened.gate
        self._forget(opened)
        if opened.serving is not None:
            opened.serving.cancel()
            await asyncio.wait([opened.serving])
        await opened.begun()
        await gate.close()
        figures = {
            "sent": gate.sent_bytes,
            "received": gate.received_bytes,
            "refused": gate.refused,
        }
        self._out.put_nowait({"closed": number, **(figures if opened.served else {})})


def _listening(descriptor: int) -> socket.socket | None:
    """Return a descriptor from a box as the socket it should be; anything else is not touched."""
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if found.family == socket.AF_INET and found.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            return found
    found.detach()
    return None


def _injection(told: dict[str, Any]) -> Injection:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)  # it is loaded by path alone
    with os.fdopen(descriptor, "wb") as file:
        file.write(told["certificate"].encode())
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    context.sni_callback = lambda _, name, __: _alert(name, told["host"])
    return Injection(
        variable=told["variable"],
        header=told["header"].lower().encode(),
        placeholder=told["placeholder"].encode(),
        value=told["value"].encode(),
        context=context,
    )


def _alert(name: str | None, host: str) -> int | None:
    """Refuse a handshake for another name; a numeric host is asked for without one."""
    if name is None:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return None
    return None if name == host else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME


async def _accept(gate: Gate, listening: socket.socket) -> None:
    """Accept until cancelled. The box may hold the socket too, and can shut it at any time."""
    loop = asyncio.get_running_loop()
    listening.setblocking(False)
    with listening:
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    return
                await asyncio.sleep(_SHORTAGE_SECONDS)
                continue
            await _serve(gate, connection)


async def _serve(gate: Gate, connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_STREAM_BYTES, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, gate.accept, loop=loop)
    await loop.connect_accepted_socket(lambda: protocol, connection)


def main() -> None:
    """Run until the worker is gone."""
    # Values of credentials are in our memory: not to be read by our own uid, nor dumped (a host
    # whose core_pattern is a program takes dumps whatever RLIMIT_CORE says).
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.setblocking(False)
    with contextlib.suppress(ConnectionError):
        asyncio.run(_run(control))


async def _run(control: socket.socket) -> None:
    await Process(control).run()
    os._exit(0)  # nothing is left to say, and a look-up in a thread would hold us for a minute


if __name__ == "__main__":
    main()
