"""A box, the egress proxy and a world of one server, in network and mount namespaces of its own.

Arguments: a directory to work in, which holds ``key.pem`` and ``cert.pem`` of ``pypi.org``, and
``warm`` or ``fresh``, how the box's programs start, or ``guest``, in a box of QEMU. The world is
this namespace: a public address on its loopback, names in a hosts file of its own.
"""

import asyncio
import fcntl
import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
from pathlib import Path

import msgspec

from stoker.model.execution import (
    Baseline,
    Credential,
    Destination,
    ExecutionPolicy,
    Isolation,
    Limits,
)
from stoker.model.tools import RunRequest
from stoker.sandbox.egress import gate
from stoker.sandbox.egress.gate import EgressDecision
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.local import LocalBox
from stoker.sandbox.namespace import NamespaceBackend
from stoker.sandbox.qemu.backend import QemuBackend
from stoker.sandbox.vm.keeping import KeptBox

PUBLIC, PORT = "93.184.216.34", 443
NAMES = {"pypi.org": PUBLIC, "other.example": PUBLIC, "inward.example": "10.0.0.1"}
_SIOCSIFADDR, _SIOCSIFFLAGS, _UP = 0x8916, 0x8914, 1

RECEIVED: list[str] = []
"""Every request that came to the world's server."""

PROGRAM = """
import json, os, socket, ssl, urllib.request
context = ssl.create_default_context(cafile="cert.pem")
def fetch(url):
    try:
        return urllib.request.urlopen(url, context=context, timeout=20).read().decode()
    except OSError as error:
        return f"refused: {error}"
def direct(address):
    try:
        socket.create_connection((address, 443), timeout=5)
        return "connected"
    except OSError as error:
        return os.strerror(error.errno)
def resolved(name):
    try:
        return socket.gethostbyname(name)
    except OSError:
        return "no"
print(json.dumps({
    "listed": fetch("https://pypi.org/simple"),
    "unlisted": fetch("https://other.example/"),
    "inward": fetch("https://inward.example/"),
    "plain": fetch("http://pypi.org/"),
    "direct": direct("93.184.216.34"),
    "resolved": resolved("pypi.org"),
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:-1],
    "argv": open("/proc/1/cmdline").read().count("way_out"),
}))
"""
USES = """
import json, os, ssl, urllib.request
token = os.environ["TOKEN"]
def fetch(headers, host="pypi.org"):
    request = urllib.request.Request(f"https://{host}/echo", headers=headers)
    try:
        return urllib.request.urlopen(request, timeout=20).read().decode()
    except OSError as error:
        return f"refused: {error}"
print(json.dumps({
    "token": token,
    "right": fetch({"Authorization": "Bearer " + token}),
    "other_header": fetch({"X-Other": token}),
    "other_host": fetch({"Authorization": token, "Host": "other.example"}),
}))
"""
SECRET = "the-real-value-0123456789"
HOLDS = """
import socket, ssl
tunnel = socket.create_connection(("127.0.0.1", 3128))
tunnel.sendall(b"CONNECT pypi.org:443 HTTP/1.1\\r\\n\\r\\n")
tunnel.recv(1000)
context = ssl.create_default_context(cafile="cert.pem")
context.wrap_socket(tunnel, server_hostname="pypi.org").recv(1)
"""


def make_world(directory: Path) -> None:
    """Raise the loopback with the public address, and name it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for name, address in ((b"lo", "127.0.0.1"), (b"lo:1", PUBLIC)):
            told = struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(control, _SIOCSIFADDR, told)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _UP))
    hosts = directory / "hosts"
    hosts.write_text("".join(f"{address} {name}\n" for name, address in NAMES.items()))
    hosts.chmod(0o644)
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)


def trust(directory: Path) -> None:
    """Let this namespace trust the world's server; what boxes see was copied before."""
    certificate = directory / "cert.pem"
    hashed = subprocess.run(
        ["openssl", "x509", "-noout", "-hash", "-in", str(certificate)],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    trusted = directory / "trusted"
    trusted.mkdir()
    (trusted / f"{hashed}.0").write_bytes(certificate.read_bytes())
    subprocess.run(["mount", "--bind", str(trusted), "/etc/ssl/certs"], check=True)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    path = head.split()[1]
    RECEIVED.append(head.decode())
    body = head if path == b"/echo" else b"hello " + path
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(answer.encode() + body)
    await writer.drain()
    writer.close()


async def main(directory: Path, starts: str) -> dict[str, object]:
    """Run one program in a box that may reach ``pypi.org``; return what it and the proxy saw."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    policy = _policy("pypi.org", "inward.example", starts=starts)
    decisions: list[EgressDecision] = []
    told = asyncio.Event()

    def tell(decision: EgressDecision) -> None:
        decisions.append(decision)
        told.set()

    server = await asyncio.start_server(_answer, PUBLIC, PORT, ssl=context)
    async with (
        server,
        SandboxHost.open(directory / "boxes", egress_told=tell) as host,
    ):
        backend = QemuBackend(host) if starts == "guest" else NamespaceBackend(host)
        box = await backend.create("box_out", Baseline(), policy)
        await box.write_files({"cert.pem": (directory / "cert.pem").read_bytes()})
        request = RunRequest(argv=("python", "-c", PROGRAM))
        first = await box.run(request, timeout_seconds=120)
        forked = isinstance(box, LocalBox) and box.server is not None
        again = await box.run(request, timeout_seconds=120)
        missing = await box.run(RunRequest(argv=("no-such-program",)), timeout_seconds=120)
        proxy = host.egress.process_id
        uid = os.stat(f"/proc/{proxy}").st_uid  # noqa: PTH116 - a process
        readable_by = os.stat(f"/proc/{proxy}/environ").st_uid  # noqa: PTH116 - the same
        told.clear()
        holding = asyncio.create_task(
            box.run(RunRequest(argv=("python", "-c", HOLDS)), timeout_seconds=120)
        )
        await told.wait()
        os.kill(proxy, 9)
        fault = (await asyncio.gather(holding, return_exceptions=True))[0]
        after = await box.run(request, timeout_seconds=120)
        hung = await _with_a_stopped_proxy(box, host.egress.process_id)
        await box.destroy()
        trust(directory)
        using = await _with_credential(backend, directory, starts)
        leaked = host.leaked()
    return {
        "stdout": first.result.stdout.kept.decode(),
        "stderr": first.result.stderr.kept.decode(),
        "sent": first.usage.network_sent_bytes,
        "came": first.usage.network_received_bytes,
        "forked": forked,
        "again": json.loads(again.result.stdout.kept or b"{}"),
        "missing": missing.result.exit_code,
        "uid": uid,
        "readable_by": readable_by,
        "killed": type(fault).__name__,
        "stopped": type(hung).__name__,
        "after_a_kill": json.loads(after.result.stdout.kept)["listed"],
        "leaked": leaked,
        "using": using,
        "received": RECEIVED,
        "proxy": proxy,
        "decisions": [
            (d.box_id, d.allowed, d.host, d.address, d.why, d.credential) for d in decisions
        ],
    }


def _policy(*hosts: str, starts: str) -> ExecutionPolicy:
    return ExecutionPolicy(
        isolation=Isolation.QEMU if starts == "guest" else Isolation.AUTO,
        accept_shared_kernel=True,
        warm=starts == "warm",
        limits=Limits(memory_bytes=256 * 1024 * 1024),
        network=tuple(Destination(host=host) for host in hosts),
    )


async def _with_a_stopped_proxy(box: LocalBox | KeptBox, proxy: int) -> object:
    usual, gate.CLOSE_SECONDS = gate.CLOSE_SECONDS, 1.0
    os.kill(proxy, signal.SIGSTOP)
    run = box.run(RunRequest(argv=("true",)), timeout_seconds=120)
    ended = await asyncio.gather(run, return_exceptions=True)
    gate.CLOSE_SECONDS = usual
    return ended[0]


async def _with_credential(
    backend: NamespaceBackend | QemuBackend, directory: Path, starts: str
) -> dict[str, object]:
    (directory / "token").write_text(SECRET + "\n")
    held = Credential(variable="TOKEN", host="pypi.org", file=str(directory / "token"))
    policy = msgspec.structs.replace(_policy("pypi.org", starts=starts), credentials=(held,))
    box = await backend.create("box_using", Baseline(), policy)
    run = await box.run(RunRequest(argv=("python", "-c", USES)), timeout_seconds=120)
    await backend.close()
    seen = json.loads(run.result.stdout.kept or b"{}")
    return {**seen, "stderr": run.result.stderr.kept.decode()}


if __name__ == "__main__":
    where = Path(sys.argv[1])
    make_world(where)
    sys.stdout.write(json.dumps(asyncio.run(main(where, sys.argv[2]))))
