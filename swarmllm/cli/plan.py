"""`swarmllm plan`: the route that a request would take, the parts of its cost, and the costs of other
routes."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import click

from swarmllm.cli.client import Client
from swarmllm.cli.display import duration, make_console, print_json, safe, short_id, table
from swarmllm.cli.options import api_option, json_option

NUMBERS = ("compute", "network")
COLUMNS = ("node", "id", "layers", *NUMBERS, "speed", "standby", "why not others")
MAX_TOKENS = 2**20


@click.command(short_help="Show the route a request would take, and why.")
@click.argument("model")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    default=128,
    show_default=True,
    metavar="N",
    help="How long the prompt is.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    default=128,
    show_default=True,
    metavar="N",
    help="How long the answer is.",
)
@json_option
@api_option
def plan(model: str, prompt_tokens: int, output_tokens: int, as_json: bool, api_url: str) -> None:
    """Show which nodes would run which layers of MODEL for a request of this size, without running it.

    Times are for the whole request, expected from what the nodes have measured of themselves and of the
    network between them; "estimate" marks a node that has not run this model yet.
    """
    query = urlencode({"model": model, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens})
    with Client(api_url) as client:
        answer = client.get(f"/api/admin/plan?{query}")
    if as_json:
        print_json(answer)
        return
    console = make_console()
    size = f"{answer['prompt_tokens']} + {answer['output_tokens']} tokens"
    click.echo(f"{safe(answer['model'])}, {size}: {duration(answer['cost_s'])} expected")
    console.print(table(COLUMNS, [_row(stage) for stage in answer["stages"]], right=NUMBERS))
    if answer["ends_s"]:
        click.echo(f"to the first stage and back from the last: {duration(answer['ends_s'])}")
    if taken := [each for each in ("pictures", "sounds") if answer.get(f"takes_{each}")]:
        words = " and ".join(taken)
        click.echo(f"it takes {words}, which {_encoders(answer)} encodes; their rows count as tokens")
    if not answer.get("exact", True):
        click.echo("rows are rounded between stages (q8_0): the text is not exactly that of the uncut model")
    for rival in answer["rivals"]:
        click.echo(_rival(rival, answer))
    for stage in answer["stages"]:
        if stage.get("lacks"):
            click.echo(safe(f"may be refused: {stage['layers']}@{_name(stage)}, {stage['lacks']}"))
    for refusal in answer.get("refused", ()):
        click.echo(safe(f"not used: {refusal['layers']}@{_name(refusal)}, {refusal['reason']}"))


def _encoders(answer: dict[str, Any]) -> str:
    encoders = answer.get("encoders", ())
    if not encoders:
        return "the node that is asked"
    names = " or ".join(safe(each["nickname"]) or short_id(each["node_id"]) for each in encoders[:3])
    return f"{names} (of {len(encoders)} nodes)" if len(encoders) > 3 else names


def _row(stage: dict[str, Any]) -> tuple[object, ...]:
    reasons = [_reason(other, stage["layers"]) for other in stage["alternatives"]]
    standby = next((other for other in stage["alternatives"] if other["node_id"] == stage["standby"]), None)
    return (
        stage["nickname"] or "-",
        short_id(stage["node_id"]),
        stage["layers"],
        duration(stage["compute_s"]),
        duration(stage["network_s"]),
        "measured" if stage["measured"] else "estimate",
        _name(standby) if standby else "-",
        ", ".join(reasons) or "nobody else holds these layers",
    )


def _reason(other: dict[str, Any], layers: str) -> str:
    name = _name(other)
    if other.get("layers", layers) != layers:
        name += f" with {other['layers']}"
    return f"{name} is full" if other["full"] else f"{name} +{duration(max(0, other['extra_s']))}"


def _rival(rival: dict[str, Any], answer: dict[str, Any]) -> str:
    name = f"{rival['name']}: "
    if rival["cost_s"] is None:
        return name + "not possible, layers are missing or cut elsewhere"
    if _places(rival) == _places(answer):
        return name + "this route"
    route = " -> ".join(f"{stage['layers']}@{_name(stage)}" for stage in rival["stages"])
    return safe(f"{name}{duration(rival['cost_s'])} ({route})")


def _places(route: dict[str, Any]) -> list[tuple[str, str]]:
    return [(stage["node_id"], stage["layers"]) for stage in route["stages"]]


def _name(node: dict[str, Any]) -> str:
    return node["nickname"] or short_id(node["node_id"])
