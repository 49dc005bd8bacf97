"""`swarmllm run`: one prompt in, the answer's exact text out. For pipes and scripts; `chat` is for people.

Nothing but the answer goes to stdout, unwrapped, as it is made; what else there is to say goes to stderr.
Only where stdout is a terminal are control characters made harmless.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import click

from swarmllm.cli.chat.conversation import choose_model, question_message, read_media
from swarmllm.cli.chat.stream import Finished, Message, as_fields, stream_chat
from swarmllm.cli.client import EXIT_INTERRUPTED, Client, WrongUsage
from swarmllm.cli.display import print_json, safe
from swarmllm.cli.options import api_option, audio_option, image_option, json_option


@click.command(
    short_help="Answer one prompt; made for pipes.",
    epilog="""\b
Examples:
  swarmllm run "Name three primes" > primes.txt
  git diff | swarmllm run --model qwen "Write a commit message:"
  swarmllm run - < prompt.txt
""",
)
@click.argument("prompt", nargs=-1)
@click.option("--model", "-m", help="Name or id of the model.  [default: guide, or the only one]")
@click.option("--system", help="A system message before the prompt.")
@click.option("--max-tokens", type=click.IntRange(1), help="Stop the answer after so many tokens.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 always takes the likeliest token.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, help="Stop before this text. May be given several times.")
@image_option
@audio_option
@json_option
@api_option
def run(
    prompt: tuple[str, ...],
    images: tuple[Path, ...],
    sounds: tuple[Path, ...],
    model: str | None,
    system: str | None,
    stop: tuple[str, ...],
    as_json: bool,
    api_url: str,
    **sampling: object,
) -> None:
    """Answer one PROMPT and leave. Text piped in, or `-`, is put after it. Nothing but the answer goes to
    stdout."""
    text = read_prompt(prompt)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append(question_message(text, read_media(images, sounds)))
    with Client(api_url) as client:
        stream = stream_chat(
            client, choose_model(client, model), messages, stop=list(stop) or None, **sampling
        )
        try:
            with closing(stream):
                finished = _json_answer(stream) if as_json else _text_answer(stream)
        except KeyboardInterrupt:
            raise SystemExit(EXIT_INTERRUPTED) from None
    if finished is not None and finished.finish_reason == "length":
        click.echo("The answer was cut off: max_tokens or the context is full.", err=True)


def read_prompt(words: tuple[str, ...]) -> str:
    """The arguments, then what is piped in. Raises WrongUsage where there is neither."""
    wants_input = "-" in words or not sys.stdin.isatty()
    piped = sys.stdin.read().rstrip("\n") if wants_input else ""
    text = "\n\n".join(part for part in (" ".join(word for word in words if word != "-"), piped) if part)
    if not text.strip():
        raise WrongUsage('There is no prompt: swarmllm run "What is a pipeline?"')
    return text


def _text_answer(stream: Iterator[str | Finished]) -> Finished | None:
    finished: Finished | None = None
    shown = ""
    for part in stream:
        if isinstance(part, Finished):
            finished = part
        else:
            shown = safe(part, newlines=True) if sys.stdout.isatty() else part
            # color: click would take out escape sequences, and the answer is to arrive as it is.
            click.echo(shown, nl=False, color=True)
    if not shown.endswith("\n"):
        click.echo()
    return finished


def _json_answer(stream: Iterator[str | Finished]) -> Finished | None:
    pieces: list[str] = []
    for part in stream:
        if isinstance(part, Finished):
            print_json(as_fields("".join(pieces), part))
            return part
        pieces.append(part)
    return None
