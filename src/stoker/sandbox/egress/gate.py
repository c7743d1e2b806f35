"""The worker's side of the egress proxy: one process per host, one gate per action.

The proxy has a uid of its own as root (of ours otherwise) and starts with the first box that needs
it. A proxy that dies closes the connections it carried: the actions it served are faults of ours,
whatever they printed, and the next action starts another.

**Cancellation:** ``Gate.close`` may be cancelled; the gate's connections end all the same.
"""

import asyncio
import contextlib
import datetime as dt
import itertools
import json
import os
import resource
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.errors import BoxFailed, IsolationUnavailable
from stoker.model.execution import Credential, ExecutionPolicy
from stoker.model.tools import RunRequest
from stoker.sandbox.base import BoxRun
from stoker.sandbox.maker_client import Started
from stoker.sandbox.making import WorkOrder

if TYPE_CHECKING:
    from stoker.sandbox.host import SandboxHost

PORT = 3128
"""Where a box finds its proxy, on its own loopback."""
CLOSE_SECONDS = 30.0
"""For a gate to close, which takes milliseconds; a proxy that takes longer is ended."""
_CONTROL = 3
_DESCRIPTORS_MAX = 16_384
_PACKET_BYTES_MAX = 64 * 1024
_ADDRESS = f"http://127.0.0.1:{PORT}"
_VARIABLES = {
    **dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"), _ADDRESS),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1"),
}

_BUNDLE = "/dev/shm/stoker-authorities.pem"  # noqa: S108 - a path inside
"""Where a box with credentials finds whom to trust: this action's authority beside the host's."""
_TRUST_VARIABLES = (
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
)  # fmt: skip
_LOADER_PREFIXES = ("LD_", "GLIBC_", "GCONV_", "LOCPATH", "MALLOC_")
_VALUE_BYTES_LEAST, _VALUE_BYTES_MOST = 8, 8192


class EgressDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request of one box."""

    box_id: str
    allowed: bool
    host: str
    port: int
    address: str
    """What the name was taken to be; empty where it did not come to that."""
    why: str
    """Why it was refused or failed; empty where it was carried."""
    credential: str = ""
    """Variable of the credential that was put in place, if one was."""


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """What went through one gate."""

    sent_bytes: int = 0
    received_bytes: int = 0
    refused: int = 0
    """Requests that were not carried."""


class Gate:
    """The way out of one action; ``channel`` goes into the box and stays the caller's to close."""

    def __init__(
        self,
        egress: "Egress",
        number: int,
        channel: int,
        variables: dict[str, str],
        authority: bytes,
    ) -> None:
        self.channel = channel
        self._egress = egress
        self._number = number
        self._variables = variables
        """Placeholders of credentials, by variable."""
        self._authority = authority
        self._served = True

    @property
    def door(self) -> tuple[int, str]:
        """Port and file of authorities, as ``inside/way_out`` takes them."""
        return PORT, _BUNDLE if self._variables else "-"

    def told(self, request: RunRequest) -> RunRequest:
        """Return ``request`` with the variables by which its program finds the door."""
        trust = dict.fromkeys(_TRUST_VARIABLES, _BUNDLE) if self._variables else {}
        environment = {**_VARIABLES, **trust, **request.environment, **self._variables}
        return msgspec.structs.replace(request, environment=environment)

    def through(
        self,
        request: RunRequest,
        baseline: Mapping[str, str],
        paths: tuple[str, str],
        at: int,
    ) -> RunRequest:
        """Return ``request`` so that it opens its door first.

        ``baseline`` are the box's variables, ``paths`` its interpreter and scripts, ``at`` is the
        channel's number in it. What a loader heeds is set for the program alone: a library of the
        box's in the script would have the channel, and the socket that the proxy accepts on.
        """
        python, scripts = paths
        port, bundle = self.door
        given = {**baseline, **request.environment}
        later = {n: v for n, v in given.items() if n.startswith(_LOADER_PREFIXES)}
        argv = (
            python, "-I", "-S", f"{scripts}/way_out.py", str(at), str(port), bundle,
            str(len(later)), *(f"{name}={value}" for name, value in later.items()), *request.argv,
        )  # fmt: skip
        unset = dict.fromkeys(later, "")  # as good as that for a loader
        environment = {**self.told(request).environment, **unset, **self._variables}
        return msgspec.structs.replace(request, argv=argv, environment=environment)

    @property
    def authorities(self) -> tuple[str, ...]:
        """The file of authorities and what is to be in it, of a gate that is ``handed``."""
        return (_BUNDLE, self._authority.decode()) if self._authority else ()

    def connect(self) -> int:
        """Return a connection to the proxy, the caller's to close. Only ``handed`` gates have any.

        One that the proxy does not take, being slow or gone, has ended already; then ``close`` says
        that it did not serve.

        Raises:
            OSError: we are out of descriptors.
        """
        ours, theirs = socket.socketpair()
        passing = [
            (socket.SOL_SOCKET, socket.SCM_RIGHTS, theirs.fileno().to_bytes(4, sys.byteorder))
        ]
        with theirs, _borrowed(self.channel) as channel:
            try:
                channel.sendmsg([b"c"], passing, socket.MSG_DONTWAIT)  # send_fds would wait
            except OSError:
                self._served = False
        return ours.detach()

    async def close(self) -> Carried | None:
        """End its connections and return what was carried.

        ``None``: the proxy died, had no gate or could not take one of its connections.
        """
        carried = await self._egress.closed(self._number)
        return carried if self._served else None


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def with_network(run: BoxRun, carried: Carried | None) -> BoxRun:
    """Return ``run`` with what the proxy carried for it.

    Raises:
        BoxFailed: the proxy did not serve it to its end; what the program then saw was our fault.
    """
    if carried is None:
        raise BoxFailed(
            "the egress proxy died, or took no more connections, while the program ran, which may "
            "have run in part; the next action tries again"
        )
    usage = msgspec.structs.replace(
        run.usage,
        network_sent_bytes=carried.sent_bytes,
        network_received_bytes=carried.received_bytes,
    )
    return msgspec.structs.replace(run, usage=usage)


def _credentials(listed: tuple[Credential, ...]) -> tuple[bytes, list[dict[str, str | int]]]:
    """Return the certificate to trust and what the proxy is told, for one action."""
    if not listed:
        return b"", []
    try:
        # An extra: only boxes with credentials need it.
        from stoker.sandbox.egress.authority import Authority  # noqa: PLC0415 - see above
    except ImportError as error:
        raise IsolationUnavailable(
            "credentials of boxes need the cryptography package; install stoker[credentials]"
        ) from error
    authority = Authority(dt.datetime.now(dt.UTC))
    told: list[dict[str, str | int]] = [
        {
            "variable": one.variable,
            "host": one.host,
            "port": one.port,
            "header": one.header,
            "placeholder": f"stoker-{secrets.token_hex(16)}",
            "value": _value(one),
            "certificate": authority.issue(one.host).decode(),
        }
        for one in listed
    ]
    return authority.certificate, told


def _value(credential: Credential) -> str:
    try:
        value = Path(credential.file).read_text(encoding="ascii").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BoxFailed(
            f"credential {credential.variable} cannot be read from {credential.file} ({error}); "
            "nothing was run; put it there on every worker's host"
        ) from error
    fits = _VALUE_BYTES_LEAST <= len(value) <= _VALUE_BYTES_MOST
    if not fits or not all("!" <= character <= "~" for character in value):
        raise BoxFailed(
            f"credential {credential.variable} in {credential.file} is not one line of "
            f"{_VALUE_BYTES_LEAST} to {_VALUE_BYTES_MOST} printable characters without spaces; "
            "nothing was run"
        )
    return value


class Egress:
    """The proxy of one host: started when first needed."""

    def __init__(self, host: "SandboxHost", tell: Callable[[EgressDecision], None]) -> None:
        self._host = host
        self._tell = tell
        self._numbers = itertools.count(1)
        self._boxes: dict[int, str] = {}
        self._closing: dict[int, asyncio.Future[Carried | None]] = {}
        self._control: socket.socket | None = None
        self._process: Started | None = None
        self._uid: int | None = None
        self._starting = asyncio.Lock()

    @property
    def process_id(self) -> int:
        """Process id of the proxy.

        Raises:
            BoxFailed: there is none yet, or none any more.
        """
        if self._process is None or self._process.exited.done():
            raise BoxFailed("no egress proxy runs")
        return self._process.pid.result()

    async def open(self, box_id: str, policy: ExecutionPolicy, *, handed: bool = False) -> Gate:
        """Open a gate for one action.

        ``handed``: its channel stays here, and connections are made by ``Gate.connect``.

        Raises:
            BoxFailed: the proxy cannot be started, or a credential cannot be read.
            IsolationUnavailable: credentials need a package that is not installed, or the policy
                names more than fits.
        """
        authority, credentials = await asyncio.to_thread(_credentials, policy.credentials)
        async with self._starting:
            if self._control is None:
                await self._start()
        assert self._control is not None, "started above"
        number = next(self._numbers)
        rules = [[d.host, d.port, d.private] for d in policy.network]
        told = {"open": number, "rules": rules, "credentials": credentials, "handed": handed}
        packet = json.dumps(told).encode()
        if len(packet) > _PACKET_BYTES_MAX:
            raise IsolationUnavailable(
                f"the egress proxy takes {_PACKET_BYTES_MAX} bytes of destinations and "
                f"credentials, the policy of box {box_id} has {len(packet)}; name fewer"
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours:
            try:
                if authority and not handed:
                    ours.sendall(len(authority).to_bytes(4, "big") + authority)
                await self._send(packet, [ours.fileno()])
            except OSError as error:
                theirs.close()
                raise BoxFailed(
                    f"the egress proxy is gone ({error.strerror}); box {box_id} ran nothing; "
                    "the next action starts another"
                ) from error
        self._boxes[number] = box_id
        placeholders = {str(c["variable"]): str(c["placeholder"]) for c in credentials}
        return Gate(self, number, theirs.detach(), placeholders, authority)

    async def closed(self, number: int) -> Carried | None:
        """Close a gate; see ``Gate.close``."""
        if number not in self._boxes:
            return None
        done: asyncio.Future[Carried | None] = asyncio.get_running_loop().create_future()
        self._closing[number] = done
        try:
            await self._send(json.dumps({"close": number}).encode(), [])
            return await asyncio.wait_for(done, CLOSE_SECONDS)
        except TimeoutError:
            await self._kill()
            return None
        except OSError:
            return None
        finally:
            self._closing.pop(number, None)
            self._boxes.pop(number, None)

    async def _kill(self) -> None:
        """End a proxy that does not answer, and with it whatever it carries."""
        process = self._process
        self._gone()
        if process is not None:
            with contextlib.suppress(BoxFailed):
                await self._host.maker().kill(process)

    async def close(self) -> None:
        """End the proxy, if there is one."""
        self._gone()
        if self._process is not None:
            with contextlib.suppress(BoxFailed):
                await self._process.exited
        if self._uid is not None and self._host.uids is not None:
            self._host.uids.release(self._uid)
            self._uid = None

    async def _start(self) -> None:
        host = self._host
        if self._uid is None and host.uids is not None:
            self._uid = host.uids.lease()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        argv = [
            str(host.runtime.python / "bin" / "python"),
            "-s", "-P", "-B", "-m", "stoker.sandbox.egress.main", str(_CONTROL),
        ]  # fmt: skip
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = min(hard, _DESCRIPTORS_MAX) if hard != resource.RLIM_INFINITY else _DESCRIPTORS_MAX
        order = WorkOrder(
            argv=[os.fsencode(a) for a in argv],
            environment={b"PYTHONPATH": os.fsencode(host.runtime.egress), b"LANG": b"C.UTF-8"},
            identity=self._uid,
            refuse_root=host.uids is not None,
            rlimits={resource.RLIMIT_NOFILE: (most, most), resource.RLIMIT_CORE: (0, 0)},
            targets=[_CONTROL],
        )
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            with theirs:
                self._process = await host.maker().spawn(
                    order, [nothing, nothing, 2], [theirs.fileno()]
                )
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(nothing)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)

    async def _send(self, packet: bytes, descriptors: list[int]) -> None:
        while True:
            if self._control is None:
                raise ConnectionResetError
            try:
                socket.send_fds(self._control, [packet], descriptors)
            except BlockingIOError:
                # The proxy is behind. Several may wait here, and the socket may be closed
                # meanwhile, which nobody who waits for its descriptor would hear of.
                await asyncio.sleep(0.01)
            else:
                return

    def _receive(self) -> None:
        while self._control is not None:
            try:
                packet = self._control.recv(_PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._gone()
                return
            self._heard(json.loads(packet))

    def _heard(self, message: dict[str, Any]) -> None:
        if "decided" in message:
            box_id = self._boxes.get(message.pop("decided"), "")
            self._tell(EgressDecision(box_id=box_id, **message))
            return
        done = self._closing.get(message["closed"])
        if done is None or done.done():
            return
        if "sent" not in message:  # it was never open: what the program saw was our fault
            done.set_result(None)
        else:
            done.set_result(
                Carried(
                    sent_bytes=message["sent"],
                    received_bytes=message["received"],
                    refused=message["refused"],
                )
            )

    def _gone(self) -> None:
        if self._control is None:
            return
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        self._control = None
        self._boxes.clear()
        for done in self._closing.values():
            if not done.done():
                done.set_result(None)
