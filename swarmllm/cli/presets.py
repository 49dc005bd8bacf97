"""`swarmllm models alias`, `preset` and `create`: further names of a model, and the settings under these
names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from swarmllm.cli.client import Client, CommandFailed, path_segment
from swarmllm.cli.display import print_json, safe
from swarmllm.cli.options import api_option, json_option
from swarmllm.errors import InvalidRequest
from swarmllm.models.modelfile import Modelfile, parse_modelfile
from swarmllm.models.presets import MAX_TOML_BYTES, NO_PRESET, Preset, laid_over, read_toml, write_toml

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Give a model a further name.")
@click.argument("name")
@click.argument("new")
@json_option
@api_option
def alias(name: str, new: str, as_json: bool, api_url: str) -> None:
    """Let NEW lead to the model NAME too. `models rm NEW` takes the name away again."""
    with Client(api_url) as client:
        model = client.post(_path(name, "alias"), {"name": new})
    if as_json:
        print_json(model)
    else:
        click.echo(f"{safe(new)} is {safe(model['name'])} now.")


@click.command(
    short_help="Show or set what holds for requests to a name.",
    epilog="""\b
A preset is a small TOML file; every line may be left out:
  system = "You answer in one sentence."
  template = "{% for message in messages %}..."
  context = 8192
  max_tokens = 400
  [sampling]
  temperature = 0.2
  stop = ["###"]
\b
Examples:
  swarmllm models preset qwen
  swarmllm models preset qwen --file terse.toml
  swarmllm models preset qwen --clear
""",
)
@click.argument("name")
@click.option("--file", type=FILE, help="A preset to set, in place of the one that is there.")
@click.option("--clear", is_flag=True, help="Remove the preset.")
@json_option
@api_option
def preset(name: str, file: Path | None, clear: bool, as_json: bool, api_url: str) -> None:
    """Show or set the preset of NAME: the system message, the sampling and the length of answers for requests
    that do not say them, a chat template (Jinja) in place of the model's, and the context with which the
    model is loaded under this name.

    It belongs to the name, so that one model can have several (see `models alias`).
    """
    if file is not None and clear:
        raise click.UsageError("--file and --clear exclude each other.")
    new = Preset() if clear else _read(file, read_toml) if file is not None else None
    with Client(api_url) as client:
        path = _path(name, "preset")
        answer = client.get(path) if new is None else client.post(path, msgspec.to_builtins(new))
    if as_json:
        print_json(answer)
    elif new is not None:
        click.echo(f"{safe(name)}: its preset is {'set' if answer else 'removed'}.")
    elif text := write_toml(msgspec.convert(answer, Preset)):
        click.echo(text, nl=False)
    else:
        click.echo(f"{safe(name)} has no preset.")


@click.command(
    short_help="Import an Ollama Modelfile.",
    epilog="""\b
Examples:
  swarmllm models create mario -f Modelfile
  swarmllm models create mario -f Modelfile --own-template
""",
)
@click.argument("name")
@click.option("-f", "--file", type=FILE, default="Modelfile", show_default=True, help="The Modelfile.")
@click.option("--own-template", is_flag=True, help="Leave TEMPLATE out: the model has its own.")
@json_option
@api_option
def create(name: str, file: Path, own_template: bool, as_json: bool, api_url: str) -> None:
    """Make NAME from an Ollama Modelfile: a name for the model in FROM, with SYSTEM and PARAMETER as its
    preset.

    FROM is a model that the node knows, whose preset counts where the Modelfile says nothing, or a GGUF file,
    which is added. A TEMPLATE of .System, .Prompt,
    .Response, .Messages, .Role and .Content is translated; others are refused, and so are ADAPTER and
    MESSAGE. What only says how to compute (num_gpu ...) is left out.
    """
    modelfile = _read(file, lambda text: parse_modelfile(text, own_template=own_template))
    with Client(api_url) as client:
        source, before = _source(client, modelfile, file.absolute().parent)
        if source != name:
            client.post(_path(source, "alias"), {"name": name})
        answer = client.post(_path(name, "preset"), msgspec.to_builtins(laid_over(before, modelfile.preset)))
    if as_json:
        print_json({"name": name, "from": source, "preset": answer, "left_out": list(modelfile.left_out)})
        return
    click.echo(f"{safe(name)} is {safe(source)} with its own preset.")
    if modelfile.left_out:
        click.echo(f"Without effect here: {', '.join(map(safe, modelfile.left_out))}.")


def _source(client: Client, modelfile: Modelfile, folder: Path) -> tuple[str, Preset]:
    """The name of the model that FROM means, and the preset of that name; a file is added, and has none."""
    path = folder / Path(modelfile.source).expanduser()
    if not path.exists():
        name = modelfile.source.removesuffix(":latest")
        return name, msgspec.convert(client.get(_path(name, "preset")), Preset)
    name = ""
    for event in client.post_progress("/api/admin/models", {"path": str(path)}):
        if event.get("type") == "result":
            name = str(event["model"]["name"])
    if not name:
        raise CommandFailed("The node closed the connection before the file was added; see its log.")
    return name, NO_PRESET


def _read(file: Path, parse: Any) -> Any:
    with file.open("rb") as opened:
        raw = opened.read(MAX_TOML_BYTES + 1)
    try:
        return parse(raw.decode())
    except UnicodeDecodeError:
        raise CommandFailed(f"{file} is not UTF-8.") from None
    except InvalidRequest as error:
        raise CommandFailed(f"{file}: {error.message}") from None


def _path(name: str, action: str) -> str:
    return f"/api/admin/models/{path_segment(name)}/{action}"
