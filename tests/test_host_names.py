"""Names of hosts from settings, commands and redirects."""

from __future__ import annotations

import pytest

from swarmllm.errors import InvalidRequest
from swarmllm.host_names import is_loopback_host, parse_host_name
from swarmllm.swarm.discovery.addresses import NodeAddress
from swarmllm.swarm.in_memory.network import node_id_named


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("Example.ORG", "example.org"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("model-cache_1", "model-cache_1"),
        ("192.0.2.1", "192.0.2.1"),
        ("2001:DB8::1", "2001:db8::1"),
    ],
)
def test_a_name_is_kept_in_its_one_form(text: str, parsed: str) -> None:
    assert parse_host_name(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a..b",
        "a" * 70 + ".com",
        "xn--",
        "xn--\xff",
        "-a.com",
        "a b",
        "192.0.2.256",
        "1.2.3",
        "fe80::1%lo",
        ":",
        "ü" * 70,
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host"):
        parse_host_name(text)


def test_only_this_machine_is_loopback() -> None:
    names = ["localhost", "127.0.0.1", "::1", "localhost.example", "192.0.2.1"]
    assert [is_loopback_host(parse_host_name(name)) for name in names] == [True, True, True, False, False]


SOMEBODY = node_id_named("somebody")


@pytest.mark.parametrize(
    "text",
    [
        f"/dns4/my..host/tcp/8810/p2p/{SOMEBODY}",
        f"/dns4/{'a' * 64}/tcp/8810/p2p/{SOMEBODY}",
        f"/dns/xn--/tcp/8810/p2p/{SOMEBODY}",
        f"/dns4/host/tcp/0/p2p/{SOMEBODY}",
        f"/dns4/host/tcp/65536/p2p/{SOMEBODY}",
        f"/dns4/host/tcp/٨٨/p2p/{SOMEBODY}",
        "/dns4/host/tcp/8810/p2p/0OIl0OIl0OIl",
        "/ip4/192.0.2.1/tcp/8810/p2p/0OIl0OIl0OIl",
        "/ip4/192.0.2.1/tcp/8810/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "/ip4/192.0.2.1/tcp/8810",
    ],
)
def test_a_bootstrap_address_that_is_none_names_its_setting(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        NodeAddress.parse(text, field="bootstrap")
    assert refused.value.field == "bootstrap"
