"""JSON bodies that no honest client sends, made from the very types that the endpoints decode."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st

from swarmllm.api.http.openapi import OPERATIONS, Operation

DEEP = "\x00deep\x00"
"""Stands for arrays in arrays, which Python's own encoder cannot write."""
DEPTH = 20_000
USER = [{"role": "user", "content": "hi"}]
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": OBJECT}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": OBJECT}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "guide",
        "messages": [*USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}, *USER],
        "stop": ["x"],
        "logit_bias": {"5": 1.0},
        "stream_options": {"include_usage": True},
        "stream": True,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "/v1/completions": {"model": "guide", "prompt": [[1, 2]], "stop": "x", "logprobs": 1, "echo": True},
    "/v1/responses": {
        "model": "guide",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "tools": [{"type": "function", "name": "f", "parameters": OBJECT}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": OBJECT}},
    },
    "/v1/chat/completions/input_tokens": {"model": "guide", "messages": USER, "json_schema": OBJECT},
    "/chat/completions/input_tokens": {"model": "guide", "messages": USER},
    "/v1/responses/input_tokens": {
        "model": "guide",
        "input": [{"role": "user", "content": "hi"}],
        "previous_response_id": None,
    },
    "/v1/embeddings": {"model": "guide", "input": ["a"]},
    "/v1/rerank": {"model": "guide", "query": "a", "documents": ["a", "b"], "top_n": 1},
    "/v1/messages": {
        "model": "guide",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "f", "input_schema": OBJECT}],
    },
    "/v1/messages/count_tokens": {"model": "guide", "messages": USER},
    "/api/chat": {"model": "guide", "messages": USER, "options": {"temperature": 0.5}, "format": OBJECT},
    "/api/generate": {"model": "guide", "prompt": "hi", "options": {"stop": ["x"]}},
    "/api/embed": {"model": "guide", "input": ["a"]},
    "/api/embeddings": {"model": "guide", "prompt": "a"},
    "/api/show": {"model": "guide"},
    "/api/copy": {"source": "guide", "destination": "x"},
    "/api/create": {"model": "x", "from": "guide", "system": "a", "parameters": {"top_k": 1, "stop": ["a"]}},
    "/api/delete": {"model": "guide"},
    "/api/pull": {"model": "guide", "stream": False},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "c", "text": "d"}]},
    "/tokenize": {"model": "guide", "content": "a"},
    "/detokenize": {"model": "guide", "tokens": [72, 73]},
    "/apply-template": {"model": "guide", "messages": USER},
    "/api/admin/models": {"path": "/nowhere/x.gguf", "name": "x"},
    "/api/admin/downloads": {"source": "https://127.0.0.1/x.gguf", "layers": "0:4"},
    "/api/admin/shares": {"model": "guide"},
    "/api/admin/shares/published": {"source": "hf:org", "name": "x", "hf_token": "x"},
    "/api/admin/shares/plan": {"source": "hf:org", "hf_token": "x"},
    "/api/admin/invitations": {"expires_days": 7},
    "/api/admin/models/search": {"term": "x", "hf_endpoint": "https://127.0.0.1", "hf_token": "x"},
    "/api/admin/models/{name}/load": {"layers": "0:4"},
    "/api/admin/models/{name}/unload": {"layers": "0:4"},
    "/api/admin/models/{name}/pin": {"pinned": True},
    "/api/admin/models/{name}/projector": {"path": "/nowhere/mm.gguf"},
    "/api/admin/models/{name}/alias": {"name": "x"},
    "/api/admin/models/{name}/preset": {
        "system": "a",
        "context": 512,
        "sampling": {"top_k": 1, "stop": ["a"]},
    },
}
BODIES |= {
    # The same without /v1.
    **{path: BODIES[f"/v1{path}"] for path in ("/chat/completions", "/responses", "/embeddings")},
    **dict.fromkeys(("/rerank", "/reranking", "/v1/reranking"), BODIES["/v1/rerank"]),
    **{path: {"prompt": "hi", "n_predict": 2, "stop": ["x"]} for path in ("/completion", "/completions")},
}
NUMBERS = (-1, 0, 2**31, 2**63, 2**64, -(2**70), 10**400, 1e308, -0.0, 0.5, float("nan"), float("inf"))
WORDS = ("", "\0", "\ud800", "a\udfffb", "x" * 5000, "0:4", "-1:4", "..", "[z-a]", "(" * 500, "é", DEEP)
SHAPES: tuple[Any, ...] = (
    None,
    True,
    [],
    {},
    [None],
    [[]],
    {"": None},
    {"\ud800": 1},
    [{}] * 50,
    {"type": DEEP},
)
VALUES = (*NUMBERS, *WORDS, *SHAPES)
GRAMMAR_WORDS = (
    "[z-a]",
    "[\\",
    "(?<x>a)",
    "a{5,2}",
    "a{99999}",
    "\\u",
    "root ::= ",
    'root ::= "',
    "root ::= root",
)


def operations() -> list[Operation]:
    return [operation for operation in OPERATIONS if operation.body is not None]


def written(body: Any) -> bytes:
    """JSON, with what JSON has no word for left as other languages write it."""
    text = json.dumps(body).replace(json.dumps(DEEP), "[" * DEPTH + "]" * DEPTH)
    return text.encode()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value could be exchanged: everywhere."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


def exchanged(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    body = copy.deepcopy(body)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body


def places_of(operation: Operation) -> list[tuple[Any, ...]]:
    """Of the example's values, and of every field that the type has."""
    assert operation.body is not None
    body = BODIES[operation.path]
    fields = [(field.encode_name,) for field in msgspec.structs.fields(operation.body)]
    return [*places(body), *(path for path in fields if path[0] not in body), ("no such field",)]


@st.composite
def hostile(draw: st.DrawFn, operation: Operation) -> bytes:
    body: Any = BODIES[operation.path]
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places_of(operation)))
        try:
            body = exchanged(body, path, draw(st.sampled_from(VALUES)))
        except (KeyError, IndexError, TypeError):
            # An earlier exchange has taken this place away.
            continue
    return written(body)
