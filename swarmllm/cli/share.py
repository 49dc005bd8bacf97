"""`swarmllm share` and `unshare`: a model over the nodes of the swarm with one command."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, Progress, TextColumn

from swarmllm.cli.client import Client, CommandFailed, WrongUsage, path_segment
from swarmllm.cli.display import duration, make_console, print_json, safe, short_id, size, table
from swarmllm.cli.models import add_file
from swarmllm.cli.options import api_option, json_option
from swarmllm.cli.pull import fetch, hub_of_environment

PATH = "/api/admin/shares"
LOOK_EVERY_S = 0.3
FROM_THE_WEB = ("hf:", "https://", "http://")
COLUMNS = ("node", "id", "layers", "memory", "to fetch")


@click.command(
    short_help="Share a model out over the nodes of the swarm.",
    epilog="""\b
Examples:
  swarmllm share guide
  swarmllm share ~/models/llama-70b-Q4_K_M-00001-of-00004.gguf
  swarmllm share hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0 --yes
""",
)
@click.argument("model")
@click.option("--name", help="What to call a model that is added or fetched.  [default: as in the file]")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@api_option
def share(model: str, name: str | None, yes: bool, as_json: bool, api_url: str) -> None:
    """Share MODEL out over the nodes of the swarm: each node that accepts it holds some of its layers.

    MODEL is a name that the node knows, a GGUF file (which is added), or hf:ORG/REPO:FILE.gguf or an https
    address. Shows who would take which layers, and asks once. Of a model from the web, that comes from its
    header, before anything else is fetched. Then each node fetches the layers that it is going to hold from
    its own hub (HF_ENDPOINT), so that the model need fit no single disk; what a node cannot fetch, another
    one does. Each node hashes what it fetches, and together they find out which model it is. Nobody has the
    whole file then, so nobody compares its SHA-256: what only one node has fetched is as right as that node.
    Where that cannot be (an architecture whose cuts are not known, one node for all layers, nodes of before),
    this node fetches all of it, and the others their layers from it and from their own hub.

    A node accepts what its configuration says (`auto_manage.accept`): by default, in a private swarm, what
    its members share; in the open swarm, nothing. It gives `auto_manage.max_memory_gib` of memory and
    `auto_manage.max_disk_gib` of disk, and fetches the bytes of its layers from the nodes that have them.

    The nodes keep to it as others come and go, and when they start again, until `swarmllm unshare`. Ctrl-C
    only ends the looking on.
    """
    if not (yes or can_ask()):
        raise WrongUsage("Nobody can be asked here: look at the plan on a terminal, or say --yes.")
    with Client(api_url) as client:
        published = model.startswith(FROM_THE_WEB)
        if published:
            body = {"source": model, **({"name": name} if name else {}), **hub_of_environment()}
            plan = client.post(f"{PATH}/plan", body)
            _agree(plan, yes=yes, show=not as_json)
        if published and plan.get("spread"):
            view = client.post(f"{PATH}/published", body)
        else:
            model, source = _known(client, model, name, show=not as_json)
            plan = client.get(f"{PATH}/{path_segment(model)}/plan")
            _agree(plan, yes=yes or published, show=not (as_json or published))
            view = client.post(PATH, {"model": plan["model_id"], **({"source": source} if source else {})})
        view = _follow(client, view, show=not as_json)
    if as_json:
        print_json(view)
        return
    nodes = [f"{_name(each)} {', '.join(each['layers'])}" for each in view["members"] if each["layers"]]
    click.echo(safe(f"{view['model']}: complete. {'; '.join(nodes)}."))
    click.echo(f'Ask it: swarmllm chat --model {safe(view["model"])} "..."')


@click.command(short_help="End sharing a model; the nodes drop their parts.")
@click.argument("model")
@json_option
@api_option
def unshare(model: str, as_json: bool, api_url: str) -> None:
    """End sharing MODEL. Each node drops the layers that it loaded for it, and keeps what its user loaded.

    What was fetched stays on the disks until its room is needed for another shared model.
    """
    with Client(api_url) as client:
        view = client.delete(f"{PATH}/{path_segment(model)}")
    if as_json:
        print_json(view)
    else:
        click.echo(f"{safe(view['model'])}: not shared any more; the nodes drop what they loaded for it.")


def can_ask() -> bool:
    """Whether somebody may answer."""
    return sys.stdin.isatty()


def _agree(plan: dict[str, Any], *, yes: bool, show: bool) -> None:
    """Raises CommandFailed where it cannot be shared like this, or is not to be."""
    if show:
        _show(plan)
    if plan["problem"] and plan.get("cuts_known", True):
        raise CommandFailed(safe(plan["problem"]))
    if not yes and not click.confirm("Share it out like this?", default=True, err=not show):
        raise CommandFailed("Nothing was shared.")


def _known(client: Client, model: str, name: str | None, *, show: bool) -> tuple[str, str]:
    """The name of a model that the node knows then, and where its file is published (empty: nowhere)."""
    if model.startswith(FROM_THE_WEB):
        fetched = fetch(client, model, name, show=show)
        return str(fetched["model"]), str(fetched.get("published", ""))
    path = Path(model).expanduser()
    if path.exists() and (os.sep in model or path.suffix == ".gguf"):
        return str(add_file(client, path, name, show=show)["name"]), ""
    if os.sep in model:
        raise WrongUsage(
            f"There is no file {model}. A model on the hub is hf:ORG/REPO or hf:ORG/REPO:FILE.gguf."
        )
    if name is not None:
        raise WrongUsage(f"--name is for a file or an address, and {model!r} is neither.")
    return model, ""


def _show(plan: dict[str, Any]) -> None:
    click.echo(f"{safe(plan['model'])}, {size(plan['size_bytes'])}:")
    first = "download_bytes" in plan
    rows = [
        (
            _name(part),
            short_id(part["node_id"]),
            ", ".join(part["layers"]) or "-",
            f"{size(part['size_bytes'])} of {size(part['room_bytes'])}",
            size(fetch_bytes) if fetch_bytes else "-",
        )
        for part in plan["parts"]
        for fetch_bytes in (plan["download_bytes"] if first and part["is_self"] else part["fetch_bytes"],)
    ]
    make_console().print(table(COLUMNS, rows, right=("memory", "to fetch")))
    for node in plan["refusing"]:
        click.echo(safe(f"{_name(node)} does not accept what this node shares (auto_manage.accept)"))
    if plan["tokens_per_s"] is not None:
        click.echo(f"expected: {plan['tokens_per_s']:.1f} tokens/s for one request")
    if plan["problem"] and plan.get("cuts_known", True):
        return
    if plan.get("spread"):
        click.echo(f"each node fetches its layers from its hub: {size(plan['download_bytes'])} here")
    elif first:
        click.echo(f"this node fetches all of it first: {size(plan['download_bytes'])}")
        if not plan["cuts_known"]:
            click.echo("where it can be cut is tried when it is here; the parts may change then")
    if plan["transfer_s"]:
        guess = "" if plan["transfer_measured"] else ", if the lines carry 1 Gbit/s"
        click.echo(f"transfer: {duration(plan['transfer_s'])}{guess}")


def _follow(client: Client, view: dict[str, Any], *, show: bool) -> dict[str, Any]:
    console = make_console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} layers", markup=False),
        TextColumn("{task.fields[doing]}", markup=False),
        console=console,
        transient=True,
        disable=not (show and console.is_terminal),
    )
    try:
        with bar:
            task = bar.add_task(safe(view["model"]), total=view["n_layers"], doing="")
            while not view["complete"]:
                if view.get("problem"):
                    raise CommandFailed(safe(f"{view['model']}: {view['problem']}"))
                # Of what each node still fetches for itself, nobody knows the id.
                path = f"{PATH}/{view['model_id'] or path_segment(view['model'])}"
                bar.update(
                    task, completed=view["n_ready"], total=view["n_layers"] or None, doing=doing_text(view)
                )
                time.sleep(LOOK_EVERY_S)
                view = dict(client.get(path))
    except KeyboardInterrupt:
        click.echo("\nThe nodes go on; see: swarmllm status", err=True)
        raise
    return view


def doing_text(view: dict[str, Any]) -> str:
    """What every member fetches or loads, and how much of it has come."""
    doing = []
    for each in view["members"]:
        layers, total = ", ".join(each["loading"]), each.get("total_bytes", 0)
        if layers and total:
            come = f"{size(each['arrived_bytes'])} of {size(total)}"
            doing.append(f"{_name(each)} fetches {layers}, {come}")
        elif layers:
            doing.append(f"{_name(each)} loads {layers}")
    return safe("; ".join(doing) or view["state"])


def _name(node: dict[str, Any]) -> str:
    return str(node["nickname"] or short_id(node["node_id"]))
