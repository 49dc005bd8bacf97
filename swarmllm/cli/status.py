"""`swarmllm status`: one node at a glance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.text import Text

from swarmllm.cli.client import Client
from swarmllm.cli.display import duration, make_console, print_json, safe, short_id, size
from swarmllm.cli.options import api_option, json_option
from swarmllm.cli.pull import pace


@click.command(short_help="Show what the node is doing.")
@json_option
@api_option
def status(as_json: bool, api_url: str) -> None:
    """Show who the node is, what it has loaded, how many requests it is working on, and what it
    computes for other nodes."""
    with Client(api_url) as client:
        stats = client.get("/api/admin/stats")
    if as_json:
        print_json(stats)
    else:
        console = make_console()
        for name, value in overview(stats, api_url):
            # Not a table: an address that is folded into a column cannot be copied.
            console.print(Text.assemble((f"{name:<11}", "bold"), safe(value)), soft_wrap=True)


def overview(stats: dict[str, Any], api_url: str) -> Iterator[tuple[str, str]]:
    """(heading or "", line), top to bottom."""
    requests = stats["requests"]
    state = "ready" if stats["ready"] else "not ready"
    models = []
    for model in stats["models"]:
        models.append(f"{model['name']}  layers {', '.join(model['layers'])}")
        if model.get("trouble"):
            models.append(f"  runs on, but cannot be loaded again: {model['trouble']}")

    def lines(name: str, values: Sequence[str]) -> Iterator[tuple[str, str]]:
        return zip([name, *[""] * (len(values) - 1)], values, strict=True)

    yield "node", f"{stats['nickname']}  {stats['node_id']}"
    yield (
        "state",
        f"{state}, up {duration(stats['uptime_s'])}, process {stats['pid']}, version {stats['version']}",
    )
    if not stats["ready"]:
        yield "", stats.get("reason") or "see its log"
    yield "endpoint", f"{api_url}/v1"
    yield from lines("addresses", stats["addresses"] or ["none: other nodes cannot dial this one"])
    yield "peers", f"{stats['peers_connected']} connected"
    yield "reachable", _reachable(stats.get("reachability"))
    if forwarded := _port_mapping(stats.get("port_mapping")):
        yield "ports", forwarded
    if dht := stats.get("dht"):
        yield "dht", _dht(dht)
    yield from lines("loaded", models or ["nothing: swarmllm models load NAME"])
    if gpus := [_gpu(each) for each in stats.get("gpus", ())]:
        n_layers = sum(worker.get("n_gpu_layers", 0) for worker in stats.get("workers", ()))
        yield from lines("gpus", [*gpus, f"{n_layers} layers are on them, output matrices counted as layers"])
    if said := [f"{each['name']}: {each['cause']}; {each['remedy']}" for each in stats.get("projectors", ())]:
        yield from lines("projectors", said)
    classes = dict.fromkeys(worker.get("kernel_class", "") for worker in stats.get("workers", ()))
    if said := [f"{each}, equal bits with nodes that say the same" for each in classes if each]:
        yield from lines("kernels", said)
    placed = [
        f"{model['name']}  layers {', '.join(model['target']) or 'none'} here, {model['state']}"
        for model in stats.get("placing", ())
    ]
    if placed:
        yield from lines("placing", placed)
    if shared := [_share(each) for each in stats.get("shares", ())]:
        yield from lines("shared", shared)
    if fetched := [_download(each) for each in stats.get("downloads", ())]:
        yield from lines("fetching", fetched)
    if loading := [_loading(each) for each in stats.get("loading", ())]:
        yield from lines("loading", loading)
    if served := [serving_line(each) for each in stats.get("serving", ())]:
        yield from lines("serving", served)
    failed = [
        f"{task['name']}: {task['state']}, failed {task['n_failures']} times; {task['last_error']}"
        for task in stats.get("tasks_failed", ())
    ]
    if failed:
        yield from lines("tasks", failed)
    yield "requests", f"{requests['active']} of {requests['max']} running, {requests['queued']} waiting"
    yield (
        "",
        f"{requests['completed']} completed, {requests['failed']} failed, {requests['cancelled']} cancelled",
    )
    yield "generated", f"{stats['generated_tokens']} tokens"


def serving_line(served: dict[str, Any]) -> str:
    """What this node computes of one model for another node."""
    who = served["nickname"] or short_id(served["node_id"])
    model = served["name"] or short_id(served["model_id"])
    now = f"{served['tokens_per_s']:g} tokens/s" if served["active"] else "idle"
    return (
        f"{model}  layers {', '.join(served['layers'])}  for {who}, {now}, {served['tokens']} tokens so far"
    )


def _gpu(gpu: dict[str, Any]) -> str:
    free = f"{size(gpu['free_bytes'])} of {size(gpu['total_bytes'])} free"
    shared = "" if gpu["has_own_memory"] else ", of the machine's memory"
    return f"{gpu['name']}  {gpu['description']}, {free}{shared}"


def _share(share: dict[str, Any]) -> str:
    """How far a model is that is shared out, and what of this node's part has come."""
    state = "complete" if share["complete"] else f"{share['n_ready']} of {share['n_layers'] or '?'} layers"
    if share.get("model_id") == "":
        state = share.get("problem") or share["state"]
    come = ""
    if share["arrived_bytes"] < share["total_bytes"]:
        come = f", {size(share['arrived_bytes'])} of {size(share['total_bytes'])} fetched here"
    return f"{share['model']}  {state}{come}"


def _loading(loading: dict[str, Any]) -> str:
    """How far a model is that a request asks for."""
    percent = f", {100 * loading['done'] // loading['total']} %" if loading["total"] else ""
    return f"{loading['model']}  {loading['phase']}{percent}"


def _download(download: dict[str, Any]) -> str:
    done = f"{size(download['done_bytes'])} of {size(download['total_bytes'])}"
    return "  ".join(filter(None, (download["source"], download["state"], done, pace(download))))


def _dht(dht: dict[str, Any]) -> str:
    if dht["mode"] == "off":
        return "off: only models of connected nodes are found"
    client = " (client: it answers nobody)" if dht["mode"] == "client" else ""
    n_nodes, n_models = dht["n_nodes"], dht["n_announced"] // 2
    nodes = "1 node answers" if n_nodes == 1 else f"{n_nodes} nodes answer"
    return f"{nodes}, {n_models} model{'' if n_models == 1 else 's'} announced{client}"


def _port_mapping(found: dict[str, Any] | None) -> str:
    if found is None or found["state"] in ("off", "idle"):
        return ""
    return found["detail"] if found["state"] == "mapped" else f"not forwarded: {found['detail']}"


def _reachable(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not checked yet: a peer has to try"
    planes = {"control port": found["control"], "data port": found["data"]}
    works = [name for name, attempts in planes.items() if any(a["reached"] for a in attempts)]
    fails = [name for name in planes if name not in works]
    said = [f"{' and '.join(works)} yes"] if works else []
    if fails:
        where = f"; others see {found['observed_ip']}" if found["observed_ip"] else ""
        said.append(f"{' and '.join(fails)} no (a firewall, or network.announce{where})")
    return f"{', '.join(said)}; tried by {short_id(found['asked'])}"
