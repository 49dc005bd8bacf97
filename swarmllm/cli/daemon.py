"""`swarmllm daemon`: flags become configuration, then the daemon takes over.

`swarmllm bootstrap` starts in the same way.

Every flag is one configuration key and takes its help from there; the table says which. A flag for each of
the thirty-odd keys would bury the few that people type, so the rest are set in the file or the environment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from swarmllm.cli.client import CommandFailed, WrongUsage
from swarmllm.cli.options import config_option
from swarmllm.config import keys_of
from swarmllm.config_sources import load_config
from swarmllm.errors import ConfigError, SwarmLLMError

if TYPE_CHECKING:
    from swarmllm.daemon import DaemonInfo, OpenNode
    from swarmllm.swarm.membership.network_key import Network

FLAGS = {
    "--nickname": "node.nickname",
    "--data-dir": "node.data_dir",
    "--log-level": "node.log_level",
    "--listen-host": "network.listen_host",
    "--libp2p-port": "network.libp2p_port",
    "--data-port": "network.data_port",
    "--bootstrap": "network.bootstrap",
    "--mdns/--no-mdns": "network.mdns",
    "--api-port": "api.port",
    "--load": "model.load",
    "--restore/--no-restore": "model.restore",
    "--max-memory-gib": "auto_manage.max_memory_gib",
}
KINDS = {int: click.INT, float: click.FLOAT}


def configuration_flags(flags: Mapping[str, str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Options for keys of the configuration, passed on by the name of the key."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for flag, name in reversed(list(flags.items())):
            table, _, key = name.partition(".")
            field = keys_of(table)[key]
            many = isinstance(field.default, tuple)
            text = str(field.metadata["doc"]) + (" May be given several times." if many else "")
            kind = KINDS.get(type(field.default))
            command = click.option(flag, key, type=kind, multiple=many, default=None, help=text)(command)
        return command

    return decorate


serving_json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one line of JSON (pid, api_url, node_id, addresses) when the node serves.",
)


def print_line(_data_dir: Path, daemon_info: DaemonInfo) -> None:
    click.echo(msgspec.json.encode(daemon_info))


def _say_where(data_dir: Path, daemon_info: DaemonInfo) -> None:
    """To a person at a terminal; the log has the node's URL for everybody else."""
    if sys.stdout.isatty():
        from swarmllm.swarm.membership.network_key import NetworkFile

        click.echo(next_steps(daemon_info, NetworkFile(data_dir).read()))


def next_steps(daemon_info: DaemonInfo, network: Network) -> str:
    """What a person may want to do with a node that has just started."""
    from swarmllm.swarm.membership.invitation import join_command, outward

    lines = [
        f"Dashboard and chat:  {daemon_info.api_url}/",
        f"OpenAI API:          {daemon_info.api_url}/v1",
    ]
    if not outward(daemon_info.addresses):
        lines.append("Other machines:      cannot reach this node (network.listen_host, network.announce)")
    elif network.is_private:
        lines.append("Other machines:      join with what `swarmllm invite` prints here")
    else:
        lines.append(f"Other machines:      {join_command(network, daemon_info.addresses)}")
    return "\n".join(lines)


@click.command(
    short_help="Run a node on this machine until Ctrl-C.",
    epilog="""\b
Examples:
  swarmllm daemon --load guide
  swarmllm daemon --load guide:0:6 --nickname kitchen
  swarmllm daemon --bootstrap /ip4/192.0.2.7/tcp/8810/p2p/12D3KooW...
""",
)
@config_option
@configuration_flags(FLAGS)
@serving_json_option
def daemon(config_file: Path | None, as_json: bool, **values: object) -> None:
    """Run a node: join the swarm, serve layers, answer on the HTTP endpoint. Ctrl-C stops it cleanly.

    Settings come from, later ones winning: built-in defaults, the TOML file, SWARMLLM_<TABLE>_<KEY> in the
    environment, the flags below. Other nodes join this one with --bootstrap and an address that
    `swarmllm status` shows. On a terminal it prints where the dashboard is and how others
    join. SIGHUP makes it read its settings again.
    """
    run_node(config_file, FLAGS, values, on_serving=print_line if as_json else _say_where)


def run_node(
    config_file: Path | None,
    flags: Mapping[str, str],
    values: Mapping[str, object],
    *,
    on_serving: Callable[[Path, DaemonInfo], None],
    open_node: OpenNode | None = None,
) -> None:
    """Until it is stopped. `values`: of the flags, by the names of their keys. `on_serving` is told the data
    folder too; `open_node`: what runs, where it is not a daemon. Raises WrongUsage, CommandFailed."""
    given = {name: values[name.partition(".")[2]] for name in flags.values()}
    read = partial(
        load_config,
        config_file,
        flags={name: None if value == () else value for name, value in given.items()},
    )
    try:
        config = read()
    except ConfigError as error:
        raise WrongUsage(error.message) from None

    import trio

    from swarmllm.daemon import run_daemon

    try:
        trio.run(
            partial(
                run_daemon,
                config,
                reread=read,
                on_serving=partial(on_serving, config.data_dir),
                open_node=open_node,
            )
        )
    except ConfigError as error:
        raise WrongUsage(error.message) from None
    except SwarmLLMError as error:
        raise CommandFailed(error.message) from None
