"""Parses the body of POST /v1/responses into the chat call that it stands for.

OpenAI's newer API tells the same conversation in other words: a list of items, of which messages are one
kind, calls of tools and their results others. What runs on OpenAI's own machines (background work, hosted
tools, stored prompts) is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from swarmllm.api.http.fields import note_ignored
from swarmllm.api.openai import schema
from swarmllm.api.openai.chat_request import ChatCall, chat_call, refuse_unless_neutral
from swarmllm.api.openai.pictures import RequestPictures
from swarmllm.api.openai.schema import (
    Body,
    Detail,
    InputAudio,
    Json,
    MaxTokens,
    ModelName,
    Name,
    Seed,
    SessionName,
    Share,
    Temperature,
    Text,
)
from swarmllm.errors import InvalidRequest
from swarmllm.pictures import Marker, joined
from swarmllm_proto.ipc import Effort

T = TypeVar("T")

NEUTRAL: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "background_options": (),
    "truncation": ("disabled",),
    "include": ([], ["reasoning.encrypted_content"]),
    "top_logprobs": (0,),
    "conversation": (),
    "prompt": (),
    "moderation": (),
    "image": (),
    "access_programs": (),
}
"""Documented by OpenAI, not offered here: the values (besides null) that ask for nothing. Encrypted reasoning
is asked for by clients that never look at it; there is none."""


class TextItem(msgspec.Struct, frozen=True):
    """A part of a message: `input_text`, `output_text`, `input_image`, `input_audio` and others, echoed with
    more than is needed."""

    type: Name
    text: Text | None = None
    refusal: Text | None = None
    image_url: Annotated[str, Meta(max_length=64 * 2**20)] | None = None
    detail: Detail | None = None
    input_audio: InputAudio | None = None


class InputItem(msgspec.Struct, frozen=True):
    """One entry of `input`. Which fields it needs depends on its `type`; clients echo what they got, with
    fields that only their version knows."""

    type: Name = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | Annotated[list[TextItem], Meta(max_length=4096)] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: Text | Annotated[list[TextItem], Meta(max_length=4096)] | None = None


class ToolEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `tools`. Which fields it needs depends on its `type`; only functions are offered to the
    model. Others (`custom`, `local_shell`, `web_search` ...) are permissions that it never uses, told as
    ignored."""

    type: Name
    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")] | None = None
    parameters: Json | None = None
    description: Text | None = None
    strict: bool | None = None


class NamedFunction(Body, frozen=True, tag_field="type", tag="function"):
    """A `tool_choice` that names the tool to call."""

    name: Name


class AllowedTools(Body, frozen=True, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` that leaves some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Json], Meta(min_length=1, max_length=128)]


class SchemaFormat(Body, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
    schema: Json
    description: Text | None = None
    strict: bool | None = None


class TextSettings(Body, frozen=True):
    format: schema.TextFormat | schema.JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    ignored = frozenset({"verbosity"})


class Reasoning(Body, frozen=True):
    ignored = frozenset({"summary"})

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: None = None
    context: Literal["auto"] | None = None


class ResponsesRequest(Body, frozen=True, kw_only=True):
    """POST /v1/responses. None everywhere means what absence means."""

    ignored = frozenset(
        {
            *("metadata", "user", "safety_identifier", "prompt_cache_retention", "prompt_cache_options"),
            *(
                "max_tool_calls",
                "client_metadata",
                "context_management",
                "service_tier",
                "thread",
                "cache_control",
            ),
        }
    )
    refused = frozenset({"top_k", "min_p", "stop", "response_format", "messages", "max_tokens"})

    model: ModelName = ""
    """"": the only one that can answer."""
    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    instructions: Text | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: schema.StreamOptions | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    tools: Annotated[list[ToolEntry], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    prompt_cache_key: SessionName | None = None
    # not OpenAI's
    session_id: SessionName | None = None
    seed: Seed | None = None
    exact: bool | None = None
    # accepted and without effect on the answer
    metadata: Json | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Json | None = None
    max_tool_calls: int | None = None
    """Of tools that OpenAI hosts."""
    context_management: list[Json] | None = None
    service_tier: str | None = None
    # accepted at their neutral value only
    background: bool | None = None
    background_options: str | Json | None = None
    truncation: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    conversation: str | Json | None = None
    prompt: Json | None = None
    moderation: Json | None = None
    image: Json | None = None
    access_programs: Json | None = None


def responses_call(
    body: ResponsesRequest, earlier: list[schema.Message], pictures: RequestPictures
) -> tuple[ChatCall, list[schema.Message]]:
    """The call, and the messages that the input adds to `earlier` ones, with markers of `pictures`. Raises
    InvalidRequest."""
    refuse_unless_neutral(body, NEUTRAL)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", field="stream_options")
    added = messages_of(body.input, pictures)
    if not added:
        raise InvalidRequest("says nothing.", field="input")
    instructions = [schema.SystemMessage(content=body.instructions)] if body.instructions else []
    wanted = body.text.format if body.text else None
    if isinstance(wanted, SchemaFormat):
        named = schema.NamedSchema(name=wanted.name, schema=wanted.schema)
        response_format: schema.ResponseFormat | None = schema.JsonSchemaFormat(json_schema=named)
    else:
        response_format = wanted
    request = schema.ChatRequest(
        add_generation_prompt=True,
        model=body.model,
        messages=[*instructions, *earlier, *added],
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        exact=body.exact,
        tools=_tools(body.tools or []) or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=response_format,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        session_id=body.session_id,
        prompt_cache_key=body.prompt_cache_key,
    )
    return chat_call(request, pictures), added


def _tools(entries: list[ToolEntry]) -> list[schema.Tool]:
    """The functions. Raises InvalidRequest for one without a name."""
    tools: list[schema.Tool] = []
    for i, entry in enumerate(entries):
        if entry.type == "function":
            name = _due(entry.name, f"tools[{i}].name")
            function = schema.FunctionTool(name, entry.description, entry.parameters, entry.strict)
            tools.append(schema.Tool(function=function))
        else:
            note_ignored(f"tools[].{entry.type}")
    return tools


def _tool_choice(choice: str | NamedFunction | AllowedTools | None) -> schema.ToolChoice | None:
    if isinstance(choice, NamedFunction):
        return schema.NamedTool(function=schema.NamedFunction(choice.name))
    if isinstance(choice, AllowedTools):
        return schema.AllowedToolsChoice(schema.AllowedTools(choice.mode, choice.tools))
    return choice  # type: ignore[return-value]


def messages_of(value: str | list[InputItem], pictures: RequestPictures) -> list[schema.Message]:
    """Items as messages; neighbouring calls are one message of the assistant, as they were when it spoke."""
    if isinstance(value, str):
        return [schema.UserMessage(content=value)]
    messages: list[schema.Message] = []
    for i, item in enumerate(value):
        path = f"input[{i}]"
        match item.type:
            case "message":
                messages.append(_message(item, path, pictures))
            case "function_call":
                name, arguments = _due(item.name, f"{path}.name"), _due(item.arguments, f"{path}.arguments")
                call = schema.ToolCall(
                    id=_due(item.call_id, f"{path}.call_id"), function=schema.FunctionCall(name, arguments)
                )
                last = messages[-1] if messages else None
                if isinstance(last, schema.AssistantMessage):
                    calls = [*(last.tool_calls or ()), call]
                    messages[-1] = msgspec.structs.replace(last, tool_calls=calls)
                else:
                    messages.append(schema.AssistantMessage(tool_calls=[call]))
            case "function_call_output":
                text = _text(item.output, f"{path}.output", pictures)
                call_id = _due(item.call_id, f"{path}.call_id")
                messages.append(schema.ToolMessage(content=text, tool_call_id=call_id))
            case "reasoning":
                # Of an earlier turn; templates drop it too.
                pass
            case _:
                raise InvalidRequest(f"{item.type[:80]} is not supported here.", field=f"{path}.type")
    return messages


def _message(item: InputItem, path: str, pictures: RequestPictures) -> schema.Message:
    text = _text(item.content, f"{path}.content", pictures if item.role == "user" else None)
    match _due(item.role, f"{path}.role"):
        case "user":
            return schema.UserMessage(content=text)
        case "assistant":
            return schema.AssistantMessage(content=text)
        case _:
            return schema.SystemMessage(content=text)


def _text(content: str | list[TextItem] | None, path: str, pictures: RequestPictures | None) -> str:
    """`pictures`: where there may be some."""
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"Missing field `{path}`.", field=path)
    texts: list[str | Marker] = []
    for i, part in enumerate(content):
        field = f"{path}[{i}]"
        if part.type in ("input_text", "output_text", "text"):
            texts.append(_due(part.text, f"{field}.text"))
        elif part.type == "refusal":
            texts.append(_due(part.refusal, f"{field}.refusal"))
        elif part.type == "input_image" and pictures is not None:
            url, is_low = _due(part.image_url, f"{field}.image_url"), part.detail == "low"
            texts.append(pictures.add_url(url, f"{field}.image_url", is_low=is_low))
        elif part.type == "input_audio" and pictures is not None:
            audio = _due(part.input_audio, f"{field}.input_audio")
            texts.append(pictures.add_base64(audio.data, f"{field}.input_audio.data", "sound"))
        else:
            raise InvalidRequest(f"{part.type[:80]} is not supported here.", field=f"{field}.type")
    return joined(texts)


def _due(value: T | None, field: str) -> T:
    if value is None:
        raise InvalidRequest(f"Missing field `{field}`.", field=field)
    return value
