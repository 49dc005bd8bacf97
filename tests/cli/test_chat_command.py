"""`swarmllm chat` with one question, and the stream that it reads."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import closing

import pytest
from click.testing import Result
from deadlines import DEADLINE_S
from fake_node import COMPLETIONS, END, ROLE, SWARM, TEXT_DELAY_FOREVER, FakeNode, delta, sse
from rich.console import Console

from swarmllm.cli.chat.conversation import Conversation
from swarmllm.cli.chat.session import show_answer
from swarmllm.cli.chat.stream import Finished, stream_chat
from swarmllm.cli.client import EXIT_FAILED, EXIT_REFUSED, EXIT_USAGE, ApiRefused, Client, CommandFailed

Run = Callable[..., Result]


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
    assert answering.client_left.wait(DEADLINE_S)


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
    assert "2 tokens · 400 tokens/s · prefill of 7 tokens 5 ms · 7 of 8 guesses right · 2 nodes" in shown


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
