"""`swarmllm network`, `invite` and `join`: one member makes a string, the other joins with it."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swarmllm.cli.main import main
from swarmllm.swarm.membership.network_key import NetworkFile

ADDRESS = "/ip4/192.0.2.1/tcp/8810/p2p/12D3KooWA1v5eYQkTJ4Y8hF3F6yz7gQ6mXv4rNnTq8s5n2bJcKd9"
LOOPBACK = ADDRESS.replace("192.0.2.1", "127.0.0.1")


def run(folder: Path, *arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, [*arguments, "--data-dir", str(folder)], input=stdin)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The data folder of a node whose daemon runs."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "daemon.json").write_text(json.dumps({"addresses": [LOOPBACK, ADDRESS]}))
    return folder


def test_a_second_node_joins_a_private_swarm(here: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    assert "Private swarm" in run(here, "network", "create").output
    invited = run(here, "invite")
    text = invited.stdout.strip()
    assert "contains the key" in invited.stderr
    assert "Start its daemon" in run(there, "join", "-", stdin=f"{text}\n").output
    first, second = NetworkFile(here).read(), NetworkFile(there).read()
    assert first.is_private
    assert (first.network_id, first.keys) == (second.network_id, second.keys)
    assert second.bootstrap == (ADDRESS,)
    assert first.network_id in run(there, "network", "show").output


def test_a_new_key_reaches_the_other_with_a_new_invitation(here: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    run(here, "network", "create")
    run(there, "join", run(here, "invite").stdout.strip())
    assert "new key" in run(here, "network", "rotate", "--overlap-days", "3").output
    assert "current key" in run(there, "join", run(here, "invite").stdout.strip()).output
    secrets_here, secrets_there = (
        [key.secret for key in NetworkFile(folder).read().keys] for folder in (here, there)
    )
    assert secrets_here == secrets_there
    assert json.loads(run(here, "network", "show", "--json").output)["old_keys_until"][0] > 0


def test_no_overlap_means_now_at_every_member_that_has_the_new_key(here: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    run(here, "network", "create")
    run(there, "join", run(here, "invite").stdout.strip())
    run(here, "network", "rotate", "--overlap-days", "0")
    run(there, "join", run(here, "invite").stdout.strip())
    networks = [NetworkFile(folder).read() for folder in (here, there)]
    assert networks[0].keys == networks[1].keys
    assert all(network.accepted(time.time()) == (network.keys[0].secret,) for network in networks)


def test_the_key_is_shown_only_inside_an_invitation(here: Path) -> None:
    created = run(here, "network", "create", "--json").output
    shown = created + run(here, "network", "show").output + run(here, "network", "show", "--json").output
    shown += run(here, "network", "rotate").output
    for key in NetworkFile(here).read().keys:
        assert base64.b64encode(key.secret).decode() not in shown
        assert key.secret.hex() not in shown


def test_an_open_swarms_invitation_holds_addresses(here: Path, tmp_path: Path) -> None:
    made = json.loads(run(here, "invite", "--json").output)
    assert (made["network_id"], made["addresses"]) == ("", [ADDRESS])
    assert "open swarm" in run(tmp_path / "there", "join", made["invitation"]).output
    assert NetworkFile(tmp_path / "there").read().bootstrap == (ADDRESS,)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("join", "swarmllm-join-broken"), "damaged"),
        (("join", "something"), "no invitation"),
        (("network", "rotate"), "open swarm"),
        (("invite", "--address", "nowhere"), "not of the form"),
    ],
)
def test_what_cannot_be_meant_is_refused(here: Path, arguments: tuple[str, ...], said: str) -> None:
    refused = run(here, *arguments)
    assert refused.exit_code == 4
    assert said in refused.stderr


def test_a_member_stays_until_it_leaves(here: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run(here, "network", "create")
    run(other, "network", "create")
    text = run(here, "invite").stdout.strip()
    assert "another private network" in run(other, "join", text).stderr
    assert "already" in run(here, "network", "create").stderr
    assert "open swarm" in run(other, "network", "leave", "--yes").output
    assert run(other, "join", text).exit_code == 0


def test_without_a_daemon_an_address_must_be_given(tmp_path: Path) -> None:
    assert "--address" in run(tmp_path, "invite").stderr
    assert run(tmp_path, "invite", "--address", ADDRESS).exit_code == 0
