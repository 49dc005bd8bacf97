"""`swarmllm chat` in a terminal: questions, commands that begin with a slash, and what is typed kept for the
next time.

A question may have several lines: one that ends with a backslash goes on in the next, and what stands between
two lines of three quotes is one question.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from swarmllm.cli.chat.conversation import (
    PARAMETERS,
    Conversation,
    PictureFile,
    SoundFile,
    parameter_named,
    question_message,
    read_parameter,
    read_picture,
    read_sound,
)
from swarmllm.cli.chat.stream import Message
from swarmllm.cli.client import CommandFailed
from swarmllm.cli.display import WordWrap, looked, route_table, safe, summary

PROMPT: Final = "\n› "
GOES_ON: Final = "… "
QUOTES: Final = '"""'
HISTORY_LINES: Final = 1000


def show_answer(conversation: Conversation, question: str | Message, console: Console) -> None:
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


@dataclass
class ChatSession:
    conversation: Conversation
    console: Console
    read_line: Callable[[str], str] = input
    """Shows the prompt that it is given. Raises EOFError at the end."""
    media: list[PictureFile | SoundFile] = field(default_factory=list)
    """They go with the next question."""
    _file: Path | None = field(default=None, init=False)
    """That was saved or loaded last, and may be written over."""

    def run(self) -> None:
        """Returns when the user leaves."""
        self._say(
            f"{self.conversation.model} at {self.conversation.client.api_url}."
            " /help for commands, /quit to leave."
        )
        for entry in self._entries():
            name, _, argument = entry.partition(" ")
            if name in ("/quit", "/exit"):
                return
            if not name.startswith("/"):
                self._ask(entry)
            elif (command := COMMANDS.get(name)) is None:
                self._say(f"There is no command {name}.\n{help_text()}")
            else:
                try:
                    command.run(self, argument.strip())
                except CommandFailed as error:
                    self.console.print(safe(error.message), style="red", markup=False)

    def _entries(self) -> Iterator[str]:
        """What is typed, a question or command each, until the end of the input or Ctrl-C."""
        while True:
            try:
                entry = self._entry()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return
            if entry:
                yield entry

    def _entry(self) -> str:
        line = self.read_line(PROMPT).strip()
        if line.startswith(QUOTES):
            lines = [line.removeprefix(QUOTES)]
            while not lines[-1].rstrip().endswith(QUOTES) or (len(lines) == 1 and not lines[0]):
                lines.append(self.read_line(GOES_ON))
            lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
            return "\n".join(lines).strip()
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self.read_line(GOES_ON).rstrip())
        return "\n".join(lines).strip()

    def _say(self, text: str) -> None:
        self.console.print(safe(text, newlines=True), markup=False, highlight=False)

    def _ask(self, text: str) -> None:
        if self._answer(question_message(text, self.media)):
            self.media.clear()

    def _answer(self, question: Message) -> bool:
        """False: it failed."""
        try:
            show_answer(self.conversation, question, self.console)
            if self.conversation.last:
                self.console.print(summary(self.conversation.last), style="dim")
        except KeyboardInterrupt:
            self.console.print("Stopped.", style="dim")
        except CommandFailed as error:
            self.console.print(safe(error.message), style="red", markup=False)
            return False
        return True

    # Commands.

    def route(self, argument: str) -> None:
        last = self.conversation.last
        self.console.print(route_table(last) if last else "No answer yet.")
        for line in looked(last) if last else ():
            self._say(line)

    def new(self, argument: str) -> None:
        self.conversation.forget()
        self.media.clear()
        self._file = None
        self._say("A new conversation.")

    def retry(self, argument: str) -> None:
        question = self.conversation.take_back()
        if question is None:
            raise CommandFailed("Nothing has been asked yet.")
        self._answer(question)

    def model(self, argument: str) -> None:
        names = [str(model["id"]) for model in self.conversation.client.get("/v1/models")["data"]]
        if not argument:
            self._say(
                "\n".join(f"{'›' if name == self.conversation.model else ' '} {name}" for name in names)
            )
            return
        if argument not in names:
            raise CommandFailed(f"The node knows no model {argument[:100]}, only {', '.join(names)}.")
        self.conversation.model = argument
        self._say(f"{argument} answers from now on.")

    def system(self, argument: str) -> None:
        if argument:
            self.conversation.instruct("" if argument == "off" else argument)
        self._say(f"System message: {self.conversation.system or 'none'}")

    def set(self, argument: str) -> None:
        if argument:
            name, _, text = argument.replace("=", " ").partition(" ")
            if text.strip() in ("", "default"):
                parameter_named(name)
                self.conversation.sampling.pop(name, None)
            else:
                self.conversation.sampling[name] = read_parameter(name, text.strip())
        known = self.conversation.sampling
        for name, parameter in PARAMETERS.items():
            value = known.get(name)
            self._say(f"{name:12} {'default' if value is None else value:10} ({parameter.meaning})")

    def image(self, argument: str) -> None:
        self._attach(argument, read_picture, "no picture")

    def audio(self, argument: str) -> None:
        self._attach(argument, read_sound, "no sound")

    def _attach(self, argument: str, read: Callable[[Path], PictureFile | SoundFile], none: str) -> None:
        if argument == "off":
            self.media.clear()
        elif argument:
            self.media.append(read(_path(argument)))
        shown = [f"{each.name} ({each.size})" for each in self.media]
        self._say(f"With the next question: {', '.join(shown) or none}.")

    def save(self, argument: str) -> None:
        path = _path(argument) if argument else self._file
        if path is None:
            raise CommandFailed("Save it where? /save FILE")
        self.conversation.save(path, may_replace=path == self._file)
        self._file = path
        self._say(f"Saved as {path}.")

    def load(self, argument: str) -> None:
        if not argument:
            raise CommandFailed("Load which? /load FILE")
        path = _path(argument)
        self.conversation.load(path)
        self._file = path
        n_asked = sum(message["role"] == "user" for message in self.conversation.messages)
        self._say(f"{path}: {n_asked} question{'s' * (n_asked != 1)}; {self.conversation.model} answers.")

    def help(self, argument: str) -> None:
        self._say(help_text())


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    meaning: str
    run: Callable[[ChatSession, str], None]


COMMANDS: Final[Mapping[str, Command]] = {
    "/model": Command("[NAME]", "which models there are; let another one answer", ChatSession.model),
    "/system": Command("[TEXT]", "show or change the system message (off: none)", ChatSession.system),
    "/set": Command("[NAME VALUE]", "show or change how is sampled (default: as usual)", ChatSession.set),
    "/image": Command("[FILE]", "show a picture with the next question (off: none)", ChatSession.image),
    "/audio": Command("[FILE]", "send a sound with the next question (off: none)", ChatSession.audio),
    "/retry": Command("", "ask the last question again", ChatSession.retry),
    "/route": Command("", "which node ran which layers for the last answer, and its time", ChatSession.route),
    "/save": Command("[FILE]", "keep the conversation in a file", ChatSession.save),
    "/load": Command("FILE", "go on with a conversation from a file", ChatSession.load),
    "/new": Command("", "forget the conversation", ChatSession.new),
    "/help": Command("", "this", ChatSession.help),
}


def help_text() -> str:
    lines = [f"  {f'{name} {command.usage}':20} {command.meaning}" for name, command in COMMANDS.items()]
    lines.append(f"  {'/quit':20} leave (Ctrl-D does too); Ctrl-C stops an answer")
    lines.append(f"  {QUOTES} begins and ends a question of several lines; \\ at the end of a line goes on")
    return "\n".join(lines)


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def history_file(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "swarmllm" / "chat_history"


@contextlib.contextmanager
def line_editing(history: Path | None) -> Iterator[None]:
    """Arrow keys for `input`, and what was typed in earlier sessions, where Python was built with that. With
    `history`, what is typed is kept there, readable for its owner alone."""
    try:
        import readline
    except ImportError:
        yield
        return
    readline.set_auto_history(True)
    if history is None:
        yield
        return
    with contextlib.suppress(OSError, UnicodeDecodeError):
        readline.read_history_file(history)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _write_history(readline, history)


def _write_history(readline: Any, history: Path) -> None:
    history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Made before readline writes to it, which would give it the mode that the umask allows.
    os.close(os.open(history, os.O_WRONLY | os.O_CREAT, 0o600))
    readline.set_history_length(HISTORY_LINES)
    readline.write_history_file(history)
    history.chmod(0o600)
