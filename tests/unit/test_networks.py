"""Which addresses a node may have that is added at run time."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from app.networks import DEFAULT, admitted

EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "::1",
        "10.1.2.3",
        "172.31.0.1",
        "192.168.1.20",
        "fd12::7",
        "100.64.0.9",
        "::ffff:10.0.0.1",
        "0.0.0.0",
    ],
)
def test_the_own_networks_are_admitted(address: str) -> None:
    assert admitted(address, DEFAULT)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "172.32.0.1", "2001:db8::1", "::ffff:8.8.8.8", "192.0.0.1", "224.0.0.1"]
)
def test_everything_else_is_not(address: str) -> None:
    assert not admitted(address, DEFAULT)
    assert admitted(address, EVERYWHERE)


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "::ffff:169.254.169.254", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "100.100.100.200"],
)
def test_where_machines_get_their_credentials_is_admitted_never(address: str) -> None:
    """Whoever may add a node would make Hearth fetch them."""
    assert not admitted(address, DEFAULT)
    assert not admitted(address, EVERYWHERE)


def test_to_listen_on_all_addresses_means_this_machine() -> None:
    assert admitted("::", (ip_network("::1/128"),))
    assert not admitted("0.0.0.0", (ip_network("10.0.0.0/8"),))


def test_a_name_is_no_address() -> None:
    with pytest.raises(ValueError, match="gpu-box"):
        admitted("gpu-box", DEFAULT)
