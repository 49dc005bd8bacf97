"""The `ollama` client against a real daemon with the whole guide model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from daemon_process import DaemonProcess
from faulty_server import open_shelf

from swarmllm.api.ollama.endpoints import API_VERSION
from swarmllm.api.ollama.models import hub_source
from swarmllm.guide import DRAFT_PATH

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is a layer range?"}]
GREEDY = {"temperature": 0, "num_predict": 20}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def client(node: DaemonProcess) -> Iterator[ollama.Client]:
    with ollama.Client(host=node.url, trust_env=False) as client:
        yield client


def test_models_are_listed_and_shown(client: ollama.Client, node: DaemonProcess) -> None:
    (listed,) = client.list().models
    (running,) = client.ps().models
    assert listed.model == running.model == "guide:latest"
    assert listed.size is not None
    assert listed.size > 10**6
    shown = client.show("guide:latest")
    assert shown.details is not None
    assert shown.details.format == "gguf"
    assert shown.capabilities == ["completion", "tools", "embedding", "vision"]
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.details.family}.block_count"] == 12
    assert node.http.get("/api/version").json() == {"version": API_VERSION}


def test_a_streamed_chat_says_the_same_as_a_whole_one(client: ollama.Client) -> None:
    whole = client.chat("guide:latest", messages=QUESTION, options=GREEDY)
    parts = list(client.chat("guide", messages=QUESTION, options=GREEDY, stream=True))
    assert whole.message.content
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts[:-1]] == [False] * (len(parts) - 1)
    assert (parts[-1].done, parts[-1].done_reason) == (True, whole.done_reason)
    assert (parts[-1].prompt_eval_count, parts[-1].eval_count) == (whole.prompt_eval_count, whole.eval_count)
    assert (whole.total_duration or 0) >= (whole.eval_duration or 0) > 0


def test_generate_is_a_question_unless_it_is_raw(client: ollama.Client) -> None:
    question = str(QUESTION[0]["content"])
    asked = client.generate("guide", question, options=GREEDY)
    assert asked.response == client.chat("guide", messages=QUESTION, options=GREEDY).message.content
    parts = client.generate("guide", question, options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == asked.response
    raw = client.generate("guide", question, raw=True, options=GREEDY)
    assert (raw.prompt_eval_count or 0) < (asked.prompt_eval_count or 0)
    assert client.generate("guide", "").done_reason == "load"


def test_texts_become_vectors(client: ollama.Client) -> None:
    both = client.embed("guide:latest", input=["A pipeline.", "A worker."])
    assert [len(vector) for vector in both.embeddings] == [256, 256]
    one = client.embed("guide", input="A pipeline.")
    assert list(one.embeddings[0]) == list(both.embeddings[0])
    assert list(client.embeddings("guide", "A pipeline.").embedding) == list(one.embeddings[0])
    with pytest.raises(ollama.ResponseError):
        client.embed("guide", input="word " * 4000)


def test_options_reach_the_model(client: ollama.Client) -> None:
    short = client.chat("guide", messages=QUESTION, options=GREEDY | {"num_predict": 3, "num_ctx": 4096})
    assert (short.eval_count, short.done_reason) == (3, "length")


def test_a_tool_call_comes_as_one(client: ollama.Client) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    options = {"temperature": 0}
    said = client.chat("guide", messages=messages, tools=[WEATHER], options=options).message
    assert said.tool_calls
    streamed = client.chat("guide", messages=messages, tools=[WEATHER], options=options, stream=True)
    calls = [call for part in streamed for call in part.message.tool_calls or ()]
    assert calls == list(said.tool_calls)
    messages += [said.model_dump(), {"role": "tool", "tool_name": "get_weather", "content": "sunny"}]
    answer = client.chat("guide", messages=messages, tools=[WEATHER], options=options | {"num_predict": 5})
    assert answer.eval_count


def test_an_answer_takes_the_format_that_is_asked_for(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"where": {"enum": ["here", "there"]}},
        "required": ["where"],
        "additionalProperties": False,
    }
    said = client.chat("guide", messages=QUESTION, options={"temperature": 0}, format=schema).message.content
    assert json.loads(said or "")["where"] in ("here", "there")


@pytest.mark.parametrize(
    ("options", "status", "field"),
    [
        ({"model": "gpt-9"}, 404, "gpt-9"),
        ({"options": {"tfs_z": 0.5}}, 400, "options.tfs_z"),
        ({"options": {"temperature": 9}}, 400, "options.temperature"),
        ({"messages": [{"role": "user", "content": "x", "images": [b"12"]}]}, 400, "messages[0].images"),
    ],
)
def test_errors_are_of_the_clients_own_kind(
    client: ollama.Client, options: dict[str, Any], status: int, field: str
) -> None:
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError) as caught:
            list(client.chat(**({"model": "guide", "messages": QUESTION, "stream": stream} | options)))
        assert caught.value.status_code == status
        assert field in caught.value.error


def test_a_model_is_pulled_with_its_progress(client: ollama.Client, node: DaemonProcess) -> None:
    with open_shelf() as hub:
        hub.files["/draft.gguf"] = DRAFT_PATH.read_bytes()
        source = f"{hub.url}/draft.gguf"
        said = list(client.pull(source, stream=True))
        assert (said[0].status, said[-1].status) == ("pulling manifest", "success")
        pulled = [each for each in said if each.digest]
        assert all(each.total == len(hub.files["/draft.gguf"]) for each in pulled)
        assert all(0 <= (each.completed or 0) <= (each.total or 0) for each in pulled)
        assert said[-2].status == "the model is called draft"
        assert "draft:latest" in [each.model for each in client.list().models]
        assert client.pull("draft:latest").status == "success"
        asked = len(hub.asked)
        assert client.pull("guide").status == "success"
        assert len(hub.asked) == asked
        with pytest.raises(ollama.ResponseError, match="404"):
            list(client.pull(f"{hub.url}/none.gguf", stream=True))
        with pytest.raises(ollama.ResponseError, match="404") as caught:
            client.pull(f"{hub.url}/none.gguf")
        assert caught.value.status_code == 502
        with pytest.raises(ollama.ResponseError) as caught:
            client.pull("llama9")
        assert caught.value.status_code == 404
        client.delete("draft")


@pytest.mark.parametrize(
    ("asked", "source"),
    [
        ("hf.co/org/repo:Q8_0", "hf:org/repo:Q8_0"),
        ("huggingface.co/org/repo:latest", "hf:org/repo"),
        ("hf:org/repo", "hf:org/repo"),
        ("guide:latest", None),
        ("org/repo", None),
    ],
)
def test_names_of_repositories_are_ollamas_or_our_own(asked: str, source: str | None) -> None:
    assert hub_source(asked) == source


def test_a_model_is_created_copied_shown_and_deleted(client: ollama.Client) -> None:
    said = list(
        client.create(
            "pirate",
            from_="guide",
            system="You are a pirate.",
            parameters={"temperature": 0.5, "top_k": 7, "num_ctx": 1024, "stop": ["###"], "num_thread": 2},
            license="none",
            stream=True,
        )
    )
    assert said[-1].status == "success"
    assert client.create("pirate:latest", from_="guide:latest", system="You are.").status == "success"
    shown = client.show("pirate")
    assert shown.modelfile is not None
    assert "FROM guide" in shown.modelfile
    assert "SYSTEM" in shown.modelfile
    assert "top_k 7" not in (shown.parameters or "")
    assert client.copy("pirate", "parrot").status == "success"
    assert {"guide:latest", "pirate:latest", "parrot:latest"} <= {each.model for each in client.list().models}
    assert client.show("parrot").modelfile == shown.modelfile
    answer = client.chat("parrot", messages=QUESTION, options=GREEDY)
    assert answer.model == "parrot"
    assert answer.message.content
    for name in ("parrot", "pirate:latest"):
        assert client.delete(name).status == "success"
        with pytest.raises(ollama.ResponseError) as caught:
            client.show(name)
        assert caught.value.status_code == 404
    assert [each.model for each in client.list().models] == ["guide:latest"]
    for call in (lambda: client.delete("parrot"), lambda: client.copy("parrot", "x")):
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as caught:
        client.create("x", from_="parrot")
    assert caught.value.status_code == 404


def test_keep_alive_is_taken_in_all_forms_and_models_of_a_person_stay(client: ollama.Client) -> None:
    """The guide was loaded by a person: no request lets it go."""
    for keep_alive in (0, 30, -1, "5m", "1h30m"):
        assert client.chat("guide", messages=QUESTION, options=GREEDY, keep_alive=keep_alive).done
    (running,) = client.ps().models
    assert running.name == running.model == "guide:latest"
    assert running.size is not None
    assert running.size_vram == 0
    assert running.context_length == 2048
    assert client.generate("guide", keep_alive=0).done_reason == "unload"
    assert len(client.ps().models) == 1
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("guide", messages=QUESTION, keep_alive="soon")
    assert caught.value.status_code == 400
