"""A conversation: what is sent, what is shown, what happens when it is stopped or breaks off."""

from __future__ import annotations

import codecs
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from click.testing import Result
from deadlines import PATIENCE_S
from fake_node import TEXT_DELAY_FOREVER, FakeNode, sse
from rich.console import Console

from swarmllm.cli.chat import Conversation, show_answer
from swarmllm.cli.chat_stream import Finished, stream_chat
from swarmllm.cli.client import EXIT_FAILED, EXIT_REFUSED, EXIT_USAGE, ApiRefused, Client, CommandFailed

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

    def __init__(self, api_url: str) -> None:
        self.master, slave = pty.openpty()
        environment = {
            **os.environ,
            "SWARMLLM_API": api_url,
            "TERM": "xterm",
            "COLUMNS": "120",
            "NO_COLOR": "1",
        }
        command = [sys.executable, "-m", "swarmllm", "chat"]
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
