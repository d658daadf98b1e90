"""The networks that nodes may be in which are added at run time.

Whoever may add a node makes Hearth call an address of his choice, and sends it other people's prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from app.setting_values import shown, text

Network = IPv4Network | IPv6Network

# Loopback, private use (RFC 1918, RFC 4193) and the shared space of RFC 6598, where VPNs such as Tailscale live.
DEFAULT: tuple[Network, ...] = (
    IPv4Network("127.0.0.0/8"),
    IPv6Network("::1/128"),
    IPv4Network("10.0.0.0/8"),
    IPv4Network("172.16.0.0/12"),
    IPv4Network("192.168.0.0/16"),
    IPv6Network("fc00::/7"),
    IPv4Network("100.64.0.0/10"),
)
# Clouds hand out a machine's credentials here: most on the link-local address, AWS and Alibaba on two others as well.
_NEVER: tuple[Network, ...] = (
    IPv4Network("169.254.0.0/16"),
    IPv6Network("fe80::/10"),
    IPv6Network("fd00:ec2::254/128"),
    IPv4Network("100.100.100.200/32"),
)


def network(value: object) -> Network:
    """A network such as 10.0.0.0/8, or a single address."""
    written = text(value)
    try:
        found = ip_network(written, strict=False)
    except ValueError:
        raise ValueError(f"{shown(written)} is not a network such as 10.0.0.0/8") from None
    # Who writes 10.1.2.3/8 may have meant 10.1.2.3, and would have opened much more.
    if "/" in written and found.network_address != ip_address(written.partition("/")[0]):
        raise ValueError(f"{shown(written)} is an address within a network; write {found}, or the address alone")
    if any(_within(found, never) for never in _NEVER):
        raise ValueError(f"{shown(written)} is never allowed: machines' credentials are to be had there")
    return found


def admitted(address: str, networks: Iterable[Network]) -> bool:
    """Whether a node may have this IP address. Raises ValueError for a name: ask with what it resolves to."""
    plain = _plain(ip_address(address))
    return any(plain in allowed for allowed in networks) and not any(plain in never for never in _NEVER)


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The address that is called in the end: there are two more ways to write an IPv4 address or loopback."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_unspecified:
        return IPv4Address("127.0.0.1") if isinstance(address, IPv4Address) else IPv6Address("::1")
    return address


def _within(found: Network, other: Network) -> bool:
    return found.version == other.version and found.network_address in other and found.broadcast_address in other
