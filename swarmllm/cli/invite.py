"""`swarmllm invite` and `swarmllm join`: from one member to the next in one string.

Both work on the data folder; `invite` reads the addresses that the running daemon has written down there.
"""

from __future__ import annotations

import ipaddress
import json
import sys
import time
from pathlib import Path

import click

from swarmllm.cli.client import failures_explained
from swarmllm.cli.display import print_json
from swarmllm.cli.network import DAY_S, days_option, network_file
from swarmllm.cli.options import data_dir_option, json_option
from swarmllm.errors import InvalidRequest

DAEMON_FILE = "daemon.json"
TEXT_MAX = 64 * 1024


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
    from swarmllm.swarm.membership.invitation import invitation, to_text

    with failures_explained():
        file = network_file(data_dir)
        known = file.read()
        where = addresses or _dialable(_addresses_of_daemon(file.path.parent))
        text = to_text(invitation(known, where, time.time() + expires_days * DAY_S))
    if as_json:
        print_json({"invitation": text, "network_id": known.network_id, "addresses": list(where)})
        return
    click.echo(text)
    if known.is_private:
        click.echo("It contains the key: whoever has it can join.", err=True)
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


def _dialable(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Without the loopback ones, unless there are no others (a swarm on one machine)."""
    outward = tuple(a for a in addresses if not ipaddress.ip_address(a.split("/")[2]).is_loopback)
    return outward or addresses
