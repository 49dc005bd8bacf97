"""Every request field that OpenAI documents is known here: honoured, or refused by a 400 that names it.

The list is that of the `openai` client's own types, so a new version of it brings new fields to this test.
"""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_fakes import serve_node
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from swarmllm.api.openai import chat_request, completions, responses_request
from swarmllm.api.openai.completions import CompletionRequest
from swarmllm.api.openai.embeddings import EmbeddingRequest
from swarmllm.api.openai.responses_request import ResponsesRequest
from swarmllm.api.openai.schema import ChatRequest

ENDPOINTS: dict[str, tuple[type, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatRequest,
        (chat_create_params.CompletionCreateParamsNonStreaming,),
        chat_request.NEUTRAL,
        {"model": "guide", "messages": [{"role": "user", "content": "hello"}]},
    ),
    "/v1/completions": (
        CompletionRequest,
        (completion_create_params.CompletionCreateParamsNonStreaming,),
        completions.NEUTRAL,
        {"model": "guide", "prompt": "hello"},
    ),
    "/v1/responses": (
        ResponsesRequest,
        (response_create_params.ResponseCreateParamsNonStreaming,),
        responses_request.NEUTRAL,
        {"model": "guide", "input": "hello"},
    ),
    "/v1/embeddings": (
        EmbeddingRequest,
        (embedding_create_params.EmbeddingCreateParams,),
        {},
        {"model": "guide", "input": "hello"},
    ),
}
NO_NEUTRAL_WORD = "never a neutral value"


def documented(params: tuple[Any, ...]) -> set[str]:
    return {name for kind in params for name in typing.get_type_hints(kind, include_extras=True)}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_documented_field_is_known(path: str) -> None:
    kind, params, neutral, _ = ENDPOINTS[path]
    known = {field.name for field in msgspec.structs.fields(kind)}
    names = documented(params)
    assert len(names) > 4
    assert names - known == set()
    assert set(neutral) <= known
    docs = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    for name in sorted(names - set(neutral)):
        assert re.search(rf"`{name}[`.:]", docs), f"{name} is honoured or ignored, and docs/http.md is silent"


@pytest.mark.slow
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_field_without_meaning_here_is_refused_by_name(tmp_path: Path, path: str) -> None:
    kind, _, neutral, body = ENDPOINTS[path]
    types = {field.name: str(field.type) for field in msgspec.structs.fields(kind)}
    async with serve_node(tmp_path) as stand:
        for field in neutral:
            asked = next(
                value
                for word, value in (
                    ("bool", True),
                    ("int", 7),
                    ("list[str]", [NO_NEUTRAL_WORD]),
                    ("list", [{}]),
                    ("dict", {"type": NO_NEUTRAL_WORD}),
                    ("str", NO_NEUTRAL_WORD),
                )
                if word in types[field]
            )
            answer = await stand.http.post(path, json=body | {field: asked})
            assert answer.status_code == 400, (field, answer.text)
            assert answer.json()["error"]["param"] == field
            assert answer.json()["error"]["message"]
    async with serve_node(tmp_path / "strict", strict=True) as stand:
        unknown = await stand.http.post(path, json=body | {"temprature": 1})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "temprature")
        assert not stand.pipelines.calls


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path != "/v1/embeddings"])
async def test_what_asks_for_nothing_is_accepted(tmp_path: Path, path: str) -> None:
    kind, _, neutral, body = ENDPOINTS[path]
    nulls = {
        field.name: None
        for field in msgspec.structs.fields(kind)
        if not field.required and field.name != "model"
    }
    asks_nothing = {field: values[0] for field, values in neutral.items() if values}
    async with serve_node(tmp_path) as stand:
        for fields in (nulls, asks_nothing):
            answer = await stand.http.post(path, json=body | fields)
            assert answer.status_code == 200, answer.text
