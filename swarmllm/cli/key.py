"""`swarmllm key`: who may use this node's endpoint from elsewhere. Works on the key file, daemon or not."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args

import click

from swarmllm.cli.client import failures_explained
from swarmllm.cli.display import make_console, print_json, safe, table
from swarmllm.cli.options import data_dir_option, json_option
from swarmllm.keys import ApiKey, KeyFile, Tier


@click.group(
    short_help="Create, list and revoke API keys.",
    epilog="""\b
Examples:
  swarmllm key create laptop
  swarmllm key create operator --admin
  swarmllm key create guest --tier bronze --rate-limit 20
  swarmllm key list
  swarmllm key revoke laptop
""",
)
def key() -> None:
    """Create, list and revoke API keys.

    Without any key a node serves its own machine only, and asks nobody for one. As soon as there is one,
    every request must carry a key (Authorization: Bearer KEY, or x-api-key: KEY), and api.host may be an
    address that other machines can reach. A running daemon notices changes within a second. The commands
    of this program take theirs from SWARMLLM_KEY.
    """


@key.command(short_help="Make a key and show it, once.")
@click.argument("name")
@click.option("--admin", "is_admin", is_flag=True, help="May administer the node, not only use its models.")
@click.option(
    "--tier",
    type=click.Choice(get_args(Tier)),
    default="gold",
    show_default=True,
    help="Its share of max_concurrent_requests: bronze 1/4, silver 1/2, gold 1x, platinum 2x.",
)
@click.option(
    "--rate-limit",
    type=click.IntRange(0, 1_000_000),
    default=0,
    metavar="N",
    help="Requests per minute at most.  [default: no limit]",
)
@data_dir_option
@json_option
def create(
    name: str, is_admin: bool, tier: Tier, rate_limit: int, data_dir: str | None, as_json: bool
) -> None:
    """Make a key called NAME and show it. It is shown this once: what is kept is only a hash."""
    with failures_explained():
        file = key_file(data_dir)
        created, secret = file.create(name, is_admin=is_admin, tier=tier, rate_limit=rate_limit)
    if as_json:
        print_json(_public(created) | {"key": secret})
        return
    click.echo(secret)
    click.echo(f"This is key {safe(created.name)} ({created.id}). It is not shown again.", err=True)


@key.command("list", short_help="Show which keys there are.")
@data_dir_option
@json_option
def list_(data_dir: str | None, as_json: bool) -> None:
    """Show which keys there are. The keys themselves are known to their owners only."""
    with failures_explained():
        keys = key_file(data_dir).list()
    if as_json:
        print_json([_public(key) for key in keys])
    elif keys:
        rows = [
            (
                key.name,
                key.id,
                "admin" if key.is_admin else "use",
                key.tier,
                f"{key.rate_limit}/min" if key.rate_limit else "-",
                _date(key),
            )
            for key in keys
        ]
        make_console().print(table(("name", "id", "may", "tier", "limit", "created"), rows))
    else:
        click.echo("No keys: the node serves this machine only. Make one: swarmllm key create NAME")


@key.command(short_help="Make a key useless.")
@click.argument("name")
@data_dir_option
@json_option
def revoke(name: str, data_dir: str | None, as_json: bool) -> None:
    """Make the key called NAME, or with that id, useless. Requests that are running end as they would."""
    with failures_explained():
        revoked = key_file(data_dir).revoke(name)
    if as_json:
        print_json(_public(revoked))
    else:
        click.echo(f"Key {safe(revoked.name)} ({revoked.id}) is revoked.")


def key_file(data_dir: str | None) -> KeyFile:
    """Raises ConfigError."""
    from swarmllm.config_sources import load_config

    return KeyFile(load_config(flags={"node.data_dir": data_dir}).data_dir)


def _public(key: ApiKey) -> dict[str, object]:
    return {
        "id": key.id,
        "name": key.name,
        "is_admin": key.is_admin,
        "tier": key.tier,
        "rate_limit": key.rate_limit,
        "created_at": key.created_at,
    }


def _date(key: ApiKey) -> str:
    return datetime.fromtimestamp(key.created_at, UTC).strftime("%Y-%m-%d")
