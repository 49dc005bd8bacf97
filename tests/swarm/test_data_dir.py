"""The folder a node lives in: its key, its lock, its lives; and the ports it must have for itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trio
from libp2p.peer.id import ID

from swarmllm.errors import ConfigError, InvalidRequest
from swarmllm.private_files import locked_data_dir
from swarmllm.swarm.change_feed import QUEUE_MAX, ChangeFeed
from swarmllm.swarm.discovery.addresses import Address, NodeAddress, own_addresses
from swarmllm.swarm.libp2p_router import open_libp2p_router
from swarmllm.swarm.membership.identity import KEY_NAME, load_or_create_identity, verify
from swarmllm.swarm.records.spread import next_incarnation
from swarmllm.swarm.router import Change
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.identifiers import NodeId

NODE_ID = "12D3KooWGRUaF8WMKwFDBR5rXKZVWtVrZ9bVHfPXcJ6FvD1fRkfg"


def test_an_identity_is_made_once_kept_private_and_found_again(tmp_path: Path) -> None:
    first = load_or_create_identity(tmp_path)
    assert (tmp_path / KEY_NAME).stat().st_mode & 0o777 == 0o600
    again = load_or_create_identity(tmp_path)
    assert again.node_id == first.node_id
    assert verify(first.node_id, b"content", again.sign(b"content"))
    assert [path.name for path in tmp_path.iterdir()] == [KEY_NAME]


def test_a_key_that_others_can_read_is_closed_to_them(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path)
    (tmp_path / KEY_NAME).chmod(0o644)
    load_or_create_identity(tmp_path)
    assert (tmp_path / KEY_NAME).stat().st_mode & 0o777 == 0o600


def test_the_key_does_not_show_in_a_repr(tmp_path: Path) -> None:
    assert "key" not in repr(load_or_create_identity(tmp_path))


@pytest.mark.parametrize("content", [b"", b"garbage", bytes(100_000)])
def test_a_damaged_key_is_an_error_and_never_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / KEY_NAME
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="identity"):
        load_or_create_identity(tmp_path)
    assert path.read_bytes() == content


def test_a_folder_is_locked_against_another_process_and_free_after_its_end(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom swarmllm.private_files import locked_data_dir\n"
        "with locked_data_dir(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid}"), locked_data_dir(tmp_path):
            pass
        holder.kill()
        holder.wait()
    with locked_data_dir(tmp_path):
        pass


def test_every_life_begins_later_than_the_last_whatever_the_clock_says(tmp_path: Path) -> None:
    assert next_incarnation(tmp_path, now_ms=5000) == 5000
    assert next_incarnation(tmp_path, now_ms=5000) == 5001
    assert next_incarnation(tmp_path, now_ms=10) == 5002
    assert next_incarnation(tmp_path, now_ms=9000) == 9000
    (tmp_path / "incarnation").write_text("damaged")
    assert next_incarnation(tmp_path, now_ms=9000) == 9000


@pytest.mark.parametrize("port", ["libp2p_port", "data_port"])
async def test_a_port_that_is_taken_is_an_error_that_names_it(tmp_path: Path, port: str) -> None:
    async with open_libp2p_router(SwarmSettings(tmp_path / "a", "127.0.0.1", 0, 0, mdns=False)) as a:
        taken = Address.parse(
            (a.addresses if port == "libp2p_port" else a.data_addresses)[0].split("/p2p/")[0]
        ).port
        with pytest.raises(ConfigError, match="cannot listen") as refused:
            async with open_libp2p_router(
                SwarmSettings(
                    tmp_path / "b", "127.0.0.1", mdns=False, **{"libp2p_port": 0, "data_port": 0, port: taken}
                )
            ):
                raise AssertionError
        assert refused.value.field == port


async def test_a_second_router_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    settings = SwarmSettings(tmp_path, "127.0.0.1", 0, 0, mdns=False)
    async with open_libp2p_router(settings):
        with pytest.raises(ConfigError, match="in use"):
            async with open_libp2p_router(settings):
                raise AssertionError


@pytest.mark.parametrize(
    "text",
    ["", "here", "/ip4/127.0.0.1/tcp/8810", f"/ip4/1.2.3/tcp/1/p2p/{NODE_ID}", f"/dns/x/tcp/0/p2p/{NODE_ID}"],
)
async def test_a_bad_bootstrap_address_is_an_error_that_names_the_field(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        async with open_libp2p_router(SwarmSettings(tmp_path, "127.0.0.1", 0, 0, bootstrap=(text,))):
            raise AssertionError
    assert refused.value.field == "bootstrap"


@pytest.mark.parametrize(
    "text", ["/ip4/192.0.2.1/tcp/8810", f"/ip4/192.0.2.1/tcp/1/p2p/{NODE_ID}", "/ip6/2001:db8::1/tcp/65535"]
)
def test_addresses_are_written_as_they_are_read(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/localhost/tcp/1",
        "/ip4/::1/tcp/1",
        "/ip6/127.0.0.1/tcp/1",
        "/ip4/1.2.3.4/tcp/0",
        "/ip4/1.2.3.4/tcp/65536",
        "/ip4/1.2.3.4/tcp/1/ws",
        "/ip4/1.2.3.4/udp/1",
        "/ip4/1.2.3.4/tcp/1\n",
        "/dns/example.org/tcp/1",
    ],
)
def test_what_is_no_ip_and_port_is_no_address(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Address.parse(text)


async def test_a_name_resolves_to_addresses_and_an_unknown_one_to_none() -> None:
    where = NodeAddress.parse(f"/dns/localhost/tcp/8810/p2p/{NODE_ID}", field="bootstrap")
    assert Address("127.0.0.1", 8810) in await where.resolve()
    nowhere = NodeAddress.parse(f"/dns4/nowhere.invalid/tcp/8810/p2p/{NODE_ID}", field="bootstrap")
    assert await nowhere.resolve() == []


def test_a_wildcard_is_announced_as_interface_addresses_and_never_as_itself() -> None:
    ips = own_addresses("0.0.0.0").announced
    assert "0.0.0.0" not in ips
    assert ips[-1] == "127.0.0.1"
    assert own_addresses("127.0.0.1").announced == ("127.0.0.1",)
    assert own_addresses("0.0.0.0", ["203.0.113.5"]).announced == ("203.0.113.5",)


async def test_a_slow_reader_of_changes_loses_the_oldest_and_holds_up_nobody() -> None:
    feed = ChangeFeed()
    async with feed.subscribe() as slow, feed.subscribe() as fast:
        for number in range(QUEUE_MAX + 10):
            feed.announce(Change("record", str(number)))
            assert (await anext(fast)).node_id == str(number)
        assert (await anext(slow)).node_id == "10"
        for _ in range(QUEUE_MAX - 1):
            last = await anext(slow)
        assert last.node_id == str(QUEUE_MAX + 9)
        with trio.move_on_after(0.01) as nothing_more:
            await anext(slow)
        assert nothing_more.cancelled_caught


async def test_an_error_inside_the_routers_context_comes_out(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_libp2p_router(SwarmSettings(tmp_path, "127.0.0.1", 0, 0, mdns=False)):
            raise ZeroDivisionError


def test_a_key_has_one_id_and_signs_under_no_other(tmp_path: Path) -> None:
    """Else a node that was banned would come back under another spelling of its key."""
    identity = load_or_create_identity(tmp_path)
    encoded = ID.from_base58(identity.node_id).to_bytes()
    kind, key = encoded[2:4], encoded[4:]
    signature = identity.sign(b"content")
    for protobuf in (key + kind, kind + key + b"\x18\x01"):
        other = ID(bytes((0, len(protobuf))) + protobuf).to_base58()
        assert not verify(NodeId(other), b"content", signature)
    for short in (b"", b"\x00", b"\x00\x00", encoded[:-1], encoded + b"\x00"):
        assert not verify(NodeId(ID(short).to_base58()), b"content", signature)
    assert verify(identity.node_id, b"content", signature)
