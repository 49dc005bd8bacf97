"""`swarmllm top`: the node and its swarm, live in the terminal, from the stream that feeds the dashboard."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from swarmllm.cli.client import Client, CommandFailed
from swarmllm.cli.display import (
    departed,
    duration,
    make_console,
    milliseconds,
    print_json,
    safe,
    short_id,
    size,
    table,
)
from swarmllm.cli.options import api_option, json_option

PATH = "/api/events"
SECTIONS = ("node", "peers", "models", "requests", "downloads", "work")
STRIP_WIDTH = 32
RECENT_SHOWN = 8
State = dict[str, Any]


@click.command(
    short_help="Watch nodes, pipelines, tokens per second and memory.",
    epilog="""\b
Examples:
  swarmllm top
  swarmllm top --once
  swarmllm top --json | jq .node.tokens_per_s
""",
)
@click.option("--once", is_flag=True, help="Print what there is now and leave.")
@json_option
@api_option
def top(once: bool, as_json: bool, api_url: str) -> None:
    """Watch the swarm live: nodes, their memory, who holds which layers, what runs and where its time goes.
    Ctrl-C leaves. Where the output is no terminal, --once is meant."""
    with Client(api_url) as client:
        states = follow(client)
        if as_json or once or not sys.stdout.isatty():
            # A rate takes two looks; the node says null until then.
            state = next(state for state in states if state["node"]["tokens_per_s"] is not None)
            if as_json:
                print_json(state)
            else:
                make_console().print(screen(state))
            return
        with Live(console=make_console(), screen=True, auto_refresh=False) as live:
            try:
                for state in states:
                    live.update(screen(state), refresh=True)
            except KeyboardInterrupt:
                return


def follow(client: Client) -> Iterator[State]:
    """The whole state, again after every change."""
    state: State = {}
    for name, data in client.events(PATH):
        if name in SECTIONS:
            state[name] = data
        if state.keys() >= set(SECTIONS):
            yield state
    raise CommandFailed("The node closed the connection; is it stopping?")


def screen(state: State) -> RenderableType:
    parts: list[RenderableType] = [_head(state), "", _nodes(state)]
    if left := state["peers"].get("left"):
        parts += ["", departed(left, time.time())]
    if held := [model for model in state["models"]["models"] if model["holders"]]:
        parts += ["", *_strips(held)]
    parts += ["", _live(state["requests"]["live"])]
    if serving := state["node"].get("serving"):
        parts += ["", _serving(serving)]
    if recent := state["requests"]["recent"][:RECENT_SHOWN]:
        parts += ["", _recent(recent)]
    for each in _in_progress(state):
        parts += ["", each]
    return Group(*parts)


def _head(state: State) -> Text:
    node = state["node"]
    requests = node["requests"]
    resident_bytes = node["resident_bytes"] + sum(worker["resident_bytes"] for worker in node["workers"])
    facts = [
        f"{node['tokens_per_s'] or 0:.0f} tokens/s",
        f"{requests['active']} of {requests['max']} running, {requests['queued']} waiting",
        f"{requests['completed']} completed, {requests['failed']} failed",
        f"{size(resident_bytes)} of {size(node['memory_total_bytes'])} memory",
    ]
    return Text.assemble((safe(node["nickname"]), "bold"), "  ", " · ".join(facts))


def _nodes(state: State) -> RenderableType:
    node = state["node"]
    rows = [
        _node_row(f"{node['nickname']} (this node)", node, node["memory_available_bytes"], "-", "-"),
        *(
            _node_row(
                peer["nickname"] or "-",
                peer,
                peer["memory_free_bytes"],
                "-" if peer["rtt_ms"] is None else f"{peer['rtt_ms']:.1f} ms",
                peer["data_plane"],
            )
            for peer in state["peers"]["peers"]
        ),
    ]
    return table(("node", "id", "rtt", "data", "free memory"), rows, right=("rtt", "free memory"))


def _node_row(name: str, node: State, free_bytes: int, rtt: str, plane: str) -> tuple[object, ...]:
    total_bytes = node["memory_total_bytes"]
    memory = f"{size(free_bytes)} of {size(total_bytes)}" if total_bytes else "-"
    return name, short_id(node["node_id"]), rtt, plane, memory


def _strips(models: list[State]) -> Iterator[RenderableType]:
    for model in models:
        missing = ", ".join(model["missing"])
        state = "complete" if model["complete"] else f"layers {missing} missing" if missing else "incomplete"
        rows: list[tuple[object, ...]] = [
            (holder["nickname"] or short_id(holder["node_id"]), strip(holder["layers"], model["n_layers"]))
            for holder in model["holders"]
        ]
        if missing:
            rows.append(("missing", Text(strip(model["missing"], model["n_layers"]), style="red")))
        columns = (f"{model['name']}", f"{model['n_layers']} layers, {state}")
        yield table([safe(column) for column in columns], rows)


def strip(layers: list[str], n_layers: int) -> str:
    """Layer ranges as a bar; a cell is full where all its layers are held, half where some are."""
    held = {layer for text in layers for layer in range(*map(int, text.split(":")))}
    width = min(STRIP_WIDTH, n_layers)
    cells = []
    for cell in range(width):
        inside = range(cell * n_layers // width, (cell + 1) * n_layers // width)
        n_held = sum(layer in held for layer in inside)
        cells.append("█" if n_held == len(inside) else "▒" if n_held else "·")
    return "".join(cells)


def _live(requests: list[State]) -> RenderableType:
    if not requests:
        return Text("nothing runs right now", style="dim")
    rows = [
        (
            request["model"],
            request["state"],
            request["generated_tokens"],
            _rate(request["tokens_per_s"]),
            duration(request["elapsed_ms"] / 1000),
            _route(request["route"], times=True),
        )
        for request in requests
    ]
    columns = ("running", "state", "tokens", "tokens/s", "for", "route (ms per token: compute + node, hop)")
    return table(columns, rows, right=("tokens", "tokens/s", "for"))


def _serving(serving: list[State]) -> RenderableType:
    rows = [
        (
            each["name"] or short_id(each["model_id"]),
            ", ".join(each["layers"]),
            each["nickname"] or short_id(each["node_id"]),
            each["active"],
            each["tokens"],
            _rate(each["tokens_per_s"]),
        )
        for each in serving
    ]
    columns = ("computed for others", "layers", "for", "running", "tokens", "tokens/s")
    return table(columns, rows, right=("running", "tokens", "tokens/s"))


def _recent(requests: list[State]) -> RenderableType:
    rows = [
        (
            request["model"],
            request["error"] or request["state"],
            request["generated_tokens"],
            _rate(request["tokens_per_s"]),
            "-" if request["first_token_ms"] is None else f"{request['first_token_ms']:.0f} ms",
            _route(request["route"], times=False),
        )
        for request in requests
    ]
    columns = ("recent", "outcome", "tokens", "tokens/s", "first token", "route")
    return table(columns, rows, right=("tokens", "tokens/s", "first token"))


def _route(route: list[State], *, times: bool) -> str:
    parts = []
    for stage in route:
        part = f"{stage['nickname'] or short_id(stage['node'])} {stage['layers']}"
        if times:
            spent = stage["compute_ms_per_token"] + stage["overhead_ms_per_token"]
            part += f" {milliseconds(spent)}, {milliseconds(stage['network_ms_per_token'])}"
        parts.append(part)
    return " → ".join(parts) or "-"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _in_progress(state: State) -> Iterator[RenderableType]:
    rows = [
        (work["kind"], work["model"], work["phase"] or "-", _share(work)) for work in state["work"]["running"]
    ]
    rows += [
        ("fetch", each["source"], each["state"], _share(each))
        for each in state["downloads"]["downloads"]
        if each["state"] in ("waiting", "fetching", "checking")
    ]
    if rows:
        yield table(("in progress", "what", "phase", "done"), rows)


def _share(work: State) -> str:
    total_bytes = work["total_bytes"]
    return f"{size(work['done_bytes'])} of {size(total_bytes)}" if total_bytes else "-"
