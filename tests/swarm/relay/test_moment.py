"""Addresses that another node's word alone stands for."""

from __future__ import annotations

import pytest

from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.relay.moment import BELIEVED_MAX, PORT_MIN, believed

PUBLIC = Address("198.51.100.7", 8811)


@pytest.mark.parametrize(
    "ip",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.9",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "224.0.0.1",
        "255.255.255.255",
        "0.0.0.0",
        "::1",
        "::",
        "fe80::1",
        "fd00::1",
        "ff02::1",
        "::ffff:10.1.2.3",
        "64:ff9b::a01:203",
    ],
)
def test_no_address_inside_a_network_is_dialled_on_anothers_word(ip: str) -> None:
    inside = Address(ip, 8811)
    assert believed([inside, PUBLIC]) == (PUBLIC,)
    # What its signed envelope says is dialled anyway.
    assert believed([inside], [inside]) == (inside,)
    assert believed([inside], [Address(ip, 8810)]) == ()


def test_no_port_of_a_service_and_few_addresses_are_dialled() -> None:
    assert believed([Address(PUBLIC.ip, PORT_MIN - 1)]) == ()
    many = [Address(PUBLIC.ip, PORT_MIN + n) for n in range(20)]
    assert believed([many[0], *many]) == tuple(many[:BELIEVED_MAX])


def test_loopback_is_dialled_by_a_node_that_is_nowhere_else() -> None:
    here = Address("127.0.0.1", 8811)
    assert believed([here, Address("10.1.2.3", 8811)], on_loopback=True) == (here,)
