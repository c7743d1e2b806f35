"""Which addresses a listed name may turn out to be: public ones, or private ones where it was said.

Names are in other people's hands, addresses are what packets follow. So a name is resolved once,
what it resolved to is judged here, and that very address is connected to. Never allowed, whatever
was said: this host, its links, and the metadata services of clouds (two of which have addresses
that look like anybody's).
"""

import ipaddress
from collections.abc import Callable

_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254"),
    )
)
_PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10"),
    )
)
_CARRIES_VERSION_4 = tuple(
    map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96"))
)
"""Translated and tunnelled: the packet ends at a version 4 address that is not the one seen."""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NEVER: tuple[tuple[str, Callable[[_Address], bool]], ...] = (
    ("the metadata service of a cloud", lambda a: a in _METADATA),
    ("an address of the host itself", lambda a: a.is_loopback or a.is_unspecified),
    ("a link-local address", lambda a: a.is_link_local),
    ("a multicast address", lambda a: a.is_multicast),
    (
        "an address that stands for another one",
        lambda a: any(a.version == n.version and a in n for n in _CARRIES_VERSION_4),
    ),
)


def refusal(address: str, *, private: bool) -> str:
    """Return why ``address`` may not be connected to, in a few words; empty: it may.

    Args:
        address: a numeric IPv4 or IPv6 address.
        private: addresses of private networks (RFC 1918, unique local) are agreed to.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    never = next((why for why, matches in _NEVER if matches(found)), "")
    if never:
        return never
    if any(found.version == n.version and found in n for n in _PRIVATE):
        return "" if private else "a private address"
    return "" if found.is_global else "a reserved address"
