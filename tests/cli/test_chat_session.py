"""`swarmllm chat` in a terminal: questions, commands, saved conversations, and what was typed before."""

from __future__ import annotations

import codecs
import io
import os
import pty
import select
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from fake_node import COMPLETIONS, ROLE, TEXT_DELAY_FOREVER, FakeNode, delta, sse
from picture_files import data_url, png
from rich.console import Console

from swarmllm.cli.chat.conversation import Conversation
from swarmllm.cli.chat.session import GOES_ON, PROMPT, ChatSession
from swarmllm.cli.client import Client


class Terminal:
    """`swarmllm chat` in a terminal of its own: type, and read until something shows."""

    def __init__(self, api_url: str, *options: str, state: Path | None = None) -> None:
        self.master, slave = pty.openpty()
        environment = {
            **os.environ,
            "SWARMLLM_API": api_url,
            "TERM": "xterm",
            "COLUMNS": "120",
            "NO_COLOR": "1",
            "XDG_STATE_HOME": str(state or "/nonexistent"),
        }
        command = [sys.executable, "-m", "swarmllm", "chat", *options]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.shown = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read_until(self, text: str, timeout_s: float = DEADLINE_S) -> str:
        """What was shown since the last call, up to and including `text`."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.shown:
            ready = select.select([self.master], [], [], max(0, deadline_s - time.monotonic()))[0]
            assert ready, f"{text!r} was not shown, but {self.shown!r}"
            self.shown += self._decoder.decode(os.read(self.master, 65536))
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.mark.slow
def test_a_conversation_in_a_terminal(answering: FakeNode) -> None:
    with closing(Terminal(answering.url)) as terminal:
        terminal.read_until("/quit to leave.")
        terminal.read_until("› ")
        terminal.type("/route\n")
        terminal.read_until("No answer yet.")
        terminal.type("hello\n")
        terminal.read_until("Two wörds.")
        terminal.read_until("400 tokens/s")
        terminal.type("/route\n")
        terminal.read_until("node-2")
        terminal.type("/nonsense\n")
        terminal.read_until("There is no command /nonsense.")
        answering.on("POST", COMPLETIONS, [*sse(ROLE, delta("Once upon ")), TEXT_DELAY_FOREVER])
        terminal.type("tell me a story\n")
        terminal.read_until("Once upon")
        terminal.process.send_signal(2)
        terminal.read_until("Stopped.")
        assert answering.client_left.wait(DEADLINE_S)
        terminal.read_until("› ")
        terminal.type("/quit\n")
        assert terminal.process.wait(DEADLINE_S) == 0


class Typed:
    """A session in this process: what is typed is a list, and the end of it the end of the input."""

    def __init__(self, client: Client, *lines: str) -> None:
        self.lines = list(lines)
        self.prompts: list[str] = []
        self.shown = io.StringIO()
        self.conversation = Conversation(client, "guide", {})
        console = Console(file=self.shown, width=1000, no_color=True)
        ChatSession(self.conversation, console, self.read).run()

    def read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


def asked(node: FakeNode) -> list[list[tuple[str, str]]]:
    return [
        [(each["role"], each["content"]) for each in body["messages"]] for body in node.bodies(COMPLETIONS)
    ]


def test_the_system_message_counts_from_the_next_question_on(answering: FakeNode) -> None:
    with Client(answering.url) as client:
        session = Typed(client, "one", "/system Be brief.", "two", "/system off", "/system", "three")
    first, second, third = asked(answering)
    assert first == [("user", "one")]
    assert second == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "Two wörds."),
        ("user", "two"),
    ]
    assert [role for role, _ in third] == ["user", "assistant", "user", "assistant", "user"]
    assert session.shown.getvalue().count("System message: none") == 2


def test_how_is_sampled_can_be_changed_and_changed_back(answering: FakeNode) -> None:
    with Client(answering.url) as client:
        session = Typed(
            client,
            *("/set temperature 0.5", "/set seed=7", "one", "/set temperature default", "two"),
            *("/set temperature 3", "/set top_k -1", "/set seed x", "/set max_tokens inf", "/set heat 1"),
            *("/set top_p nan", "three"),
        )
    sent = [
        {name: body.get(name) for name in ("temperature", "seed")} for body in answering.bodies(COMPLETIONS)
    ]
    assert sent == [
        {"temperature": 0.5, "seed": 7},
        {"temperature": None, "seed": 7},
        {"temperature": None, "seed": 7},
    ]
    shown = session.shown.getvalue()
    for refusal in (
        "temperature is a number from 0 to 2.",
        "top_k is a whole number from 0 on.",
        "seed is a whole number.",
        "max_tokens is a whole number from 1 on.",
        "There is no parameter heat",
        "top_p is a number from 0 to 1.",
    ):
        assert refusal in shown


def test_the_last_question_is_asked_again_in_place_of_its_answer(answering: FakeNode) -> None:
    with Client(answering.url) as client:
        session = Typed(client, "/retry", "one", "two", "/retry")
        assert [each["content"] for each in session.conversation.messages] == [
            *("one", "Two wörds.", "two", "Two wörds."),
        ]
    assert "Nothing has been asked yet." in session.shown.getvalue()
    first, second, third = asked(answering)
    assert second == third
    assert len(first) == 1


def test_another_model_answers_if_the_node_knows_it(answering: FakeNode) -> None:
    with Client(answering.url) as client:
        session = Typed(client, "/model", "/model nobody", "one", "/model other", "two", "/model")
    assert [body["model"] for body in answering.bodies(COMPLETIONS)] == ["guide", "other"]
    shown = session.shown.getvalue()
    assert "› guide\n  other\n" in shown
    assert "The node knows no model nobody, only guide, other." in shown
    assert "  guide\n› other\n" in shown


def test_a_question_of_several_lines(answering: FakeNode) -> None:
    with Client(answering.url) as client:
        session = Typed(
            client,
            *("one \\", "more\\", "end", '"""', "a", "", " b", '"""', '"""c', 'd"""', '"""e"""', "f"),
        )
    texts = [messages[-1][1] for messages in asked(answering)]
    assert texts == ["one \nmore\nend", "a\n\n b", "c\nd", "e", "f"]
    assert session.prompts == [PROMPT, *[GOES_ON] * 2, PROMPT, *[GOES_ON] * 4, PROMPT, GOES_ON, *[PROMPT] * 3]


def test_a_conversation_is_saved_for_its_owner_and_goes_on_from_its_file(
    answering: FakeNode, tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    with Client(answering.url) as client:
        Typed(
            client, "/system Be brief.", "/set seed 3", "/model other", "one", f"/save {path}", "two", "/save"
        )
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [file.name for file in tmp_path.iterdir()] == ["talk.json"]
        resumed = Typed(client, "lost", f"/load {path}", "three", "/system")
        assert answering.bodies(COMPLETIONS)[-1]["model"] == "other"
        assert answering.bodies(COMPLETIONS)[-1]["seed"] == 3
        texts = [text for _, text in asked(answering)[-1]]
        assert texts == ["Be brief.", "one", "Two wörds.", "two", "Two wörds.", "three"]
        assert "System message: Be brief." in resumed.shown.getvalue()
        before = path.read_bytes()
        other = Typed(
            client, f"/save {path}", "/save", "/load", f"/save {tmp_path}/none/x", f"/load {tmp_path}"
        )
    shown = other.shown.getvalue()
    assert path.read_bytes() == before
    assert f"{path} exists already" in shown
    assert "/save FILE" in shown
    assert "/load FILE" in shown
    assert "cannot be written: No such file or directory." in shown
    assert "cannot be read: Is a directory." in shown
    assert "Errno" not in shown


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no saved conversation"),
        (b"[" * 5000, "no saved conversation"),
        (b"\xff", "no saved conversation"),
        (
            b'{"model": "guide", "sampling": {}, "messages": [{"role": "tool", "content": ""}]}',
            "messages[0].role",
        ),
        (b'{"model": "", "sampling": {}, "messages": []}', "$.model"),
        (b'{"model": "guide", "sampling": {"seed": "x"}, "messages": []}', "$.sampling"),
        (b'{"model": "guide", "sampling": {"temperature": 9}, "messages": []}', "temperature is a number"),
        (b'{"model": "guide", "sampling": {}, "messages": [], "more": 1}', "unknown field"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(
    answering: FakeNode, tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with Client(answering.url) as client:
        session = Typed(client, "one", f"/load {path}", "two")
    assert words in " ".join(session.shown.getvalue().split())
    assert [text for _, text in asked(answering)[-1]] == ["one", "Two wörds.", "two"]


def test_what_a_node_names_its_models_does_not_reach_the_terminal(answering: FakeNode) -> None:
    answering.on("GET", "/v1/models", {"data": [{"id": "a\x1b[2J[bold]"}]})
    with Client(answering.url) as client:
        session = Typed(client, "/model")
    assert "a\\x1b[2J[bold]" in session.shown.getvalue()


@pytest.mark.slow
def test_what_was_typed_is_there_the_next_time_unless_nobody_wants_it(
    answering: FakeNode, tmp_path: Path
) -> None:
    twice_up = 2 * "\x1b[A"  # before the last /quit
    for options, expected in (((), ["first", "first"]), (("--no-history",), ["first"])):
        answering.requests.clear()
        state = tmp_path / "-".join(("state", *options))
        for typed in ("first", twice_up):
            with closing(Terminal(answering.url, *options, state=state)) as terminal:
                terminal.read_until("› ")
                terminal.type(f"{typed}\n")
                if typed == "first" or not options:
                    terminal.read_until("400 tokens/s")
                terminal.read_until("› ")
                terminal.type("/quit\n")
                assert terminal.process.wait(DEADLINE_S) == 0
        assert [messages[-1][1] for messages in asked(answering)] == expected
    history = tmp_path / "state" / "swarmllm" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    assert not (tmp_path / "state---no-history").exists()


def test_pictures_go_with_the_next_question_and_stay_in_the_conversation(
    answering: FakeNode, tmp_path: Path
) -> None:
    (tmp_path / "dot.png").write_bytes(png(3, 2))
    (tmp_path / "dot.svg").write_text("<svg/>")
    show = f"/image {tmp_path}/dot.png"
    with Client(answering.url) as client:
        lines = [show, show, "/image off", show, f"/image {tmp_path}/dot.svg", "/image /nowhere.png", "what?"]
        first = Typed(client, *lines, "and?", "/retry", f"/save {tmp_path}/kept.json")
        Typed(client, f"/load {tmp_path}/kept.json", "more?")
    text = first.shown.getvalue()
    assert "dot.png (3 x 2), dot.png (3 x 2)." in text
    assert "With the next question: no picture." in text
    assert "dot.svg: this is SVG" in text
    assert "/nowhere.png cannot be read" in text
    shown = [
        {"type": "image_url", "image_url": {"url": data_url(png(3, 2))}},
        {"type": "text", "text": "what?"},
    ]
    answer = ("assistant", "Two wörds.")
    one, two, again, later = asked(answering)
    assert one == [("user", shown)]
    assert two == again == [("user", shown), answer, ("user", "and?")]
    assert later == [("user", shown), answer, ("user", "and?"), answer, ("user", "more?")]


def test_a_picture_stays_for_the_next_question_where_one_is_refused(
    answering: FakeNode, tmp_path: Path
) -> None:
    (tmp_path / "dot.png").write_bytes(png())
    refused = {
        "error": {"message": "guide takes no pictures; send text only.", "type": "invalid_request_error"}
    }
    answering.on("POST", COMPLETIONS, refused, status=400)
    with Client(answering.url) as client:
        session = Typed(client, f"/image {tmp_path}/dot.png", "what?", "/image")
    assert "guide takes no pictures" in session.shown.getvalue()
    assert session.shown.getvalue().count("dot.png (12 x 7)") == 2
    assert session.conversation.messages == []
