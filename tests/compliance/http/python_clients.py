"""Python clients that other people wrote against the daemon at SWARMLLM_URL; see test_http_clients."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import anthropic
import litellm
import ollama
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

URL = os.environ["SWARMLLM_URL"].rstrip("/")
MODEL = os.environ.get("SWARMLLM_MODEL", "guide")
QUESTION = "What is a layer range?"
MESSAGES: list[dict[str, str]] = [{"role": "user", "content": QUESTION}]


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class Place(BaseModel):
    where: Literal["here", "there"]
    how_many: Annotated[int, Field(ge=0, le=99)]
    """Bounded: the guide would write digits until its tokens are used up."""


@pytest.fixture(scope="module")
def expected() -> str:
    """What every client should read."""
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="none") as ai:
        answer = ai.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=40)
    return str(answer.choices[0].message.content)


def test_openai_in_python(expected: str) -> None:
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as ai:
        parsed = ai.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Place, temperature=0, max_tokens=400
        )
        assert isinstance(parsed.choices[0].message.parsed, Place)
        with ai.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0) as stream:
            told = stream.get_final_completion().choices[0].message.content
        assert told is not None
        assert told.startswith(expected)
        with ai.responses.stream(model=MODEL, input=QUESTION, temperature=0) as events:
            assert events.get_final_response().output_text.startswith(expected[:20])
        assert len(ai.embeddings.create(model=MODEL, input=["one", "two"]).data) == 2


def test_anthropic(expected: str) -> None:
    with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "messages": MESSAGES}
        with client.messages.stream(**options, extra_body={"temperature": 0}) as stream:
            assert stream.get_final_text() == expected


def test_ollama(expected: str) -> None:
    client = ollama.Client(host=URL)
    options = {"temperature": 0, "num_predict": 40}
    parts = client.chat(MODEL, messages=MESSAGES, options=options, stream=True)
    assert "".join(part.message.content or "" for part in parts) == expected


def langchain(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{URL}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0, **options
    )


def test_langchain(expected: str) -> None:
    chat = langchain(max_tokens=40)
    assert chat.invoke(QUESTION).text == expected
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == expected
    wanted = langchain(max_tokens=400).with_structured_output(Place, method="json_schema")
    assert isinstance(wanted.invoke(QUESTION), Place)
    caller = langchain(max_tokens=200).bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    said = caller.invoke("What is the weather in Oslo?")
    assert isinstance(said, AIMessage)
    (call,) = said.tool_calls
    assert call["name"] == "get_weather"
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert chat.bind_tools([get_weather]).invoke([HumanMessage("The weather?"), said, result])
    assert langchain(max_tokens=40, use_responses_api=True).invoke(QUESTION).text == expected


def test_langchain_embeddings() -> None:
    embeddings = OpenAIEmbeddings(
        base_url=f"{URL}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False
    )
    assert len(embeddings.embed_documents(["one", "two"])) == 2


@pytest.mark.filterwarnings("ignore")
def test_litellm(expected: str) -> None:
    options: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    openais = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
    assert litellm.completion(**options, **openais).choices[0].message.content == expected
    chunks = litellm.completion(**options, **openais, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    ollamas = {"model": f"ollama_chat/{MODEL}", "api_base": URL}
    assert litellm.completion(**options, **ollamas).choices[0].message.content == expected
    assert len(litellm.embedding(input=["one"], **openais).data) == 1
