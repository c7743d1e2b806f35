"""Reaching a ledger over a network: addresses, and the key that both ends hold.

A *gateway key* is one PEM file with a private key and its self-signed certificate. Whoever holds it
is let in, and nobody else is believed: both ends of a TLS 1.3 connection show that certificate and
trust nothing but it. The file is the whole identity, so it must be readable by its owner alone.
"""

import os
import socket
import ssl
import stat
from pathlib import Path

import msgspec

from stoker.config.tree import LedgerSettings
from stoker.errors import ConfigInvalid

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_PROBED_AFTER_SECONDS, _PROBES = 5, 3
_SILENT_SECONDS = _PROBED_AFTER_SECONDS * (_PROBES + 1)


class Address(msgspec.Struct, frozen=True):
    """Where a gateway listens."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return it as settings have it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Remote(msgspec.Struct, frozen=True):
    """Gateways to one ledger on other machines."""

    addresses: tuple[Address, ...]
    key: Path

    def context(self) -> ssl.SSLContext:
        """Return what a client shows and whom it believes. Raises ``ConfigInvalid``."""
        return _context(self.key, ssl.PROTOCOL_TLS_CLIENT)


def parse_address(text: str) -> Address:
    """Return ``host:port`` as an address; ``[::1]:7431`` for IPv6. Raises ``ConfigInvalid``."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigInvalid(
            f"{text!r} is no address of a gateway; nothing was started; it looks like "
            "10.0.0.7:7431, or [::1]:7431"
        )
    return Address(host, int(port))


def remote_of(settings: LedgerSettings) -> Remote | None:
    """Return the gateways that the settings name, or ``None``. Raises ``ConfigInvalid``."""
    if not settings.gateways or settings.gateway_key is None:
        return None
    key = Path(settings.gateway_key).expanduser()
    if not key.is_absolute():
        raise ConfigInvalid(
            f"ledger.gateway_key = {key} depends on where a process happens to run; nothing was "
            "started; give an absolute path"
        )
    return Remote(tuple(parse_address(one) for one in settings.gateways), key)


def notice_silence(connected: socket.socket) -> None:
    """Have the kernel end a connection whose other machine says nothing for some 20 s.

    A machine that loses power or its network hangs up on nobody: a poll would wait for ever.
    """
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBED_AFTER_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBED_AFTER_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_SECONDS * 1000),
    ):
        connected.setsockopt(level, option, value)


def listening_context(key: Path) -> ssl.SSLContext:
    """Return what a listening gateway shows and whom it lets in. Raises ``ConfigInvalid``."""
    return _context(key, ssl.PROTOCOL_TLS_SERVER)


def _context(key: Path, side: "ssl._SSLMethod") -> ssl.SSLContext:
    try:
        status = key.stat()
        if status.st_mode & _OTHERS or status.st_uid not in (0, os.geteuid()):
            raise ConfigInvalid(
                f"the gateway key {key} can be read by others than you, so it proves nothing; "
                f"nothing was started; chmod 600 it, or make another: stoker gateway --new-key FILE"
            )
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate is pinned: its name says nothing more
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(key)
        context.load_verify_locations(key)
    except OSError as error:  # ssl's errors are among them
        raise ConfigInvalid(
            f"the gateway key {key} cannot be used ({error.strerror or error}); nothing was "
            "started; make one with `stoker gateway --new-key FILE` and copy it to every machine"
        ) from None
    return context
