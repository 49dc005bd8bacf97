"""`swarmllm models`: what this node knows, what it has loaded, and what the swarm around it holds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from swarmllm.cli.client import Client, CommandFailed, path_segment
from swarmllm.cli.display import make_console, print_json, safe, size, table
from swarmllm.cli.options import GpuLayersParam, api_option, json_option
from swarmllm.cli.presets import alias, create, preset
from swarmllm.cli.pull import pull, pulls, search

COLUMNS = ("name", "id", "architecture", "layers", "size", "loaded here", "in the swarm")
ID_SHOWN = 12
MMPROJ, ALL = "mmproj", "all"
CHECKING = "checking"
"""The phase of adding a model in which it is tried where it can be cut."""
HINT_AFTER_S = 3.0
NO_HINTS: Final[Mapping[str, str]] = MappingProxyType({})


@click.group(
    short_help="List, find, add, fetch, load, check and remove models.",
    epilog="""\b
Examples:
  swarmllm models list
  swarmllm models search qwen
  swarmllm models pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0
  swarmllm models add ~/models/qwen2.5-0.5b-instruct-q8_0.gguf --name qwen
  swarmllm models load qwen --layers 0:12
  swarmllm models unload qwen
  swarmllm models show qwen
  swarmllm models verify qwen
  swarmllm models rm qwen
""",
)
def models() -> None:
    """List, find, add, fetch, load, check and remove models.

    A model is one GGUF file, or the parts of one. `add` makes it known to the node, `load` makes some or all
    of its layers ready to run and tells the swarm. What the node does not have of a model, `load` fetches
    from the nodes that do. A model answers when the nodes of the swarm hold all of its layers together.
    """


models.add_command(pull)
models.add_command(pulls)
models.add_command(search)
models.add_command(alias)
models.add_command(preset)
models.add_command(create)


@models.command("list", short_help="Show the models of this node and of the swarm.")
@json_option
@api_option
def list_(as_json: bool, api_url: str) -> None:
    """Show the models this node knows, and those that other nodes offer."""
    with Client(api_url) as client:
        answer = client.get("/api/admin/models")
    if as_json:
        print_json(answer)
    elif answer["models"]:
        rows = [_row(model) for model in answer["models"]]
        make_console().print(table(COLUMNS, rows, right=("layers", "size")))
        for model in answer["models"]:
            if trouble := model.get("projector_trouble"):
                said = f"{safe(trouble['cause'])}; {safe(trouble['remedy'])}"
                click.echo(f"{safe(model['name'])} takes no pictures with this node: {said}")
        if answer["left_out"]:
            click.echo(f"and {answer['left_out']} more that only other nodes have; name one to see it")
        if (copies := answer.get("copies")) and copies["n_files"]:
            limit = f" of at most {size(copies['quota_bytes'])}" if copies["quota_bytes"] else ""
            click.echo(f"Copies of layers take {size(copies['n_bytes'])}{limit} (store.segment_cache_gib).")
    else:
        click.echo("No models. Add one: swarmllm models add PATH.gguf")


@models.command(
    short_help="Make a GGUF file known to the node.",
    epilog="""\b
Examples:
  swarmllm models add ~/models/qwen2.5-0.5b-instruct-q8_0.gguf --name qwen
  swarmllm models add ~/models/llama-70b-Q4_K_M-00001-of-00004.gguf
  swarmllm models add ~/models/llama-70b-Q4_K_M/
  swarmllm models add llava-7b-Q4_K_M.gguf --mmproj llava-7b-mmproj-f16.gguf
""",
)
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--name", help="What to call it.  [default: the name in the file]")
@click.option(
    "--mmproj",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Its projector, with which it takes pictures.  [default: the one beside it that is called like it]",
)
@json_option
@api_option
def add(path: Path, name: str | None, mmproj: Path | None, as_json: bool, api_url: str) -> None:
    """Make a GGUF file known to the node: it is read and hashed, and stays where it is.

    Then it takes requests already, while it is tried where the model can be cut, which takes longer than
    hashing.

    Of a model in parts (NAME-00001-of-00004.gguf), give any part, or their folder; all parts are found by
    their names. A part that is missing is named before anything is read. The model's id is the one that it
    has in one file.

    A projector (mmproj) lets the model take pictures, or sounds. It is attached to the model and no part of
    its id; adding the same file again with --mmproj attaches another one.
    """
    asks = f"--model {safe(name)}" if name else "--model NAME; its name: swarmllm models list"
    hint = f"It takes requests already (swarmllm chat {asks}), while it is tried where it can be cut."
    with Client(api_url) as client:
        model = add_file(client, path, name, mmproj, show=not as_json, hints={CHECKING: hint})
    if as_json:
        print_json(model)
        return
    in_parts = f" in {model['n_parts']} parts" if model["n_parts"] > 1 else ""
    added = f"{model['n_layers']} layers, {size(model['size_bytes'])}{in_parts}"
    click.echo(f"Added {safe(model['name'])}: {added}.")
    if model["further_names"]:
        click.echo(f"The same model is also called {', '.join(map(safe, model['further_names']))}.")
    if model["whole_reason"]:
        click.echo(f"It can only be loaded whole: {safe(model['whole_reason'])}.")
    if projector := model["projector"]:
        click.echo(f"It takes {taken_words(model)}, with {safe(projector['path'])}.")
    click.echo(f'Ask it: swarmllm chat --model {safe(model["name"])} "..."')


@models.command(short_help="Make layers ready to run on this node.")
@click.argument("name")
@click.option(
    "--layers",
    metavar="START:END|mmproj|all",
    help="Only layers START to END-1, only the projector, or all layers and the projector."
    "  [default: all layers]",
)
@click.option("--ctx", "n_ctx", type=click.IntRange(16, 2**24), help="KV cells, shared by its requests.")
@click.option("--threads", "n_threads", type=click.IntRange(1, 1024), help="Compute threads.")
@click.option(
    "--gpu-layers",
    "n_gpu_layers",
    metavar="N|auto",
    type=GpuLayersParam(),
    help="Layers of each segment on the GPU; auto: as many as fit.",
)
@click.option("--kv-type", type=click.Choice(["f16", "q8_0"]), help="What keys and values are stored as.")
@click.option(
    "--flash-attention", type=click.Choice(["auto", "on", "off"]), help="libllama's fused attention."
)
@click.option("--mmap/--no-mmap", "use_mmap", default=None, help="Map the file, or read it.")
@click.option("--mlock/--no-mlock", "use_mlock", default=None, help="Never page the weights out, or do.")
@json_option
@api_option
def load(name: str, layers: str | None, as_json: bool, api_url: str, **options: object) -> None:
    """Make layers of a model ready to run on this node, and tell the swarm.

    A model that only other nodes have is fetched from them: just what the layers need, checked against the
    model's id before it counts. An interrupted load continues where it was when it is repeated.

    With `--layers mmproj`, the model's projector is opened and stays open, so that this node encodes pictures
    for the others; one that is not here is fetched from a node that has it. Without that, a projector is
    opened when a picture comes, and closed when it is idle.

    What the options do not say is as the configuration has it; they count until the model's last layer is
    unloaded here, and memory is predicted with them.

    When the daemon starts again, after a crash or with the machine, it loads these layers again with the
    same options, until they are unloaded (`model.restore`).
    """
    said = {key: value for key, value in options.items() if value is not None}
    with Client(api_url) as client:
        events = client.post_progress(_path(name, "load"), {"layers": layers, **said})
        model = _follow(events, f"loading {name} {layers or ''}".strip(), show=not as_json)["model"]
    if as_json:
        print_json(model)
        return
    if layers != MMPROJ:
        click.echo(f"{safe(model['name'])}: this node now holds layers {', '.join(model['loaded'])}.")
        click.echo(f"Memory: {_memory(model)}.")
        click.echo(_coverage(model))
    if layers in (MMPROJ, ALL):
        click.echo(f"{safe(model['name'])}: this node now encodes its pictures.")


@models.command(short_help="Drop layers from this node.")
@click.argument("name")
@click.option(
    "--layers",
    metavar="START:END|mmproj|all",
    help="Only layers START to END-1, only the projector, or all layers and the projector."
    "  [default: all layers]",
)
@json_option
@api_option
def unload(name: str, layers: str | None, as_json: bool, api_url: str) -> None:
    """Drop layers from this node and give their memory back.

    The daemon does not load them again when it starts, unless its configuration says so (`model.load`).

    With `--layers mmproj`, the process ends that encodes the model's pictures, and this node encodes none for
    anybody until `swarmllm models load NAME --layers mmproj`; other nodes still may.
    """
    with Client(api_url) as client:
        events = client.post_progress(_path(name, "unload"), {"layers": layers, "progress": True})
        model = _follow(events, f"unloading {name} {layers or ''}".strip(), show=not as_json)["model"]
        shares = [] if as_json else client.get("/api/admin/shares")["shares"]
    if as_json:
        print_json(model)
        return
    if layers in (MMPROJ, ALL):
        click.echo(f"{safe(model['name'])}: this node encodes no pictures for it now.")
    if layers == MMPROJ:
        return
    held = ", ".join(model["loaded"])
    click.echo(
        f"{safe(model['name'])}: this node {f'still holds layers {held}' if held else 'holds no layers now'}."
    )
    sharers = [
        node for share in shares if share["model_id"] == model["model_id"] for node in share["shared_by"]
    ]
    if sharers:
        names = ", ".join(safe(node["nickname"] or node["node_id"]) for node in sharers)
        click.echo(
            f"It is shared by {names}, and this node loads its part again, until"
            f" `swarmllm unshare {safe(model['name'])}` there."
        )


@models.command(short_help="Show all that is known of one model.")
@click.argument("name")
@json_option
@api_option
def show(name: str, as_json: bool, api_url: str) -> None:
    """Show all that is known of one model: what it is, what of it is here, who holds and who gives it."""
    with Client(api_url) as client:
        model = client.get(_path(name, "status"))
    if as_json:
        print_json(model)
        return
    make_console().print(table(("model", safe(model["name"])), list(_facts(model))))


@models.command(short_help="Check the files of a model against its id.")
@click.argument("name")
@json_option
@api_option
def verify(name: str, as_json: bool, api_url: str) -> None:
    """Read what is here of a model and compare its hashes; exits with 1 where something is damaged.

    Damaged parts that came from other nodes are fetched again by the next load, and segment files that were
    cut from a file of yours are cut again. What is loaded already stays as it is until it is loaded anew.
    """
    with Client(api_url) as client:
        events = client.post_progress(_path(name, "verify"), {})
        result = _follow(events, f"checking {name}", show=not as_json)
    damaged = result["damaged"]
    if as_json:
        print_json({"model": result["model"], "damaged": damaged})
    elif not damaged:
        click.echo(f"{safe(result['model']['name'])}: what is here is right.")
    if damaged:
        stored = result["model"]["stored"]
        is_own = not stored and any(not part.startswith("segment ") for part in damaged)
        remedy = "replace its file" if is_own else "load it again to replace them (unload it first)"
        if stored and damaged == ["header"]:
            remedy = "it has been repaired"
        shown = ", ".join(map(safe, damaged[:5])) + (" ..." if len(damaged) > 5 else "")
        what = "1 part" if len(damaged) == 1 else f"{len(damaged)} parts"
        raise CommandFailed(f"{what} of {safe(name)} damaged ({shown}); {remedy}.")


@models.command(short_help="Let a model take pictures.")
@click.argument("name")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
@api_option
def projector(name: str, path: Path, as_json: bool, api_url: str) -> None:
    """Let a model that this node knows take pictures, with the projector (mmproj) at PATH.

    The model may have come from other nodes. The file stays where it is, and takes the place of another
    projector that the model has.
    """
    body = {"path": str(path.expanduser().absolute())}
    with Client(api_url) as client:
        events = client.post_progress(_path(name, "projector"), body)
        model = _follow(events, f"hashing {path.name}", show=not as_json)["model"]
    if as_json:
        print_json(model)
        return
    click.echo(
        f"{safe(model['name'])}: it takes {taken_words(model)}, with {safe(model['projector']['path'])}."
    )


@models.command(short_help="Keep a fetched model when room is needed.")
@click.argument("name")
@json_option
@api_option
def pin(name: str, as_json: bool, api_url: str) -> None:
    """Keep a model that came from other nodes, even when room is needed for another."""
    _pin(name, True, as_json, api_url)


@models.command(short_help="Let a fetched model go when room is needed.")
@click.argument("name")
@json_option
@api_option
def unpin(name: str, as_json: bool, api_url: str) -> None:
    """Let a model that came from other nodes be removed when room is needed for another."""
    _pin(name, False, as_json, api_url)


def _pin(name: str, pinned: bool, as_json: bool, api_url: str) -> None:
    with Client(api_url) as client:
        model = client.post(_path(name, "pin"), {"pinned": pinned})
    if as_json:
        print_json(model)
        return
    fate = "stays" if model["pinned"] else "may be removed"
    click.echo(f"{safe(model['name'])}: it {fate} when room is needed.")


@models.command(short_help="Forget a model; delete what was fetched of it.")
@click.argument("name")
@json_option
@api_option
def rm(name: str, as_json: bool, api_url: str) -> None:
    """Forget a model. What came from other nodes is deleted; a file that was added stays where it is.

    Of a model that was added under several names, only the name that is given is forgotten; the model's id
    stands for all of them.

    Segment files that were cut from it stay in the cache until their room is needed.
    """
    with Client(api_url) as client:
        model = client.delete(_path(name))
    if as_json:
        print_json(model)
    elif name not in (model["name"], *model["further_names"]) and not model["model_id"].startswith(name):
        click.echo(f"The name {safe(name)} is forgotten; the model stays as {safe(model['name'])}.")
    elif model["stored"]:
        click.echo(f"{safe(model['name'])}: forgotten, and what was fetched of it is deleted.")
    else:
        files = "file stays" if model["n_parts"] == 1 else f"{model['n_parts']} files stay"
        click.echo(f"{safe(model['name'])}: forgotten; its {files} at {safe(model['path'])}.")


def add_file(
    client: Client,
    path: Path,
    name: str | None,
    mmproj: Path | None = None,
    *,
    show: bool,
    hints: Mapping[str, str] = NO_HINTS,
) -> dict[str, Any]:
    """The model, once the node has read and hashed its file; `show`: with a progress bar. `hints`: as for
    `_follow`."""
    # A link stays one: what it leads to may have another name, by which no other part is found.
    path = path.expanduser().absolute()
    body = {"path": str(path), "name": name}
    if mmproj is not None:
        body["mmproj"] = str(mmproj.expanduser().absolute())
    events = client.post_progress("/api/admin/models", body)
    return dict(_follow(events, f"hashing {path.name}", show=show, hints=hints)["model"])


def _path(name: str, action: str = "") -> str:
    return f"/api/admin/models/{path_segment(name)}{'/' if action else ''}{action}"


def _facts(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    files, waiting = model["files"], model["waiting"]
    if waiting:
        yield from _waiting_facts(model, waiting)
        return
    yield "id", model["model_id"]
    if model["further_names"]:
        yield "also called", ", ".join(model["further_names"])
    if model["trouble"]:
        yield "trouble", f"what is loaded runs on, but cannot be loaded again: {model['trouble']}"
    yield "layers", str(model["n_layers"])
    if files:
        ends = [end for end in ("embedding", "head") if files[end]]
        yield "architecture", model["architecture"]
        yield "size", size(model["size_bytes"])
        yield "context", str(model["context_length"])
        cuts = f"at multiples of {model['cut_alignment']}"
        yield "can be cut", model["whole_reason"] or cuts
        n_parts = model["n_parts"]
        yield "file", f"{model['path']} (1 of {n_parts} parts)" if n_parts > 1 else model["path"]
        pinned = " (pinned)" if model["pinned"] else ""
        yield "came from", f"other nodes{pinned}" if model["stored"] else "this machine"
        if projector := model["projector"]:
            state = projector["state"].replace("_", " ")
            yield f"takes {taken_words(model)}", f"with {projector['path']} ({projector['family']}, {state})"
        elif model.get("encoders"):
            yield f"takes {taken_words(model)}", "which other nodes encode"
        if trouble := model.get("projector_trouble"):
            yield "projector", f"cannot be used here: {trouble['cause']}; {trouble['remedy']}"
        yield "in the file", ", ".join([*files["layers"], *ends]) or "only the header"
    yield "loaded here", ", ".join(_loaded(model)) or "-"
    yield "memory", _memory(model) if model["loaded"] else "-"
    if model["settings"]:
        yield "loaded with", ", ".join(f"{key} {_option(value)}" for key, value in model["settings"].items())
    yield "in the swarm", _coverage(model)
    for holder in model["holders"]:
        name = holder["nickname"] or holder["node_id"]
        yield "held by", f"{name}: {', '.join(holder['layers'])}"
    if left_out := model["n_holders"] - len(model["holders"]):
        yield "held by", f"and {left_out} more nodes"
    nicknames = {holder["node_id"]: holder["nickname"] for holder in model["holders"]}
    for node_id in model["sources"]:
        yield "given by", nicknames.get(node_id) or node_id
    if left_out := model["n_sources"] - len(model["sources"]):
        yield "given by", f"and {left_out} more nodes"


def _option(value: object) -> object:
    return ("on" if value else "off") if isinstance(value, bool) else value


def _waiting_facts(model: dict[str, Any], waiting: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "id", "not known yet"
    yield "layers", str(model["n_layers"])
    yield "architecture", waiting["architecture"]
    yield "size of the file", size(waiting["size_bytes"])
    yield "came from", waiting["source"]
    yield "here", f"layers {', '.join(waiting['layers'])}"
    yield "waiting for", waiting["waits_for"]
    for each in waiting["contradictions"]:
        yield "contradiction", f"{each['tensor']}: {', '.join(each['nodes'])}; they are not believed"


def _memory(model: dict[str, Any]) -> str:
    memory = model["memory"]
    weights, kv, work = (size(memory[f"{part}_bytes"]) for part in ("weights", "kv", "work"))
    return f"weights {weights}, keys and values {kv}, work space {work} (the last two as predicted)"


def _follow(
    events: Iterable[dict[str, Any]], label: str, *, show: bool, hints: Mapping[str, str] = NO_HINTS
) -> dict[str, Any]:
    """Show progress on stderr until the result comes; returns its line. Each phase has a bar of its own.
    `hints`: phase -> what is said of it where it takes long."""
    began_s: dict[str, float] = {}
    console = make_console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (show and console.is_terminal),
    )
    with bar:
        tasks = {"": bar.add_task(safe(label), total=None)}
        for event in events:
            if event.get("type") == "progress":
                phase = str(event.get("phase", ""))
                if phase not in tasks:
                    tasks[phase] = bar.add_task(safe(f"{phase} {label.partition(' ')[2]}"), total=None)
                    bar.update(tasks[""], visible=False)
                bar.update(tasks[phase], completed=event["done_bytes"], total=event["total_bytes"])
                now_s = time.monotonic()
                if now_s - began_s.setdefault(phase, now_s) >= HINT_AFTER_S and phase in hints and show:
                    console.print(hints[phase], markup=False, highlight=False, soft_wrap=True)
                    hints = NO_HINTS
            elif event.get("type") == "result":
                return event
    raise CommandFailed("The node closed the connection before it was done; see its log.")


def _row(model: dict[str, Any]) -> tuple[object, ...]:
    if waiting := model["waiting"]:
        fetched = f"fetched: {', '.join(waiting['layers'])}"
        facts = (waiting["architecture"], model["n_layers"], size(waiting["size_bytes"]), fetched)
        return (model["name"], "-", *facts, f"waiting for {waiting['waits_for']}")
    return (
        model["name"],
        model["model_id"][:ID_SHOWN],
        model["architecture"] or "-",
        model["n_layers"],
        "-" if model["size_bytes"] is None else size(model["size_bytes"]),
        ", ".join(_loaded(model)) or "-",
        _coverage(model),
    )


def _loaded(model: dict[str, Any]) -> list[str]:
    """With the projector, where this node keeps it open, or has it open now."""
    projector = model["projector"]
    has_it = projector is not None and (projector["state"] == "loaded" or projector["is_open"])
    return [*model["loaded"], *([MMPROJ] if has_it else [])]


def _coverage(model: dict[str, Any]) -> str:
    n_holders = model["n_holders"]
    if model["complete"]:
        return f"complete on {n_holders} node{'s' if n_holders > 1 else ''}"
    if not n_holders:
        return "nobody holds it"
    if not model["missing"]:
        return "its layers do not join up"
    more = ", ..." if model["n_missing"] > len(model["missing"]) else ""
    return f"layers {', '.join(model['missing'])}{more} missing"


def taken_words(model: dict[str, Any]) -> str:
    """What the model takes besides text. A projector that is unloaded takes nothing now, but could."""
    return " and ".join(f"{each}s" for each in model.get("takes", ())) or "pictures"
