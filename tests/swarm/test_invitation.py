"""Keys and invitations as values: what they carry, what they refuse, what they never show."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.errors import ConfigError, InvalidRequest
from swarmllm.swarm.membership.invitation import PREFIX, _check, accept, from_text, invitation, to_text
from swarmllm.swarm.membership.network_key import (
    OPEN_SWARM,
    NetworkFile,
    NetworkKey,
    network_id,
    new_secret,
    private_network,
)

ADDRESS = "/ip4/192.0.2.1/tcp/8810/p2p/12D3KooWA1v5eYQkTJ4Y8hF3F6yz7gQ6mXv4rNnTq8s5n2bJcKd9"
NOW = 1_000_000.0


def test_an_invitation_carries_key_and_addresses() -> None:
    network = private_network(new_secret())
    text = to_text(invitation(network, (ADDRESS,), NOW + 1))
    joined = accept(from_text(f" {text[:30]}\n{text[30:]} ", NOW), OPEN_SWARM, NOW)
    assert (joined.network_id, joined.accepted(NOW)) == (network.network_id, network.accepted(NOW))
    assert joined.bootstrap == (ADDRESS,)


def test_an_invitation_to_the_open_swarm_carries_addresses_only() -> None:
    joined = accept(from_text(to_text(invitation(OPEN_SWARM, (ADDRESS,), None)), NOW), OPEN_SWARM, NOW)
    assert not joined.is_private
    assert joined.bootstrap == (ADDRESS,)


@given(at=st.integers(0, 10_000), replacement=st.characters(codec="utf-8"))
def test_a_damaged_invitation_is_refused(at: int, replacement: str) -> None:
    text = to_text(invitation(private_network(bytes(range(32))), (ADDRESS,), None))
    at = len(PREFIX) + at % (len(text) - len(PREFIX))
    damaged = text[:at] + replacement + text[at + 1 :]
    try:
        invited = from_text(damaged, NOW)
    except InvalidRequest:
        return
    # The last character carries bits that mean nothing, and white space counts for nothing.
    assert (invited.secret, invited.addresses) == (bytes(range(32)), (ADDRESS,))


@given(st.text())
def test_any_other_text_is_refused_with_an_error_of_ours(text: str) -> None:
    with pytest.raises(InvalidRequest):
        from_text(text, NOW)
    with pytest.raises(InvalidRequest):
        from_text(PREFIX + text, NOW)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03"])
def test_what_is_whole_and_no_invitation_is_refused_as_damaged(body: bytes) -> None:
    content = base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")
    for text in (PREFIX + content, PREFIX + content + "!", PREFIX + "A"):
        with pytest.raises(InvalidRequest, match="damaged"):
            from_text(text, NOW)


def test_an_invitation_ends() -> None:
    text = to_text(invitation(private_network(new_secret()), (ADDRESS,), NOW))
    assert from_text(text, NOW - 1).addresses == (ADDRESS,)
    with pytest.raises(InvalidRequest, match="out of date"):
        from_text(text, NOW)


def test_an_invitation_needs_an_address_that_can_be_dialled() -> None:
    for addresses in ((), ("/ip4/192.0.2.1/tcp/8810",), ("nonsense",)):
        with pytest.raises(InvalidRequest):
            invitation(OPEN_SWARM, addresses, None)


def test_a_member_of_another_private_network_stays_there() -> None:
    invited = invitation(private_network(new_secret()), (ADDRESS,), None)
    with pytest.raises(InvalidRequest, match="another private network"):
        accept(invited, private_network(new_secret()), NOW)


def test_a_rotated_key_overlaps_with_the_one_before_and_keeps_the_network() -> None:
    old, new, newest = new_secret(), new_secret(), new_secret()
    network = private_network(old).rotated(new, NOW, 10)
    assert network.network_id == network_id(old)
    assert network.accepted(NOW + 9) == (new, old)
    assert network.accepted(NOW + 10) == (new,)
    assert network.rotated(new, NOW, 10) == network
    assert network.rotated(newest, NOW, 10).accepted(NOW) == (newest, new)


def test_an_invitation_from_before_a_rotation_takes_nothing_back() -> None:
    old = private_network(new_secret())
    stale = invitation(old, (ADDRESS,), None)
    rotated = old.rotated(new_secret(), NOW, 10)
    assert accept(stale, rotated, NOW).keys == rotated.keys


def test_the_end_of_an_older_key_travels_in_the_invitation() -> None:
    old, new = new_secret(), new_secret()
    for overlap_s in (0, 10):
        rotated = private_network(old).rotated(new, NOW, overlap_s)
        joined = accept(
            from_text(to_text(invitation(rotated, (ADDRESS,), None)), NOW), private_network(old), NOW
        )
        assert joined.accepted(NOW) == rotated.accepted(NOW)
        assert joined.accepted(NOW + overlap_s) == (new,)


def test_a_member_that_never_held_an_older_key_passes_its_end_on() -> None:
    old, new = new_secret(), new_secret()
    rotated = private_network(old).rotated(new, NOW, 10)
    late = accept(invitation(rotated, (ADDRESS,), None), OPEN_SWARM, NOW)
    assert late.accepted(NOW) == (new,)
    joined = accept(invitation(late, (ADDRESS,), None), private_network(old), NOW + 1)
    assert joined.accepted(NOW + 9) == (new, old)
    assert joined.accepted(NOW + 10) == (new,)


def test_two_rotations_end_each_key_at_its_own_time() -> None:
    first, second, third = new_secret(), new_secret(), new_secret()
    founder = private_network(first).rotated(second, NOW, 5).rotated(third, NOW, 100)
    joined = accept(invitation(founder, (ADDRESS,), None), private_network(first), NOW)
    assert joined.accepted(NOW + 4) == (third, first)
    assert joined.accepted(NOW + 5) == (third,)


def test_a_key_whose_end_is_not_named_ends_at_once() -> None:
    old, new = new_secret(), new_secret()
    unaware = msgspec.structs.replace(private_network(old), keys=(NetworkKey(secret=new),))
    joined = accept(invitation(unaware, (ADDRESS,), None), private_network(old), NOW)
    assert joined.accepted(NOW) == (new,)


def test_a_later_invitation_may_end_an_older_key_sooner_and_never_later() -> None:
    old, new = new_secret(), new_secret()
    short, long = (private_network(old).rotated(new, NOW, overlap_s) for overlap_s in (1, 10))
    for mine, theirs in ((short, long), (long, short)):
        joined = accept(invitation(theirs, (ADDRESS,), None), mine, NOW)
        assert joined.accepted(NOW) == (new, old)
        assert joined.accepted(NOW + 1) == (new,)


def test_a_key_that_two_rotations_replaced_does_not_come_back() -> None:
    first = private_network(new_secret())
    now = first.rotated(new_secret(), NOW, 10).rotated(new_secret(), NOW, 10)
    with pytest.raises(InvalidRequest, match="replaced"):
        accept(invitation(first, (ADDRESS,), None), now, NOW)


def test_keys_are_private_on_disk_and_never_shown(tmp_path: Path) -> None:
    file = NetworkFile(tmp_path / "node")
    assert file.read() == OPEN_SWARM
    secret = new_secret()
    network = file.change(lambda _: private_network(secret))
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    file.path.chmod(0o644)
    assert file.read() == network
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    shown = repr(network) + repr(invitation(network, (ADDRESS,), None)) + repr(NetworkKey(secret=secret))
    assert repr(secret)[2:12] not in shown
    assert secret.hex() not in shown


def test_a_network_may_be_left_twice(tmp_path: Path) -> None:
    file = NetworkFile(tmp_path)
    file.change(lambda _: private_network(new_secret()))
    for _ in range(2):
        file.remove()
        assert file.read() == OPEN_SWARM


def test_a_damaged_key_file_is_an_error_and_no_open_door(tmp_path: Path) -> None:
    file = NetworkFile(tmp_path)
    for content in (b"", b"{", b'{"network_id": "x"}', b'{"keys": [{"secret": "c2hvcnQ="}]}', b"\xff"):
        file.path.write_bytes(content)
        with pytest.raises(ConfigError, match="network key"):
            file.read()
    file.remove()
    assert file.read() == OPEN_SWARM


def test_no_byte_of_an_invitation_can_be_changed() -> None:
    text = to_text(invitation(private_network(bytes(range(32))), (ADDRESS,), NOW + 1))
    encoded = text.removeprefix(PREFIX)
    content = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    for at in range(len(content)):
        for bit in (0, 3):
            changed = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
            with pytest.raises(InvalidRequest, match="damaged"):
                from_text(PREFIX + base64.urlsafe_b64encode(changed).decode().rstrip("="), NOW)
