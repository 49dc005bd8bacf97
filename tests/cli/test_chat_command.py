"""A conversation: what is sent, what is shown, what happens when it is stopped or breaks off."""

from __future__ import annotations

import codecs
import io
import json
import os
import pty
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from deadlines import PATIENCE_S
from fake_node import TEXT_DELAY_FOREVER, FakeNode, sse
from rich.console import Console

from swarmllm.cli.chat_session import GOES_ON, PROMPT, ChatSession, show_answer
from swarmllm.cli.chat_stream import Finished, stream_chat
from swarmllm.cli.client import EXIT_FAILED, EXIT_REFUSED, EXIT_USAGE, ApiRefused, Client, CommandFailed
from swarmllm.cli.conversation import Conversation

Run = Callable[..., Result]

COMPLETIONS = "/v1/chat/completions"
SWARM = {
    "shape": "chain",
    "route": [
        {
            "node": f"12D3KooWNode{index}",
            "nickname": f"node-{index}",
            "layers": layers,
            "compute_ms_per_token": 0.5,
            "overhead_ms_per_token": 0.125,
            "network_ms_per_token": 0.25,
            "prefill_ms": 2.0,
        }
        for index, layers in enumerate(("0:6", "6:12"), 1)
    ],
    "prefill_ms": 5.0,
    "decode_tokens_per_s": 400.0,
}


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": None}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
END = (
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "swarm": SWARM},
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
    b"[DONE]",
)
ANSWER = [b": waiting\n\n", *sse(ROLE, delta("Two "), delta("wörds."), *END)]


@pytest.fixture
def answering(node: FakeNode) -> FakeNode:
    node.on("GET", "/v1/models", {"data": [{"id": "guide"}, {"id": "other"}]})
    node.on("POST", COMPLETIONS, ANSWER)
    return node


def test_a_stream_is_its_texts_and_then_how_it_went(answering: FakeNode) -> None:
    with Client(answering.url) as client:
        *texts, end = stream_chat(
            client, "guide", [{"role": "user", "content": "hi"}], temperature=0, seed=None
        )
    assert texts == ["Two ", "wörds."]
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.n_prompt_tokens, end.n_generated) == ("stop", 7, 2)
    assert [(stage.nickname, stage.layers) for stage in end.route] == [("node-1", "0:6"), ("node-2", "6:12")]
    assert answering.bodies(COMPLETIONS) == [
        {
            "model": "guide",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
    ]


THINKING = {"choices": [{"index": 0, "delta": {"reasoning_content": "Count them."}, "finish_reason": None}]}


def test_thoughts_are_for_terminals_and_programs_and_not_for_pipes(run: Run, answering: FakeNode) -> None:
    answering.on("POST", COMPLETIONS, sse(ROLE, THINKING, delta("Two."), *END))
    assert run("chat", "How many?").stdout == "Two.\n"
    assert json.loads(run("chat", "--json", "How many?").stdout)["reasoning"] == "Count them."
    shown = io.StringIO()
    with Client(answering.url) as client:
        conversation = Conversation(client, "guide", {})
        show_answer(conversation, "How many?", Console(file=shown, force_terminal=True, color_system=None))
    assert shown.getvalue() == "Count them.\n\nTwo.\n"


def test_leaving_a_stream_closes_the_connection(answering: FakeNode) -> None:
    answering.on("POST", COMPLETIONS, [*sse(ROLE, delta("Once ")), TEXT_DELAY_FOREVER])
    with Client(answering.url) as client, closing(stream_chat(client, "guide", [])) as stream:
        assert next(stream) == "Once "
    assert answering.client_left.wait(PATIENCE_S)


def test_an_error_in_the_middle_is_raised_with_the_nodes_words(answering: FakeNode) -> None:
    failure = {"error": {"message": "node attic is gone", "type": "upstream_error"}}
    answering.on("POST", COMPLETIONS, sse(ROLE, delta("Once "), failure))
    with Client(answering.url) as client, pytest.raises(CommandFailed, match="node attic is gone"):
        list(stream_chat(client, "guide", []))


def test_an_answer_without_an_end_is_not_taken_for_one(answering: FakeNode) -> None:
    answering.on("POST", COMPLETIONS, sse(ROLE, delta("Once ")))
    with Client(answering.url) as client, pytest.raises(CommandFailed, match="broke off"):
        list(stream_chat(client, "guide", []))


def test_a_conversation_sends_what_was_said_before(answering: FakeNode) -> None:
    with Client(answering.url) as client:
        conversation = Conversation(client, "guide", {}, system="Be brief.")
        for question in ("one", "two"):
            assert "".join(conversation.ask(question)) == "Two wörds."
        conversation.forget()
        list(conversation.ask("three"))
    system = {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "Two wörds."}
    one, two, three = ({"role": "user", "content": text} for text in ("one", "two", "three"))
    assert [body["messages"] for body in answering.bodies(COMPLETIONS)] == [
        [system, one],
        [system, one, answer, two],
        [system, three],
    ]


def test_a_question_that_got_no_answer_is_forgotten(node: FakeNode) -> None:
    with Client(node.url) as client:
        conversation = Conversation(client, "guide", {})
        with pytest.raises(ApiRefused):
            list(conversation.ask("one"))
        assert conversation.messages == []


def test_one_question_prints_the_answer_and_nothing_else(run: Run, answering: FakeNode) -> None:
    result = run("chat", "what", "is", "this?", "--max-tokens", "5")
    assert (result.exit_code, result.stdout) == (0, "Two wörds.\n")
    body = answering.bodies(COMPLETIONS)[0]
    assert (body["model"], body["messages"][0]["content"], body["max_tokens"]) == (
        "guide",
        "what is this?",
        5,
    )
    assert "temperature" not in body


def test_piped_text_follows_the_question(run: Run, answering: FakeNode) -> None:
    assert run("chat", "Summarise:", stdin="a long story\n").exit_code == 0
    assert answering.bodies(COMPLETIONS)[0]["messages"][0]["content"] == "Summarise:\n\na long story"


def test_nothing_to_ask_is_a_usage_error(run: Run, answering: FakeNode) -> None:
    assert run("chat").exit_code == EXIT_USAGE


def test_the_route_is_shown_on_demand(run: Run, answering: FakeNode) -> None:
    shown = run("chat", "hi", "--route").stdout
    assert "node-2" in shown
    assert "2 tokens · 400 tokens/s · prefill of 7 tokens 5 ms · 2 nodes" in shown


def test_json_has_the_answer_and_how_it_was_made(run: Run, answering: FakeNode) -> None:
    assert json.loads(run("chat", "hi", "--json").stdout) == {
        "text": "Two wörds.",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 7, "completion_tokens": 2},
        "swarm": SWARM,
    }


def test_the_model_is_chosen_only_where_there_is_no_choice(run: Run, answering: FakeNode) -> None:
    answering.on("GET", "/v1/models", {"data": [{"id": "only"}]})
    run("chat", "hi")
    assert answering.bodies(COMPLETIONS)[0]["model"] == "only"
    answering.on("GET", "/v1/models", {"data": [{"id": "one"}, {"id": "two"}]})
    result = run("chat", "hi")
    assert (result.exit_code, "one, two" in result.stderr) == (EXIT_USAGE, True)
    answering.on("GET", "/v1/models", {"data": []})
    assert run("chat", "hi").exit_code == EXIT_FAILED


def test_an_unknown_model_is_refused_in_the_nodes_words(run: Run, answering: FakeNode) -> None:
    error = {"error": {"message": "There is no model 'x'.", "type": "invalid_request_error"}}
    answering.on("POST", COMPLETIONS, error, 404)
    result = run("chat", "hi", "-m", "x")
    assert (result.exit_code, "There is no model 'x'." in result.stderr) == (EXIT_REFUSED, True)


def test_control_characters_in_an_answer_do_not_reach_the_terminal(run: Run, answering: FakeNode) -> None:
    answering.on("POST", COMPLETIONS, sse(delta("a\x1b]0;gotcha\x07\nb"), *END))
    assert run("chat", "hi").stdout == "a\\x1b]0;gotcha\\x07\nb\n"


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

    def read_until(self, text: str, timeout_s: float = PATIENCE_S) -> str:
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
        assert answering.client_left.wait(PATIENCE_S)
        terminal.read_until("› ")
        terminal.type("/quit\n")
        assert terminal.process.wait(PATIENCE_S) == 0


class Typed:
    """A session in this process: what is typed is a list, and the end of it the end of the input."""

    def __init__(self, client: Client, *lines: str) -> None:
        self.lines = list(lines)
        self.prompts: list[str] = []
        self.shown = io.StringIO()
        self.conversation = Conversation(client, "guide", {})
        console = Console(file=self.shown, width=100, no_color=True)
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
    shown = other.shown.getvalue().replace("\n", "")
    assert path.read_bytes() == before
    assert f"{path} exists already" in shown
    assert "/save FILE" in shown
    assert "/load FILE" in shown
    assert "cannot be written: no such file or directory." in shown
    assert "cannot be read: is a directory." in shown
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
    assert words in session.shown.getvalue().replace("\n", " ")
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
                assert terminal.process.wait(PATIENCE_S) == 0
        assert [messages[-1][1] for messages in asked(answering)] == expected
    history = tmp_path / "state" / "swarmllm" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    assert not (tmp_path / "state---no-history").exists()
