"""Addresses of model servers: as they are written, and as runs that share a server name it."""

import os
from ipaddress import ip_address
from urllib.parse import urlsplit

from stoker.errors import ConfigInvalid
from stoker.seams.clock import boot_id

_PORTS = {"http": 80, "https": 443}


def servers(text: str) -> tuple[str, ...]:
    """Return the addresses in ``http://host:port[,http://host2:port]``.

    Raises:
        ConfigInvalid: one of them is no address of a server, or two are of one.
    """
    urls = tuple(part.strip().rstrip("/").removesuffix("/v1") for part in text.split(","))
    for url in urls:
        if not _usable(url):
            raise ConfigInvalid(
                f"model {text!r}: {url!r} is no address of a server; write http://HOST:PORT, "
                "several with commas between them"
            )
    if len({server_name(url) for url in urls}) != len(urls):
        raise ConfigInvalid(f"model {text!r} names one server twice")
    return urls


def server_name(url: str) -> str:
    """Return the name by which all runs mean the server at ``url``.

    Ports are written out and names of the loopback are one name, which holds where it is said: in
    a network namespace of a boot. Other names are not looked up: two names of one machine count as
    two servers.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if _loopback(host):
        host = f"loopback-{boot_id()}-{os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116 - a link into the kernel
    return f"{parts.scheme}://{host}:{parts.port or _PORTS[parts.scheme]}{parts.path.rstrip('/')}"


def _usable(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, or half an IPv6 address
        return False


def _loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
