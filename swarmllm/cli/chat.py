"""`swarmllm chat`: a conversation in the terminal, or one question.

It goes through the same endpoint as any OpenAI client. Ctrl-C while an answer streams closes the
connection, which stops the computation on every node; the part that was shown stays in the conversation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import click
from rich.console import Console

from swarmllm.cli.chat_stream import Finished, Message, as_fields, stream_chat
from swarmllm.cli.client import EXIT_INTERRUPTED, Client, CommandFailed, WrongUsage
from swarmllm.cli.display import WordWrap, make_console, route_table, safe, summary
from swarmllm.cli.options import api_option, json_option

HELP = """  /route   which node ran which layers for the last answer, and how long it took
  /new     forget the conversation
  /help    this
  /quit    leave (Ctrl-D does too); Ctrl-C stops an answer"""


@dataclass
class Conversation:
    """What has been said, and the settings under which the model answers."""

    client: Client
    model: str
    sampling: dict[str, object]
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    last: Finished | None = None

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.last = None

    def ask(self, question: str, on_thought: Callable[[str], None] = lambda piece: None) -> Iterator[str]:
        """Pieces of the answer; `last` tells how it went. An answer that was stopped or failed counts as
        far as it got."""
        self.messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        stream = stream_chat(self.client, self.model, self.messages, on_thought, **self.sampling)
        try:
            with closing(stream):
                for part in stream:
                    if isinstance(part, Finished):
                        self.last = part
                    else:
                        pieces.append(part)
                        yield part
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()


def show_answer(conversation: Conversation, question: str, console: Console) -> None:
    """Stream one answer to the console; a terminal also shows what the model thinks first."""
    wrap = WordWrap(console.width)
    end = between = ""

    def think(piece: str) -> None:
        nonlocal between
        if console.is_terminal:
            console.print(safe(piece, newlines=True), style="dim", end="", soft_wrap=True)
            between = "\n\n"

    try:
        for piece in conversation.ask(question, think):
            console.file.write(between)
            between = ""
            console.file.write(wrap.feed(safe(piece, newlines=True)))
            console.file.flush()
            end = "\n"
    finally:
        console.file.write(wrap.finish() + end)
        console.file.flush()


def choose_model(client: Client, wanted: str | None) -> str:
    """The model that was asked for, or the only one, or the bundled one."""
    if wanted:
        return wanted
    names = [str(model["id"]) for model in client.get("/v1/models")["data"]]
    if not names:
        raise CommandFailed("The node knows no model yet: swarmllm models add PATH.gguf")
    if len(names) > 1 and "guide" not in names:
        raise WrongUsage(f"Which model? --model with one of: {', '.join(map(safe, names))}")
    return "guide" if "guide" in names else names[0]


def converse(conversation: Conversation, console: Console) -> None:
    """The interactive loop; returns when the user leaves."""
    with_line_editing()
    console.print(
        f"{safe(conversation.model)} at {conversation.client.api_url}. /help for commands, /quit to leave."
    )
    while True:
        try:
            line = input("\n› ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line in ("/quit", "/exit"):
            return
        if line == "/help":
            console.print(HELP)
        elif line == "/new":
            conversation.forget()
            console.print("A new conversation.")
        elif line == "/route":
            console.print(route_table(conversation.last.route) if conversation.last else "No answer yet.")
        elif line.startswith("/"):
            console.print(f"There is no command {safe(line.split()[0])}.\n{HELP}")
        elif line:
            answer_in_conversation(conversation, line, console)


def answer_in_conversation(conversation: Conversation, question: str, console: Console) -> None:
    try:
        show_answer(conversation, question, console)
        if conversation.last:
            console.print(summary(conversation.last), style="dim")
    except KeyboardInterrupt:
        console.print("Stopped.", style="dim")
    except CommandFailed as error:
        console.print(safe(error.message), style="red")


def with_line_editing() -> None:
    """Arrow keys and history for `input`, where Python was built with them."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)


@click.command(
    short_help="Talk to a model, or ask it one question.",
    epilog="""\b
Examples:
  swarmllm chat
  swarmllm chat "How do I load a model?"
  git diff | swarmllm chat --model qwen "Write a commit message:"
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
@json_option
@api_option
def chat(
    question: tuple[str, ...],
    model: str | None,
    system: str | None,
    show_route: bool,
    as_json: bool,
    api_url: str,
    **sampling: object,
) -> None:
    """Talk to a model. With a QUESTION, or text piped in, answer that and leave; both together are one
    question."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    text = "\n\n".join(part for part in (" ".join(question), piped) if part)
    if not text and (as_json or not sys.stdin.isatty()):
        raise WrongUsage('Ask something: swarmllm chat "What is a pipeline?"')
    console = make_console()
    with Client(api_url) as client:
        conversation = Conversation(client, choose_model(client, model), sampling, system)
        if not text:
            converse(conversation, console)
            return
        try:
            answer_once(conversation, text, console, show_route=show_route, as_json_object=as_json)
        except KeyboardInterrupt:
            raise SystemExit(EXIT_INTERRUPTED) from None


def answer_once(
    conversation: Conversation, text: str, console: Console, *, show_route: bool, as_json_object: bool
) -> None:
    if as_json_object:
        answer = "".join(conversation.ask(text))
        assert conversation.last is not None
        click.echo(json.dumps(as_fields(answer, conversation.last), ensure_ascii=False))
        return
    show_answer(conversation, text, console)
    if show_route and conversation.last:
        console.print()
        console.print(route_table(conversation.last.route))
        console.print(summary(conversation.last), style="dim")
