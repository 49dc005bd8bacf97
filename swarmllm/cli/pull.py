"""`swarmllm models pull`, `pulls` and `search`: models from the web, which the node fetches."""

from __future__ import annotations

import os
import time
from typing import Any

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from swarmllm.cli.client import Client, CommandFailed, WrongUsage, path_segment
from swarmllm.cli.display import duration, make_console, print_json, safe, size, table
from swarmllm.cli.options import api_option, json_option

PATH = "/api/admin/downloads"
SEARCH_PATH = "/api/admin/models/search"
LOOK_EVERY_S = 0.3
RUNNING = ("waiting", "fetching", "checking")
ALL = "all"


@click.command(
    short_help="Fetch a model from Hugging Face or an https address.",
    epilog="""\b
Examples:
  swarmllm models pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0
  swarmllm models pull hf:ORG/REPO:FILE.gguf --name qwen
  swarmllm models pull https://example.org/model.gguf --sha256 HEX
  swarmllm models pull hf:ORG/REPO:FILE.gguf --layers 0:12
  swarmllm models pull hf:ORG/REPO:FILE-00001-of-00004.gguf
""",
)
@click.argument("source")
@click.option("--layers", metavar="START:END", help="Only the bytes that layers START to END-1 need.")
@click.option("--name", help="What to call it.  [default: the name of the file]")
@click.option("--sha256", metavar="HEX", help="What the file must hash to, where the server does not say.")
@click.option(
    "--mmproj/--no-mmproj",
    default=True,
    show_default=True,
    help="The projector of the same repository comes, too, so that the model takes pictures.",
)
@json_option
@api_option
def pull(
    source: str,
    layers: str | None,
    name: str | None,
    sha256: str | None,
    mmproj: bool,
    as_json: bool,
    api_url: str,
) -> None:
    """Fetch a model from the web: hf:ORG/REPO, hf:ORG/REPO:FILE.gguf, hf:ORG/REPO:Q4_K_M, or https://...

    Of a model in parts (FILE-00001-of-00004.gguf), name any part: all are fetched, after their headers were
    checked, and become one file.

    Pieces are fetched side by side. What was interrupted goes on where it was when it is asked for again, and
    nothing counts before it is checked. The node does the work: Ctrl-C only ends the looking on.

    A projector (mmproj) that the repository has beside the model is fetched after it, in f16 if there is one,
    else in Q8_0, and attached to it; its size is said before. With --layers none is.

    With --layers, the file's header and what these layers need are fetched, and nothing else. Of a model that
    no node knows yet, each node can fetch its own layers: a model's id covers all of it, so they wait until
    the connected nodes have told each other the hashes of every part; then they can be loaded. Where the
    server does not say the file's SHA-256, give every node the same --sha256: it tells files apart that have
    the same header.

    HF_TOKEN and HF_ENDPOINT are passed on from this command's environment, else the node's own count; proxies
    are those of the node's environment (HTTPS_PROXY).
    """
    with Client(api_url) as client:
        download = _fetched(client, source, name, layers, sha256, show=not as_json, mmproj=mmproj)
    if as_json:
        print_json(download)
    _require_done(download)
    if as_json:
        return
    model, wanted = safe(download["model"]), f" --layers {layers}" if layers else ""
    if download["waits_for"]:
        click.echo(
            f"{model}: layers {layers} are here, and wait for {safe(download['waits_for'])}."
            " Connected nodes tell what they have fetched themselves."
            f" See: swarmllm models show {model}"
        )
    else:
        next_ = (
            f"Load it: swarmllm models load {model}{wanted}"
            if layers
            else f'Ask it: swarmllm chat --model {model} "..."'
        )
        click.echo(f"{model}: fetched. {next_}")
        if download["error"]:
            click.echo(safe(download["error"]), err=True)
        elif download["projector"]:
            click.echo(f"It takes pictures, with {safe(download['projector'])}.")


@click.command(
    short_help="Show what is or was fetched; try again what failed, or clear it.",
    epilog="""\b
Examples:
  swarmllm models pulls
  swarmllm models pulls --retry 3f2a9c01d4e7
  swarmllm models pulls --clear all
""",
)
@click.option("--retry", "retry_id", metavar="ID", help="Try this one again, as it was asked for.")
@click.option("--clear", "clear_id", metavar="ID|all", help="Forget this one, or all that have ended.")
@json_option
@api_option
def pulls(retry_id: str | None, clear_id: str | None, as_json: bool, api_url: str) -> None:
    """Show the downloads of the node since it started, the latest first.

    --retry goes on where a download ended that failed or was cancelled, with the name and the SHA-256 that
    it was asked for with. --clear takes a download that has ended from the list, and what has arrived of a
    file that became no model from the disk; models stay.
    """
    if retry_id and clear_id:
        raise WrongUsage("Either --retry or --clear.")
    with Client(api_url) as client:
        if retry_id:
            client.post(f"{PATH}/{path_segment(retry_id)}/retry", {})
        elif clear_id:
            found = client.get(PATH)["downloads"] if clear_id == ALL else []
            ended = [each["id"] for each in found if each["state"] not in RUNNING]
            for each in ended if clear_id == ALL else [clear_id]:
                client.post(f"{PATH}/{path_segment(each)}/clear", {})
        answer = client.get(PATH)
    if as_json:
        print_json(answer)
    elif answer["downloads"]:
        rows = [
            (each["id"], _what(each), each["state"], _how_far(each), each["error"] or pace(each))
            for each in answer["downloads"]
        ]
        make_console().print(table(("id", "source", "state", "arrived", ""), rows, right=("arrived",)))
    else:
        click.echo("No downloads.")


def _what(download: dict[str, Any]) -> str:
    return str(download["source"]) + (f" layers {download['layers']}" if download["layers"] else "")


def _how_far(download: dict[str, Any]) -> str:
    total = download["total_bytes"]
    return f"{size(download['done_bytes'])} of {size(total)}" if total else "-"


@click.command(
    short_help="Find models on the hub, and what fits in this swarm.",
    epilog="""\b
Examples:
  swarmllm models search qwen
  swarmllm models search "llama 70b"
""",
)
@click.argument("term")
@json_option
@api_option
def search(term: str, as_json: bool, api_url: str) -> None:
    """Find models on the hub: repositories with GGUF files, the most fetched first, and whether they fit.

    Of each repository the node looks at one file, Q4_K_M where there is one, and reads its header and nothing
    else of it. A model fits when the nodes that accept what this node shares have room for all of its layers;
    the speed is expected of one request. Share one out with: swarmllm share SOURCE

    HF_TOKEN and HF_ENDPOINT are passed on from this command's environment, else the node's own count.
    """
    with Client(api_url) as client:
        answer = client.post(SEARCH_PATH, {"term": term, **hub_of_environment()})
    if as_json:
        print_json(answer)
    elif answer["models"]:
        rows = [
            (each["source"], "-" if (n := each["download_bytes"]) is None else size(n), fits(each))
            for each in answer["models"]
        ]
        make_console().print(table(("source", "size", "fits in this swarm"), rows, right=("size",)))
    else:
        click.echo(safe(f"The hub has no model with GGUF files for {term!r}."))


def fits(model: dict[str, Any]) -> str:
    """Whether the swarm could hold a model that was found, in words."""
    if model["fits"] is None:
        return f"not known: {model['problem']}"
    if not model["fits"]:
        return f"no: {model['problem']}"
    n_nodes, speed = model["n_nodes"], model["tokens_per_s"]
    over = f"over {n_nodes} nodes" if n_nodes > 1 else "on one node"
    if speed is None:
        return f"yes, {over}"
    return (
        f"yes, {over}, about {speed:.0f} tokens/s"
        if speed >= 10
        else f"yes, {over}, about {speed:.1f} tokens/s"
    )


def fetch(client: Client, source: str, name: str | None, *, show: bool) -> dict[str, Any]:
    """A whole model from the web, once the node has it; raises CommandFailed."""
    download = _fetched(client, source, name, None, None, show=show)
    _require_done(download)
    return download


def _fetched(
    client: Client,
    source: str,
    name: str | None,
    layers: str | None,
    sha256: str | None,
    *,
    show: bool,
    mmproj: bool = True,
) -> dict[str, Any]:
    body = {
        "source": source,
        "layers": layers,
        "name": name,
        "sha256": sha256,
        "mmproj": mmproj,
        **hub_of_environment(),
    }
    return _follow(client, client.post(PATH, body), show=show)


def hub_of_environment() -> dict[str, str | None]:
    """Fields of a request that let the node ask the hub that this command's environment names."""
    return {
        "hf_token": os.environ.get("HF_TOKEN") or None,
        "hf_endpoint": os.environ.get("HF_ENDPOINT") or None,
    }


def _require_done(download: dict[str, Any]) -> None:
    if download["state"] != "done":
        again = "what has arrived is kept: the same command goes on there"
        raise CommandFailed(safe(download["error"]) or f"It was cancelled; {again}.")


def _follow(client: Client, download: dict[str, Any], *, show: bool) -> dict[str, Any]:
    console = make_console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[pace]}", markup=False),
        console=console,
        transient=True,
        disable=not (show and console.is_terminal),
    )
    path = f"{PATH}/{download['id']}"
    is_told = not show
    try:
        with bar:
            task = bar.add_task(safe(download["state"]), total=None, pace="")
            while download["state"] in RUNNING:
                if download["projector"] and not is_told:
                    is_told = True
                    of_it = f"{safe(download['projector'])} ({size(download['projector_bytes'])})"
                    click.echo(f"After it comes its projector {of_it}; --no-mmproj leaves it out.", err=True)
                bar.update(
                    task,
                    description=safe(download["state"]),
                    completed=download["done_bytes"],
                    total=download["total_bytes"] or None,
                    pace=pace(download),
                )
                time.sleep(LOOK_EVERY_S)
                download = client.get(path)
    except KeyboardInterrupt:
        click.echo("\nThe node goes on fetching; the same command looks on again.", err=True)
        raise
    return download


def pace(download: dict[str, Any]) -> str:
    """Rate and time left, or what is in the way, as the node sees them: it has been at it for longer than
    this command."""
    if download["trouble"]:
        return f"{safe(download['trouble'])}; trying again"
    if not download["bytes_per_s"]:
        return ""
    left_s = (download["total_bytes"] - download["done_bytes"]) / download["bytes_per_s"]
    return f"{size(download['bytes_per_s'])}/s, {duration(left_s)} left"
