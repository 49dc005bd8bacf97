"""`swarmllm peers`: who this node is connected to, what they hold, and why one is trusted or not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click
from rich.text import Text

from swarmllm.cli.client import Client, path_segment
from swarmllm.cli.display import departed, duration, make_console, print_json, safe, short_id, size, table
from swarmllm.cli.options import api_option, json_option

COLUMNS = ("nickname", "node id", "rtt", "data plane", "sent", "received", "connected", "trust", "holds")
NUMBERS = ("rtt", "sent", "received", "connected", "trust")
TRAFFIC = ("sent", "received")
ALL_COLUMNS_WIDTH = 100
"""A narrower terminal goes without the traffic."""


@click.group(short_help="Show the nodes this one is connected to.", invoke_without_command=True)
@json_option
@api_option
@click.pass_context
def peers(context: click.Context, as_json: bool, api_url: str) -> None:
    """Show the nodes this one is connected to, how far away they are, and which layers they hold; and those
    that have left within the last hour."""
    if context.invoked_subcommand is not None:
        return
    with Client(api_url) as client:
        answer = client.get("/api/admin/peers")
    if as_json:
        print_json(answer)
    elif answer["peers"]:
        console = make_console()
        # Whole ids would fill a terminal's lines; what is piped is for programs.
        name = short_id if console.is_terminal else str
        shown = [column for column in COLUMNS if console.width >= ALL_COLUMNS_WIDTH or column not in TRAFFIC]
        rows = [_row(peer, name(peer["node_id"])) for peer in answer["peers"]]
        console.print(table(shown, [[row[column] for column in shown] for row in rows], right=NUMBERS))
    else:
        click.echo(
            "Connected to no other node. Start one with --bootstrap and an address from `swarmllm status`."
        )
    if not as_json and (left := answer.get("left")):
        click.echo()
        make_console().print(departed(left, time.time()))


@peers.command(short_help="Explain one node: its link, and how far it is trusted.")
@click.argument("node")
@json_option
@api_option
def show(node: str, as_json: bool, api_url: str) -> None:
    """Explain one node: the link to it, and how far it is trusted, because of what.

    NODE is a node id, the last characters of one, or a nickname.
    """
    with Client(api_url) as client:
        answer = client.get(f"/api/admin/peers/{path_segment(node)}")
    if as_json:
        print_json(answer)
        return
    console = make_console()
    for name, value in _overview(answer):
        console.print(Text.assemble((f"{name:<11}", "bold"), safe(value)), soft_wrap=True)
    if recent := answer["trust"]["recent"]:
        console.print()
        rows = [(_moment(e["at"]), f"{e['score']:.2f}", e["meaning"], e["detail"] or "-") for e in recent]
        console.print(table(("when", "trust then", "what it did", "detail"), rows, right=("trust then",)))


def _overview(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    link, trust = answer["connected"], answer["trust"]
    yield "node", f"{answer['nickname'] or '-'}  {answer['node_id']}"
    if link is None:
        yield "link", "not connected"
    else:
        rtt = "unknown" if link["rtt_ms"] is None else f"{link['rtt_ms']:.1f} ms"
        plane = "for gossip until there is work" if link["data_plane"] == "none" else link["data_plane"]
        yield "link", f"{plane}, round trip {rtt}, connected for {duration(link['connected_s'])}"
        speed = "" if link["bytes_per_s"] is None else f", at {size(link['bytes_per_s'])}/s when large"
        yield "traffic", f"{size(link['bytes_sent'])} sent, {size(link['bytes_received'])} received{speed}"
        if link["damaged_jobs"]:
            yield "", f"{link['damaged_jobs']} jobs arrived damaged and were sent again"
        if link["announced_prefixes"]:
            yield "keeps", f"the KV of {link['announced_prefixes']} prompts' beginnings"
        for kernel_class in dict.fromkeys(model.get("kernel_class") for model in link.get("models", ())):
            if kernel_class:
                yield "kernels", f"{kernel_class}, equal bits with nodes that say the same"
        for gpu in link.get("gpus", ()):
            yield "gpu", f"{gpu['name']}, {size(gpu['free_bytes'])} of {size(gpu['total_bytes'])} free"
        for address in link["addresses"]:
            yield "address", address
    why = f"{trust['listed']} by the settings" if trust["listed"] else "0.50 is where everybody starts"
    yield "trust", f"{trust['score']:.2f} of 1 ({why})"
    verdict = "may take part in pipelines and give bytes" if trust["may_work"] else "gets no work"
    yield "", f"{verdict}: {trust['work_min']:.2f} is needed"
    outcomes = {"right": "checked", "wrong": "wrong result", "disputed": "disputed"}
    said = [f"{n} {name}" for name, event in outcomes.items() if (n := trust["counts"].get(event, 0))]
    yield "checks", ", ".join(said) or "none of its results has been computed again"
    for event, n_times in trust["counts"].items():
        yield "", f"{n_times} x {event}"


def _row(peer: dict[str, Any], node_id: str) -> dict[str, str]:
    holds = [f"{model['name']} {', '.join(model['layers'])}" for model in peer["models"]]
    if left_out := peer["n_models"] - len(peer["models"]):
        holds.append(f"and {left_out} more")
    return {
        "nickname": peer["nickname"] or "-",
        "node id": node_id,
        "rtt": "-" if peer["rtt_ms"] is None else f"{peer['rtt_ms']:.1f} ms",
        "data plane": peer["data_plane"],
        "sent": size(peer["bytes_sent"]),
        "received": size(peer["bytes_received"]),
        "connected": duration(peer["connected_s"]),
        "trust": f"{peer['trust']:.2f}",
        "holds": "; ".join(holds) or "-",
    }


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
