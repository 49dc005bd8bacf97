"""POST /v1/messages in Anthropic's words, for the tools that were made for their API.

Messages are lists of blocks there, and a tool's result is a block of the user's message; chat templates
want a message of its own for it, so one message may become several. `thinking` blocks of earlier turns are
dropped, as Anthropic does. Caching marks change nothing in the answer and are accepted.

Their budget is a target and not a limit, and theirs alone: chat templates know a level, or whether to think
at all. So a budget becomes the level that other tools (LiteLLM) take for it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from quart import Blueprint, Response
from werkzeug.exceptions import HTTPException

from swarmllm.api.anthropic.reply import AnthropicReply, error_body
from swarmllm.api.http.context import current_node
from swarmllm.api.http.errors import as_swarmllm_error, failure_response, message_with_field, rename_field
from swarmllm.api.http.fields import note_ignored, read_request
from swarmllm.api.http.json import encode
from swarmllm.api.openai import schema
from swarmllm.api.openai.chat_request import ChatCall, chat_call
from swarmllm.api.openai.pictures import RequestPictures
from swarmllm.api.openai.schema import (
    Body,
    Json,
    JsonSchemaFormat,
    MaxTokens,
    ModelName,
    Name,
    NamedSchema,
    ResponseFormat,
    Share,
    StopText,
    Text,
)
from swarmllm.api.output.output_parser import prepare
from swarmllm.api.output.response import answer
from swarmllm.errors import InvalidRequest
from swarmllm.pictures import Marker, joined
from swarmllm_proto.ipc import Effort

MEDIUM_FROM_TOKENS = 2048
HIGH_FROM_TOKENS = 4096
CALLED_HERE = {
    "reasoning_effort": "thinking",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
}
"""Fields of the chat call that a request becomes, by what they are called in the request."""
Display = Literal["summarized", "omitted"]


class Enabled(Body, frozen=True, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=1024, le=2**24)]
    display: Display | None = None


class Adaptive(Body, frozen=True, tag_field="type", tag="adaptive"):
    """As the model itself sees fit."""

    refused = frozenset({"budget_tokens"})

    display: Display | None = None


class Disabled(Body, frozen=True, tag_field="type", tag="disabled"):
    pass


Thinking = Enabled | Adaptive | Disabled


class OutputFormat(Body, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, object]


class OutputConfig(Body, frozen=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


def effort_of(
    thinking: Thinking | None, output: OutputConfig | None, max_tokens: int | None
) -> Effort | None:
    """None: as the model itself sees fit. Raises InvalidRequest for a budget that leaves no answer."""
    if isinstance(thinking, Disabled):
        return "none"
    if isinstance(thinking, Enabled):
        budget = thinking.budget_tokens
        if max_tokens is not None and budget >= max_tokens:
            raise InvalidRequest("has to be less than max_tokens.", field="thinking.budget_tokens")
    if output is not None and output.effort is not None:
        return "xhigh" if output.effort == "max" else output.effort
    if isinstance(thinking, Enabled):
        return "low" if budget < MEDIUM_FROM_TOKENS else "medium" if budget < HIGH_FROM_TOKENS else "high"
    return None


def format_of(output: OutputConfig | None) -> ResponseFormat | None:
    if output is None or output.format is None:
        return None
    return JsonSchemaFormat(json_schema=NamedSchema(name="output", schema=output.format.schema))


def shows_reasoning(thinking: Thinking | None) -> bool:
    return not (isinstance(thinking, Enabled | Adaptive) and thinking.display == "omitted")


class EchoedBlock(msgspec.Struct, frozen=True):
    """Clients echo what they got, with fields that only their version knows: those are not told."""

    ignored = frozenset({"cache_control"})

    cache_control: Json | None = None


class TextBlock(EchoedBlock, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: Text


class ToolUseBlock(EchoedBlock, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: Name
    name: Name
    input: Json


class ImageBytes(Body, frozen=True, tag_field="type", tag="base64"):
    """The bytes tell what kind of picture it is, whatever `media_type` says."""

    data: Annotated[str, Meta(max_length=64 * 2**20)]
    media_type: Name | None = None


class ImageAddress(Body, frozen=True, tag_field="type", tag="url"):
    """Data URLs are taken, others refused by name."""

    url: Annotated[str, Meta(max_length=64 * 2**20)]


class ImageFile(msgspec.Struct, frozen=True, tag_field="type", tag="file"):
    """Known so that it can be refused by name."""


class ImageBlock(EchoedBlock, frozen=True, kw_only=True, tag_field="type", tag="image"):
    source: ImageBytes | ImageAddress | ImageFile


class DocumentBlock(msgspec.Struct, frozen=True, tag_field="type", tag="document"):
    """Known so that it can be refused by name."""


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Of an earlier turn; dropped."""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Of an earlier turn; dropped."""


ResultBlock = TextBlock | ImageBlock | DocumentBlock


class ToolResultBlock(Body, frozen=True, tag_field="type", tag="tool_result"):
    ignored = frozenset({"cache_control"})

    tool_use_id: Name
    content: Text | Annotated[list[ResultBlock], Meta(max_length=4096)] | None = None
    is_error: bool | None = None
    cache_control: Json | None = None


Block = (
    TextBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)


class MessageParam(Body, frozen=True):
    ignored = frozenset({"id"})

    role: Literal["user", "assistant"]
    content: Text | Annotated[list[Block], Meta(max_length=4096)]


class ToolParam(Body, frozen=True, kw_only=True):
    """One of the `tools`. Those of another `type` than `custom` run at Anthropic or are known to their models
    only; here they are permissions that the model never uses, told as ignored."""

    ignored = frozenset(
        {
            *("cache_control", "strict", "eager_input_streaming", "defer_loading", "allowed_callers"),
            *("input_examples", "max_uses", "allowed_domains", "blocked_domains", "user_location"),
            *("max_content_tokens", "citations", "max_characters", "display_width_px", "display_height_px"),
        }
    )

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
    input_schema: Json | None = None
    description: Text | None = None
    type: Name | None = None


class ToolChoice(Body, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(Body, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    ignored = frozenset(
        {
            *("context_management", "thread", "cache_control", "metadata", "service_tier", "inference_geo"),
            *("speed", "container", "betas", "diagnostics", "client_metadata", "user_profile_id"),
        }
    )
    refused = frozenset({"mcp_servers", "output_format", "stop"})

    model: ModelName = ""
    """"": the only one that can answer."""
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=4096)]
    system: Text | Annotated[list[TextBlock], Meta(max_length=4096)] | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    exact: bool | None = None
    # accepted and without effect on the answer
    metadata: Json | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


anthropic = Blueprint("anthropic", __name__, url_prefix="/v1")


@anthropic.post("/messages")
async def messages() -> Response:
    body = await read_request(MessagesRequest)
    call = _call(
        body,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        exact=body.exact,
    )
    request, (parser,) = await prepare(call, effort_field="thinking")
    reply = AnthropicReply(body.model, parser, shows_reasoning=shows_reasoning(body.thinking))
    return await answer(request, reply, stream=bool(body.stream))


@anthropic.post("/messages/count_tokens")
async def count_tokens() -> Response:
    request, _ = await prepare(_call(await read_request(CountRequest)), effort_field="thinking")
    n_tokens = await current_node().texts.count_tokens(request.model, request.prompt)
    return Response(encode({"input_tokens": n_tokens}), content_type="application/json")


@anthropic.errorhandler(HTTPException)
async def framework_error(error: HTTPException) -> Response:
    status = error.code or 500
    return Response(error_body(error.name, status), status=status, content_type="application/json")


@anthropic.errorhandler(Exception)
async def any_error(error: Exception) -> Response:
    failure = as_swarmllm_error(error)
    rename_field(failure, CALLED_HERE)
    return failure_response(failure, error_body(message_with_field(failure), failure.http_status))


def _call(body: CountRequest, max_tokens: int | None = None, **sampling: object) -> ChatCall:
    """Raises InvalidRequest."""
    choice = body.tool_choice
    pictures = RequestPictures()
    turns: list[schema.Message] = []
    if body.system:
        turns.append(schema.SystemMessage(content=_joined(body.system, "system", pictures)))
    for i, message in enumerate(body.messages):
        turns += _turns(message, f"messages[{i}]", pictures)
    chat_request = schema.ChatRequest(
        model=body.model,
        messages=turns,
        tools=_tools(body.tools or []) or None,
        tool_choice=_tool_choice(choice) if choice is not None else None,
        reasoning_effort=effort_of(body.thinking, body.output_config, max_tokens),
        response_format=format_of(body.output_config),
        max_tokens=max_tokens,
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        **sampling,  # type: ignore[arg-type]
    )
    return chat_call(chat_request, pictures)


def _tools(entries: list[ToolParam]) -> list[schema.Tool]:
    """Those that the client runs. Raises InvalidRequest for one without a schema."""
    tools: list[schema.Tool] = []
    for i, tool in enumerate(entries):
        if tool.type not in (None, "custom"):
            note_ignored(f"tools[].{tool.type}")
            continue
        if tool.input_schema is None:
            raise InvalidRequest(
                f"Missing field `tools[{i}].input_schema`.", field=f"tools[{i}].input_schema"
            )
        function = schema.FunctionTool(tool.name, tool.description, tool.input_schema)
        tools.append(schema.Tool(function=function))
    return tools


def _tool_choice(choice: ToolChoice) -> schema.ToolChoice:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("Missing field `tool_choice.name`.", field="tool_choice.name")
        return schema.NamedTool(function=schema.NamedFunction(choice.name))
    return "required" if choice.type == "any" else choice.type


def _turns(message: MessageParam, path: str, pictures: RequestPictures) -> list[schema.Message]:
    """What one message is to a chat template: results of tools first, as they came first."""
    if isinstance(message.content, str):
        of_role = schema.UserMessage if message.role == "user" else schema.AssistantMessage
        return [of_role(content=message.content)]
    texts: list[str | Marker] = []
    calls: list[schema.ToolCall] = []
    results: list[schema.Message] = []
    for i, block in enumerate(message.content):
        field = f"{path}.content[{i}]"
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolUseBlock() if message.role == "assistant":
                function = schema.FunctionCall(block.name, encode(block.input).decode())
                calls.append(schema.ToolCall(id=block.id, function=function))
            case ToolResultBlock() if message.role == "user":
                content = _joined(block.content or "", f"{field}.content", pictures)
                results.append(schema.ToolMessage(content=content, tool_call_id=block.tool_use_id))
            case ThinkingBlock() | RedactedThinkingBlock() if message.role == "assistant":
                pass
            case ImageBlock() if message.role == "user":
                texts.append(_picture(block, field, pictures))
            case _:
                raise InvalidRequest(f"not supported in a message of the {message.role}.", field=field)
    text = joined(texts)
    if message.role == "assistant":
        return [schema.AssistantMessage(content=text, tool_calls=calls or None)]
    return [*results, *([schema.UserMessage(content=text)] if texts or not results else [])]


def _joined(content: str | list[TextBlock] | list[ResultBlock], path: str, pictures: RequestPictures) -> str:
    if isinstance(content, str):
        return content
    texts: list[str | Marker] = []
    for i, block in enumerate(content):
        field = f"{path}[{i}]"
        if isinstance(block, ImageBlock):
            texts.append(_picture(block, field, pictures))
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        else:
            raise InvalidRequest("only text and pictures are supported here.", field=field)
    return joined(texts)


def _picture(block: ImageBlock, field: str, pictures: RequestPictures) -> Marker:
    match block.source:
        case ImageBytes():
            return pictures.add_base64(block.source.data, f"{field}.source.data")
        case ImageAddress():
            return pictures.add_url(block.source.url, f"{field}.source.url")
        case ImageFile():
            raise InvalidRequest("there are no files here; send the picture itself.", field=f"{field}.source")
