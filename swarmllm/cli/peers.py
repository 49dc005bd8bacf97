"""`swarmllm peers`: who this node is connected to, and what they hold."""

from __future__ import annotations

from typing import Any

import click

from swarmllm.cli.client import Client
from swarmllm.cli.display import duration, make_console, print_json, size, table
from swarmllm.cli.options import api_option, json_option

COLUMNS = ("nickname", "node id", "rtt", "data plane", "sent", "received", "connected", "holds")


@click.command(short_help="Show the nodes this one is connected to.")
@json_option
@api_option
def peers(as_json: bool, api_url: str) -> None:
    """Show the nodes this one is connected to, how far away they are, and which layers they hold."""
    with Client(api_url) as client:
        answer = client.get("/api/admin/peers")
    if as_json:
        print_json(answer)
    elif answer["peers"]:
        rows = [_row(peer) for peer in answer["peers"]]
        make_console().print(table(COLUMNS, rows, right=("rtt", "sent", "received", "connected")))
    else:
        click.echo(
            "Connected to no other node. Start one with --bootstrap and an address from `swarmllm status`."
        )


def _row(peer: dict[str, Any]) -> tuple[object, ...]:
    holds = [f"{model['name']} {', '.join(model['layers'])}" for model in peer["models"]]
    return (
        peer["nickname"] or "-",
        peer["node_id"],
        "-" if peer["rtt_ms"] is None else f"{peer['rtt_ms']:.1f} ms",
        peer["data_plane"],
        size(peer["bytes_sent"]),
        size(peer["bytes_received"]),
        duration(peer["connected_s"]),
        "; ".join(holds) or "-",
    )
