"""`swarmllm network`, `invite` and `join`: private swarms, their keys, and invitations to them.

All work on the data folder, with or without a daemon; `invite` reads the addresses that the running daemon
has written down there. The key itself is never printed: it travels inside invitations.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from swarmllm.cli.client import failures_explained
from swarmllm.cli.display import print_json
from swarmllm.cli.options import data_dir_option, json_option
from swarmllm.errors import InvalidRequest

if TYPE_CHECKING:
    from swarmllm.swarm.membership.network_key import Network, NetworkFile

Command = TypeVar("Command", bound=Callable[..., object])

DAY_S = 86_400.0
RESTART = "A running daemon belongs to it after a restart."
DAEMON_FILE = "daemon.json"
TEXT_MAX = 64 * 1024


@click.group(
    short_help="Make the swarm private; change its key.",
    epilog="""\b
Examples:
  swarmllm network create          this node now has a swarm of its own
  swarmllm invite                  prints what other nodes need to join it
  swarmllm network rotate          a new key; the old one works for a week
""",
)
def network() -> None:
    """Make the swarm private; change its key.

    Nodes of a private swarm prove to each other that they know its key before anything else is said. Who
    does not know it sees a closed connection.
    """


def days_option(name: str, default: float, help_text: str) -> Callable[[Command], Command]:
    return click.option(
        name,
        type=click.FloatRange(0, 3650),
        default=default,
        show_default=True,
        help=help_text,
    )


@network.command(short_help="Found a private swarm with this node as its first member.")
@data_dir_option
@json_option
def create(data_dir: str | None, as_json: bool) -> None:
    """Found a private swarm with this node as its first member. Others join with `swarmllm invite`."""
    from swarmllm.swarm.membership.network_key import new_secret, private_network

    def found(known: Network) -> Network:
        if known.is_private:
            raise InvalidRequest("This node belongs to a private swarm already; see swarmllm network show.")
        return private_network(new_secret())

    with failures_explained():
        created = network_file(data_dir).change(found)
    _tell(created, as_json, f"Private swarm {created.network_id} is founded. {RESTART}")


@network.command(short_help="Show which swarm this node belongs to.")
@data_dir_option
@json_option
def show(data_dir: str | None, as_json: bool) -> None:
    """Show which swarm this node belongs to, and until when an older key is accepted."""
    with failures_explained():
        known = network_file(data_dir).read()
    if not known.is_private:
        _tell(known, as_json, "The open swarm: anyone who reaches this node's ports may join.")
        return
    lines = [f"Private swarm {known.network_id}."]
    lines += [f"An older key is accepted until {_moment(key)}." for key in _older(known)]
    _tell(known, as_json, "\n".join(lines))


@network.command(short_help="Make a new key; the old one is accepted for a while.")
@days_option("--overlap-days", 7.0, "How long the old key is accepted; 0: no more.")
@data_dir_option
@json_option
def rotate(overlap_days: float, data_dir: str | None, as_json: bool) -> None:
    """Make a new key; the old one is accepted for a while.

    Give every member that is to stay a new invitation within that time (`swarmllm invite` here, `swarmllm
    join` there). A running daemon takes over the new key within seconds. Connections that were proven with
    the old one end when it does, at each member that has the new key: the end travels in the invitation.
    """
    from swarmllm.swarm.membership.network_key import new_secret

    def renew(known: Network) -> Network:
        if not known.is_private:
            raise InvalidRequest("This node belongs to the open swarm, which has no key.")
        return known.rotated(new_secret(), time.time(), overlap_days * DAY_S)

    with failures_explained():
        renewed = network_file(data_dir).change(renew)
    until = "".join(f" The old one is accepted until {_moment(key)}." for key in _older(renewed))
    _tell(renewed, as_json, f"Private swarm {renewed.network_id} has a new key.{until}")


@network.command(short_help="Forget the private swarm; back to the open one.")
@click.confirmation_option("--yes", prompt="Forget the key? Without an invitation there is no way back.")
@data_dir_option
@json_option
def leave(data_dir: str | None, as_json: bool) -> None:
    """Forget the private swarm and its key; this node belongs to the open swarm after a restart."""
    from swarmllm.swarm.membership.network_key import OPEN_SWARM

    with failures_explained():
        network_file(data_dir).remove()
    _tell(OPEN_SWARM, as_json, "This node belongs to the open swarm after a restart.")


def network_file(data_dir: str | None) -> NetworkFile:
    """Raises ConfigError."""
    from swarmllm.config_sources import load_config
    from swarmllm.swarm.membership.network_key import NetworkFile

    return NetworkFile(load_config(flags={"node.data_dir": data_dir}).data_dir)


def _tell(known: Network, as_json: bool, text: str) -> None:
    if as_json:
        until = _older(known)
        print_json({"network_id": known.network_id, "private": known.is_private, "old_keys_until": until})
    else:
        click.echo(text)


def _older(known: Network) -> list[float]:
    return [k.accepted_until for k in known.keys if k.accepted_until is not None]


def _moment(accepted_until: float) -> str:
    return datetime.fromtimestamp(accepted_until, UTC).strftime("%Y-%m-%d %H:%M UTC")


@click.command(short_help="Make a string with which others can join.")
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="MULTIADDR",
    help="Instead of the daemon's own.",
)
@days_option("--expires-days", 7.0, "After this, `swarmllm join` refuses it.")
@data_dir_option
@json_option
def invite(addresses: tuple[str, ...], expires_days: float, data_dir: str | None, as_json: bool) -> None:
    """Make a string with which others can join.

    It holds the addresses of this node and, for a private swarm, its key: hand it over as you would a
    password. When it is out of date, `swarmllm join` refuses it; only `swarmllm network rotate` makes a key
    that got into the wrong hands worthless.
    """
    from swarmllm.swarm.membership.invitation import invitation, outward, to_text

    with failures_explained():
        file = network_file(data_dir)
        known = file.read()
        own = addresses or _addresses_of_daemon(file.path.parent)
        # Loopback addresses where there are no others: a swarm on one machine.
        where = addresses or outward(own) or own
        text = to_text(invitation(known, where, time.time() + expires_days * DAY_S))
    if as_json:
        print_json({"invitation": text, "network_id": known.network_id, "addresses": list(where)})
        return
    click.echo(text)
    if known.is_private:
        click.echo("It contains the key: anyone who has it can join.", err=True)
    else:
        click.echo(
            "It is for the open swarm; `swarmllm network create` makes this node's swarm private.", err=True
        )


@click.command(short_help="Join the swarm that an invitation is for.")
@click.argument("invitation")
@data_dir_option
@json_option
def join(invitation: str, data_dir: str | None, as_json: bool) -> None:
    """Join the swarm that INVITATION is for; - reads it from standard input, out of the shell's history.

    A member that joins its own network again takes over a new key, without a restart. The key it had before
    ends when `swarmllm network rotate` said, which the invitation knows.
    """
    from swarmllm.swarm.membership.invitation import accept, from_text

    text = sys.stdin.read(TEXT_MAX) if invitation == "-" else invitation
    now = time.time()
    with failures_explained():
        invited = from_text(text, now)
        file = network_file(data_dir)
        before = file.read()
        joined = file.change(lambda known: accept(invited, known, now))
    if as_json:
        print_json({"network_id": joined.network_id, "private": joined.is_private})
        return
    what = f"private swarm {joined.network_id}" if joined.is_private else "the open swarm"
    if before.is_private:
        click.echo(f"This node has the current key of {what}.")
    else:
        click.echo(f"This node belongs to {what}. Start its daemon, or restart it.")


def _addresses_of_daemon(data_dir: Path) -> tuple[str, ...]:
    try:
        found = json.loads((data_dir / DAEMON_FILE).read_text("utf-8"))["addresses"]
        return tuple(str(address) for address in found)
    except (OSError, ValueError, KeyError, TypeError):
        raise InvalidRequest(
            "No daemon runs here to tell its addresses: start it, or name one with --address."
        ) from None
