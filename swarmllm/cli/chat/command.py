"""`swarmllm chat`: a conversation in the terminal, or one question.

It goes through the same endpoint as any OpenAI client. Ctrl-C while an answer streams closes the
connection, which stops the computation on every node; the part that was shown stays in the conversation.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
from rich.console import Console

from swarmllm.cli.chat.conversation import Conversation, choose_model, question_message, read_media
from swarmllm.cli.chat.session import ChatSession, history_file, line_editing, show_answer
from swarmllm.cli.chat.stream import Message, as_fields
from swarmllm.cli.client import EXIT_INTERRUPTED, Client, WrongUsage
from swarmllm.cli.display import looked, make_console, route_table, safe, summary
from swarmllm.cli.options import api_option, audio_option, image_option, json_option


@click.command(
    short_help="Talk to a model, or ask it one question.",
    epilog="""\b
Examples:
  swarmllm chat
  swarmllm chat "How do I load a model?"
  git diff | swarmllm chat --model qwen "Write a commit message:"
  swarmllm chat --model smolvlm --image photo.jpg "What is this?"
""",
)
@click.argument("question", nargs=-1)
@click.option("--model", "-m", help="Name or id of the model.  [default: guide, or the only one]")
@click.option("--system", help="A system message that starts the conversation.")
@click.option("--max-tokens", type=click.IntRange(1), help="Stop each answer after so many tokens.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 always takes the likeliest token.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option(
    "--route", "show_route", is_flag=True, help="After the answer, show which node ran which layers."
)
@click.option(
    "--history/--no-history",
    default=True,
    help="Keep what is typed in a conversation for the arrow keys of the next one, in"
    " ~/.local/state/swarmllm/chat_history (XDG_STATE_HOME).  [default: history]",
)
@image_option
@audio_option
@json_option
@api_option
def chat(
    question: tuple[str, ...],
    images: tuple[Path, ...],
    sounds: tuple[Path, ...],
    model: str | None,
    system: str | None,
    show_route: bool,
    as_json: bool,
    history: bool,
    api_url: str,
    **sampling: object,
) -> None:
    """Talk to a model. With a QUESTION, or text piped in, answer that and leave; both together are one
    question. In a conversation /help shows the commands: other models, system message, sampling, saving."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    text = "\n\n".join(part for part in (" ".join(question), piped) if part)
    if not text and (as_json or not sys.stdin.isatty()):
        raise WrongUsage('Ask something: swarmllm chat "What is a pipeline?"')
    console = make_console()
    media = read_media(images, sounds)
    with Client(api_url) as client:
        conversation = Conversation(client, choose_model(client, model), sampling, system)
        if not text:
            with line_editing(history_file(os.environ) if history else None):
                ChatSession(conversation, console, media=media).run()
            return
        try:
            asked = question_message(text, media)
            answer_once(conversation, asked, console, show_route=show_route, as_json_object=as_json)
        except KeyboardInterrupt:
            raise SystemExit(EXIT_INTERRUPTED) from None


def answer_once(
    conversation: Conversation, question: Message, console: Console, *, show_route: bool, as_json_object: bool
) -> None:
    if as_json_object:
        answer = "".join(conversation.ask(question))
        assert conversation.last is not None
        click.echo(json.dumps(as_fields(answer, conversation.last), ensure_ascii=False))
        return
    show_answer(conversation, question, console)
    if show_route and conversation.last:
        console.print()
        console.print(route_table(conversation.last))
        for line in looked(conversation.last):
            console.print(safe(line), markup=False)
        console.print(summary(conversation.last), style="dim")
