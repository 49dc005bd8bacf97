"""Fields that clients send without being asked: honoured, ignored and told, or refused by name."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from api_fakes import serve_node
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.api.http.errors import rename_field
from swarmllm.api.http.fields import HEADER, NAME_MAX, NAMES_MAX, decode_request, header_of
from swarmllm.api.openai.chat_request import chat_call
from swarmllm.api.openai.schema import ChatRequest
from swarmllm.errors import InvalidRequest

USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object"}
FUNCTION = {"type": "function", "name": "shell", "parameters": SCHEMA}
TOOL = {"name": "shell", "input_schema": SCHEMA}
EPHEMERAL = {"type": "ephemeral"}

BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "guide", "messages": [USER]},
    "/v1/responses": {"model": "guide", "input": "hello"},
    "/v1/messages": {"model": "guide", "max_tokens": 5, "messages": [USER]},
    "/api/chat": {"model": "guide", "messages": [USER], "stream": False},
}
CHAT, RESPONSES, MESSAGES, OLLAMA = BASE
MARKED = {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": EPHEMERAL}]}
EARLIER = {"role": "assistant", "content": "a", "reasoning": "r", "id": "m1"}
IGNORED: list[tuple[str, dict[str, Any], str]] = [
    (MESSAGES, {"context_management": {"edits": []}}, "context_management"),
    (MESSAGES, {"thread": "t"}, "thread"),
    (MESSAGES, {"tools": [TOOL | {"eager_input_streaming": True}]}, "tools[].eager_input_streaming"),
    (MESSAGES, {"tools": [TOOL | {"defer_loading": True}]}, "tools[].defer_loading"),
    (
        MESSAGES,
        {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]},
        "tools[].web_search_20250305",
    ),
    (MESSAGES, {"messages": [MARKED]}, "messages[].content[].cache_control"),
    (MESSAGES, {"system": MARKED["content"]}, "system[].cache_control"),
    (RESPONSES, {"tools": [FUNCTION, {"type": "custom", "name": "apply_patch"}]}, "tools[].custom"),
    (RESPONSES, {"tools": [FUNCTION, {"type": "local_shell"}]}, "tools[].local_shell"),
    (RESPONSES, {"client_metadata": {"x": "y"}}, "client_metadata"),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (CHAT, {"cache_prompt": True}, "cache_prompt"),
    (CHAT, {"user": "me"}, "user"),
    (CHAT, {"service_tier": "flex"}, "service_tier"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"messages": [MARKED]}, "messages[].content[].cache_control"),
    (CHAT, {"messages": [USER | {"id": "m0"}]}, "messages[].id"),
    (CHAT, {"messages": [USER, EARLIER, USER]}, "messages[].id"),
    (OLLAMA, {"truncate": True}, "truncate"),
    (OLLAMA, {"options": {"num_ctx": 10}}, "options.num_ctx"),
    (CHAT, {"plugins": []}, "plugins"),
    (CHAT, {"return_tokens": False}, "return_tokens"),
    (CHAT, {"min_tokens": 0}, "min_tokens"),
]
HONOURED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"repetition_penalty": 1.1}),
    (CHAT, {"max_tokens": -1}),
    (CHAT, {"top_k": -1}),
    (CHAT, {"reasoning": {"effort": "low"}}),
    (CHAT, {"repeat_last_n": 64}),
    (OLLAMA, {"options": {"repeat_last_n": 64, "num_keep": 4, "penalize_newline": True}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"stop_token_ids": [1]}, "stop_token_ids"),
    (CHAT, {"guided_json": SCHEMA}, "guided_json"),
    (CHAT, {"plugins": [{"id": "web"}]}, "plugins"),
    (CHAT, {"min_tokens": 1}, "min_tokens"),
    (CHAT, {"transforms": ["middle-out"]}, "transforms"),
    (CHAT, {"return_tokens": True}, "return_tokens"),
    (CHAT, {"return_token_ids": True}, "return_token_ids"),
    (CHAT, {"repeat_last_n": -1}, "repeat_last_n"),
    (OLLAMA, {"options": {"repeat_last_n": 4096}}, "options.repeat_last_n"),
    (OLLAMA, {"options": {"num_keep": 24}}, "options.num_keep"),
    (OLLAMA, {"options": {"penalize_newline": False}}, "options.penalize_newline"),
    (CHAT, {"chat_template_kwargs": {"date_string": "today"}}, "chat_template_kwargs.date_string"),
    (CHAT, {"chat_template_kwargs": {"documents": ["d"]}}, "chat_template_kwargs.documents"),
    (MESSAGES, {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    (MESSAGES, {"top_k": -1}, "top_k"),
    (RESPONSES, {"background": True}, "background"),
]


@pytest.mark.parametrize(("path", "fields", "name"), IGNORED)
async def test_what_changes_nothing_is_ignored_and_told(
    tmp_path: Path, path: str, fields: dict[str, Any], name: str
) -> None:
    for strict in (False, True):
        async with serve_node(tmp_path / str(strict), strict=strict) as stand:
            answer = await stand.http.post(path, json=BASE[path] | fields)
            assert answer.status_code == 200, answer.text
            assert answer.headers[HEADER].split(", ") == [name]


@pytest.mark.parametrize(("path", "fields"), HONOURED)
async def test_other_names_of_what_is_offered_are_honoured(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(path, json=BASE[path] | fields)
        assert answer.status_code == 200, answer.text
        assert HEADER not in answer.headers


@pytest.mark.parametrize(("path", "fields", "name"), REFUSED)
async def test_what_would_change_the_answer_is_refused_by_name(
    tmp_path: Path, path: str, fields: dict[str, Any], name: str
) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(path, json=BASE[path] | fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert name in message
        if path in (MESSAGES, OLLAMA):  # The errors of these have no place for the field's name.
            assert message.count(name) == 1
        assert not stand.pipelines.calls


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("response_format", "format"),
        ("response_format.schema", "format.schema"),
        ("tools[3].function.parameters", "tools[3].input_schema"),
        ("tools[0].function.name", "tools[0].name"),
        ("toolset", "toolset"),
        (None, None),
    ],
)
def test_a_field_is_called_as_its_dialect_calls_it(ours: str | None, theirs: str | None) -> None:
    names = {
        "response_format": "format",
        "tools[].function.parameters": "tools[].input_schema",
        "tools[].function": "tools[]",
    }
    failure = InvalidRequest("no", field=ours)
    rename_field(failure, names)
    assert failure.field == theirs


UNCALLABLE = {"type": "string"}


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (
            MESSAGES,
            {"tools": [TOOL | {"input_schema": UNCALLABLE}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema: ",
        ),
        (
            RESPONSES,
            {"tools": [FUNCTION | {"parameters": UNCALLABLE}], "tool_choice": "required"},
            "tools[0].parameters",
        ),
    ],
)
async def test_a_function_that_cannot_be_forced_is_named_as_the_request_names_it(
    tmp_path: Path, path: str, fields: dict[str, Any], name: str
) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(path, json=BASE[path] | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == name if path == RESPONSES else error["message"].startswith(name)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_field_is_told_unless_strict(tmp_path: Path, stream: bool) -> None:
    body = BASE[CHAT] | {"temprature": 1, "stream": stream}
    async with serve_node(tmp_path / "a") as stand:
        answer = await stand.http.post(CHAT, json=body)
        assert (answer.status_code, answer.headers[HEADER]) == (200, "temprature")
    async with serve_node(tmp_path / "b", strict=True) as stand:
        answer = await stand.http.post(CHAT, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temprature")


def read(**fields: Any) -> Any:
    return chat_call(decode_request(json.dumps(BASE[CHAT] | fields).encode(), ChatRequest))


def test_what_other_names_come_to() -> None:
    assert read(repetition_penalty=1.25).sampling.repeat_penalty == 1.25
    assert "repeat_penalty" in read(repetition_penalty=1.25).said
    assert (read(repeat_last_n=7).sampling.repeat_last_n, read().sampling.repeat_last_n) == (7, 1024)
    assert read(max_tokens=-1).max_tokens is None
    assert read(top_k=-1).sampling.top_k == read(top_k=0).sampling.top_k == 0
    assert read(chat_template_kwargs={"enable_thinking": False}).effort == "none"
    assert read(chat_template_kwargs={"thinking": True}).effort == "medium"
    assert read(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="high").effort == "high"
    assert read(reasoning={"enabled": False}).effort == "none"
    assert read(reasoning={"enabled": True, "effort": "low"}).effort == "low"
    assert read(response_format={"type": "json_object", "schema": {"type": "object", "required": ["a"]}}) == (
        read(
            response_format={
                "type": "json_schema",
                "json_schema": {"schema": {"type": "object", "required": ["a"]}},
            }
        )
    )
    assert read(messages=[USER, EARLIER, USER]).messages[1]["reasoning_content"] == "r"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"repetition_penalty": 1.25, "repeat_penalty": 1.5}, "repetition_penalty"),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"chat_template_kwargs": {"enable_thinking": 3}}, "chat_template_kwargs.enable_thinking"),
        ({"unknown": 1, "messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ],
)
def test_contradictions_and_wrong_types_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.field == name


@given(st.lists(st.text(max_size=200), max_size=100))
def test_the_header_is_bounded_and_safe(names: list[str]) -> None:
    header = header_of(names)
    assert len(header) <= (NAMES_MAX + 1) * (NAME_MAX + 2)
    assert re.fullmatch(r"[A-Za-z0-9_.\[\]?, -]*", header)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1, max_size=6).map(lambda name: "x" + name), JSON, max_size=4))
def test_unknown_fields_change_nothing_in_the_call(extra: dict[str, Any]) -> None:
    assert read(**extra) == read()
    message = extra | USER
    assert read(messages=[message]) == read()


async def test_many_unknown_fields_are_cut(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        extra = {f"unknown{i:03}\r\né": i for i in range(500)}
        answer = await stand.http.post(CHAT, json=BASE[CHAT] | extra)
        names = answer.headers[HEADER].split(", ")
        assert (answer.status_code, len(names), names[-1]) == (200, NAMES_MAX + 1, "...")
        assert names[0] == "unknown000???"


async def test_an_effort_that_the_template_cannot_say_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {
        CHAT: ({"reasoning_effort": "high"}, "reasoning_effort"),
        RESPONSES: ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        MESSAGES: ({"max_tokens": 5000, "thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        OLLAMA: ({"think": True}, "think"),
    }
    async with serve_node(tmp_path) as stand:

        async def refuses(
            model: Any, messages: Any, tools: Any, effort: Any = None, template: str = ""
        ) -> str:
            if effort is not None:
                raise InvalidRequest("cannot say how much to think", field="reasoning_effort")
            return "prompt"

        monkeypatch.setattr(stand.node.texts._pool, "apply_template", refuses)
        for path, (fields, name) in asked.items():
            answer = await stand.http.post(path, json=BASE[path] | fields)
            assert (answer.status_code, answer.headers[HEADER]) == (200, name)
            assert stand.pipelines.calls[-1].prompt.effort is None


def test_the_documented_table_is_that_of_the_code() -> None:
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root / "docs"))
    from draw_fields import page_with_table

    assert (root / "docs" / "http.md").read_text() == page_with_table(), (
        "a field has changed; run: python docs/draw_fields.py"
    )
