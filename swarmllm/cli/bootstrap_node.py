"""`swarmllm bootstrap`: a node without models by which others find each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmllm.cli.daemon import configuration_flags, print_line, run_node, serving_json_option
from swarmllm.cli.options import config_option

if TYPE_CHECKING:
    from swarmllm.daemon import DaemonInfo

FLAGS = {
    "--nickname": "node.nickname",
    "--data-dir": "node.data_dir",
    "--log-level": "node.log_level",
    "--listen-host": "network.listen_host",
    "--announce": "network.announce",
    "--libp2p-port": "network.libp2p_port",
    "--data-port": "network.data_port",
    "--bootstrap": "network.bootstrap",
    "--max-connections": "network.max_connections",
    "--mdns/--no-mdns": "network.mdns",
    "--api-port": "api.port",
}


def lines_for_others(daemon_info: DaemonInfo) -> str:
    """What goes into the file that other nodes' `network.bootstrap_file` names."""
    from swarmllm.swarm.membership.invitation import outward

    reachable = outward(daemon_info.addresses)
    head = "For network.bootstrap_file of other nodes:"
    if not reachable:
        head = "Only this machine reaches this node (network.listen_host, network.announce):"
    return "\n".join([f"# {head}", *(reachable or daemon_info.addresses)])


def _say_lines(_data_dir: Path, daemon_info: DaemonInfo) -> None:
    click.echo(lines_for_others(daemon_info))


@click.command(
    short_help="Run a node without models that others find each other by.",
    epilog="""\b
Examples:
  swarmllm bootstrap > nodes.txt
  swarmllm bootstrap --announce 192.0.2.7 --data-dir /srv/bootstrap
  swarmllm daemon --bootstrap /ip4/192.0.2.7/tcp/8810/p2p/12D3KooW...
""",
)
@config_option
@configuration_flags(FLAGS)
@serving_json_option
def bootstrap(config_file: Path | None, as_json: bool, **values: object) -> None:
    """Run a node by which the others find each other: it keeps their records, answers in the DHT, carries
    connections between nodes that cannot reach each other, and has no models. Ctrl-C stops it cleanly.

    It prints its addresses as they go into a file for network.bootstrap_file. On its HTTP endpoint it answers
    /health, /health/ready and /metrics only. Settings come from where `swarmllm daemon` has them;
    network.dht and network.relay_service are on whatever they say. One daemon or bootstrap node per data
    folder. SIGHUP makes it read its settings again.
    """
    from swarmllm.bootstrap_node import open_bootstrap_node

    run_node(
        config_file,
        FLAGS,
        values,
        on_serving=print_line if as_json else _say_lines,
        open_node=open_bootstrap_node,
    )
