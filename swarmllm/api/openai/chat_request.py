"""Parses a chat request into prompt and sampling settings, or refuses it with the name of the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from swarmllm.api.openai import schema
from swarmllm.api.openai.forced_call import SCHEMA_MAX
from swarmllm.api.openai.pictures import RequestPictures
from swarmllm.api.openai.schema import sampling_of
from swarmllm.errors import InvalidRequest
from swarmllm.models.presets import SamplingDefaults
from swarmllm.pictures import Marker, joined
from swarmllm_proto.ipc import Effort, Sampling

Json = dict[str, object]
PRESET_NAMES = tuple(field.name for field in msgspec.structs.fields(SamplingDefaults))
LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
"""Names for how many tokens an answer has at most."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "store": (False,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "functions": ([],),
    "function_call": ("none",),
}
"""Documented by OpenAI, not offered here: the values (besides null) that ask for nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChatCall:
    """One validated chat completion."""

    model: str
    messages: list[Json]
    """As chat templates expect them: string contents, arguments of tool calls as objects."""
    pictures: RequestPictures = dataclasses.field(compare=False)
    """Those whose markers stand in the contents."""
    tools: list[Json] | None
    """None also where `tool_choice` is none."""
    sampling: Sampling
    max_tokens: int | None
    """None: until the context is full."""
    stream: bool
    include_usage: bool
    max_tool_calls: int | None
    n: int
    effort: Effort | None
    """How much the model should think first."""
    must_call: bool
    """The answer has to be a call of one of the tools."""
    session_id: str | None
    prompt_cache_key: str | None
    said: frozenset[str]
    """The sampling fields that the request has, of those that presets may have."""
    begun: str = ""
    """What the answer goes on from: the last message, where that is the assistant's; it is not in
    `messages`."""
    template: str = ""
    """A chat template in place of the model's, where the model's name has one (`output.presets`)."""


def chat_call(body: schema.ChatRequest, pictures: RequestPictures | None = None) -> ChatCall:
    """`pictures`: those whose markers a dialect has put into the messages. Raises InvalidRequest."""
    _refuse_unsupported(body)
    pictures = pictures or RequestPictures()
    choice = body.tool_choice
    max_calls = 1 if body.parallel_tool_calls is False or isinstance(choice, schema.NamedTool) else None
    tools = _offered(body, choice)
    must_call = _is_forced(choice)
    if must_call:
        if not tools:
            raise InvalidRequest("tool_choice forces a call, but there are no tools.", field="tool_choice")
        if body.grammar:
            raise InvalidRequest("grammar and a forced call exclude each other; send one.", field="grammar")
    messages = [_message(message, f"messages[{i}]", pictures) for i, message in enumerate(body.messages)]
    is_begun = _is_begun(body, must_call=must_call)
    return ChatCall(
        model=body.model,
        messages=messages[:-1] if is_begun else messages,
        begun=str(messages[-1]["content"]) if is_begun else "",
        pictures=pictures,
        tools=tools,
        sampling=sampling_of(
            body,
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
            json_schema=json_schema(_format(body)),
        ),
        max_tokens=limit_of(body.max_completion_tokens or body.max_tokens or body.n_predict),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        max_tool_calls=max_calls,
        effort=_effort(body),
        must_call=must_call,
        n=body.n or 1,
        session_id=body.session_id,
        prompt_cache_key=body.prompt_cache_key,
        said=said_names(body),
    )


def _is_begun(body: schema.ChatRequest, *, must_call: bool) -> bool:
    """Whether the last message is an answer to go on with. Raises InvalidRequest where that is asked for and
    cannot be."""
    last = body.messages[-1]
    for i, message in enumerate(body.messages[:-1]):
        if isinstance(message, schema.AssistantMessage) and message.prefix:
            field = f"messages[{i}].prefix"
            raise InvalidRequest("only the last message can be gone on with.", field=field)
    is_asked = bool(body.continue_final_message or getattr(last, "prefix", None))
    if is_asked and body.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt begins a new answer, continue_final_message goes on with one; send one.",
            field="add_generation_prompt",
        )
    is_possible = (
        isinstance(last, schema.AssistantMessage)
        and len(body.messages) > 1
        and not (last.tool_calls or last.reasoning_content or last.reasoning or must_call)
    )
    if is_asked and not is_possible:
        raise InvalidRequest(
            "only a message of the assistant can be gone on with, one without thoughts and calls, and where"
            " no call is forced.",
            field="continue_final_message",
        )
    is_begun = is_possible and not body.add_generation_prompt
    if not is_begun and body.add_generation_prompt is False:
        raise InvalidRequest(
            "can be false only where the last message is the assistant's.", field="add_generation_prompt"
        )
    return is_begun and (is_asked or body.continue_final_message is not False)


def _format(body: schema.ChatRequest) -> schema.ResponseFormat | None:
    """Raises InvalidRequest where it is asked for twice."""
    if not body.json_schema:
        return body.response_format
    for name in ("response_format", "grammar"):
        said = getattr(body, name)
        if said and not isinstance(said, schema.TextFormat):
            raise InvalidRequest(f"json_schema and {name} exclude each other; send one.", field="json_schema")
    return schema.JsonSchemaFormat(json_schema=schema.NamedSchema(schema=body.json_schema))


def limit_of(max_tokens: int | None) -> int | None:
    """None: until the context is full, which is also what -1 says."""
    return None if max_tokens == -1 else max_tokens


def said_names(body: schema.SamplingFields) -> frozenset[str]:
    """The sampling fields that the request has, of those that presets may have."""
    said = {name for name in PRESET_NAMES if getattr(body, name) is not None}
    return frozenset(said | ({"repeat_penalty"} if body.repetition_penalty is not None else set()))


def _effort(body: schema.ChatRequest) -> Effort | None:
    """How much to think, whatever the client calls that. Raises InvalidRequest where it says two things."""
    settings, arguments = body.reasoning, body.chat_template_kwargs
    asked: dict[str, Effort | None] = {"reasoning_effort": body.reasoning_effort}
    if settings is not None:
        asked["reasoning.effort"] = settings.effort
        if settings.enabled is not None and not (settings.enabled and settings.effort):
            asked["reasoning.enabled"] = "medium" if settings.enabled else "none"
    if arguments is not None:
        asked["chat_template_kwargs.reasoning_effort"] = arguments.reasoning_effort
        for name, thinks in (
            ("enable_thinking", arguments.enable_thinking),
            ("thinking", arguments.thinking),
        ):
            if thinks is not None:
                asked[f"chat_template_kwargs.{name}"] = "medium" if thinks else "none"
    said = {name: effort for name, effort in asked.items() if effort is not None}
    first = next(iter(said.values()), None)
    other = next((name for name, effort in said.items() if (effort == "none") != (first == "none")), None)
    if other is not None:
        raise InvalidRequest(f"{other} and {next(iter(said))} disagree; send one.", field=other)
    return first


def _is_forced(choice: schema.ToolChoice | None) -> bool:
    if isinstance(choice, schema.AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, schema.NamedTool)


def _offered(body: schema.ChatRequest, choice: schema.ToolChoice | None) -> list[Json] | None:
    """The tools that may be called. Raises InvalidRequest for a choice of one that is not there."""
    if choice == "none" or not body.tools:
        return None
    by_name = {tool.function.name: _tool(tool) for tool in body.tools}
    if isinstance(choice, schema.NamedTool):
        wanted: list[object] = [choice.function.name]
    elif isinstance(choice, schema.AllowedToolsChoice):
        wanted = [_allowed_name(tool) for tool in choice.allowed_tools.tools]
    else:
        return list(by_name.values())
    unknown = next((name for name in wanted if name not in by_name), None)
    if unknown is not None:
        raise InvalidRequest(f"there is no tool {str(unknown)[:100]!r}.", field="tool_choice")
    return [by_name[str(name)] for name in wanted]


def _allowed_name(tool: Json) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else tool.get("name")


def refuse_unless_neutral(
    body: schema.Body, neutral: Mapping[str, tuple[object, ...]], path: str = ""
) -> None:
    """Raises InvalidRequest naming the first field of `neutral` that is neither null nor one of its
    values. `path`: what stands before the name."""
    for field, values in neutral.items():
        value = getattr(body, field)
        if value is not None and value not in values:
            allowed = (
                f"; leave it out or set it to {msgspec.json.encode(values[0]).decode()}" if values else ""
            )
            raise InvalidRequest(f"{path}{field} is not supported here{allowed}.", field=path + field)


def _refuse_unsupported(body: schema.ChatRequest) -> None:
    refuse_unless_neutral(body, NEUTRAL)
    if isinstance(body.tool_choice, schema.CustomToolChoice):
        raise InvalidRequest("custom tools are not supported here.", field="tool_choice.type")
    if body.grammar and not isinstance(body.response_format, schema.TextFormat | None):
        raise InvalidRequest("grammar and response_format exclude each other; send one.", field="grammar")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", field="top_logprobs")
    limits = {field: getattr(body, field) for field in LIMITS if getattr(body, field) is not None}
    for field, limit in limits.items():
        if limit == 0:
            raise InvalidRequest("has to be 1 or more, or -1 for no limit.", field=field)
        if limit != next(iter(limits.values())):
            first = next(iter(limits))
            raise InvalidRequest(f"{first} and {field} disagree; send one.", field=first)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", field="stream_options")


def json_schema(wanted: schema.ResponseFormat | None) -> str:
    """What the output has to follow, as JSON text; empty where it may be any text."""
    if isinstance(wanted, schema.JsonObjectFormat):
        asked = wanted.schema or {"type": "object"}
    elif isinstance(wanted, schema.JsonSchemaFormat):
        asked = wanted.json_schema.schema or {}
    else:
        return ""
    text = msgspec.json.encode(asked).decode()
    if len(text) > SCHEMA_MAX:
        raise InvalidRequest(
            f"the schema is longer than {SCHEMA_MAX} characters.", field="response_format.json_schema.schema"
        )
    return text


def _message(message: schema.Message, path: str, pictures: RequestPictures) -> Json:
    if isinstance(message, schema.DeveloperMessage):
        # OpenAI's newer name for system; chat templates know only the old one.
        return {"role": "system", "content": _text(message.content, path)}
    if isinstance(message, schema.ToolMessage):
        content = _text(message.content, path, pictures)
        return {"role": "tool", "content": content, "tool_call_id": message.tool_call_id}
    if isinstance(message, schema.AssistantMessage):
        return _assistant(message, path)
    if isinstance(message, schema.UserMessage):
        return {"role": "user", "content": _text(message.content, path, pictures)}
    return {"role": "system", "content": _text(message.content, path)}


def _assistant(message: schema.AssistantMessage, path: str) -> Json:
    for field in ("audio", "function_call"):
        if getattr(message, field) is not None:
            raise InvalidRequest(f"{path}.{field} is not supported here.", field=f"{path}.{field}")
    said: Json = {
        "role": "assistant",
        "content": (message.refusal or "") if message.content is None else _text(message.content, path),
    }
    if message.content is None and message.refusal is None and not message.tool_calls:
        raise InvalidRequest(f"{path} has neither content nor tool_calls.", field=f"{path}.content")
    if reasoning := message.reasoning_content or message.reasoning:
        # Templates that show earlier reasoning look for it under this name.
        said["reasoning_content"] = reasoning
    if message.tool_calls:
        said["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return said


def _tool_call(call: schema.ToolCall) -> Json:
    """Templates print arguments as JSON themselves: text that is JSON is handed to them as the object it
    means.
    """
    arguments: object = call.function.arguments
    with suppress(msgspec.DecodeError, RecursionError):
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _tool(tool: schema.Tool) -> Json:
    function: Json = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    if tool.function.parameters is not None:
        function["parameters"] = tool.function.parameters
    return {"type": "function", "function": function}


def _text(
    content: str | Sequence[schema.Part | schema.RefusalPart],
    path: str,
    pictures: RequestPictures | None = None,
) -> str:
    """`pictures`: where there may be some."""
    if isinstance(content, str):
        return content
    texts: list[str | Marker] = []
    for i, part in enumerate(content):
        field = f"{path}.content[{i}]"
        if isinstance(part, schema.TextPart):
            texts.append(part.text)
        elif isinstance(part, schema.RefusalPart):
            texts.append(part.refusal)
        elif isinstance(part, schema.ImagePart) and pictures is not None:
            image = part.image_url
            is_low = image.detail == "low"
            texts.append(pictures.add_url(image.url, f"{field}.image_url.url", is_low=is_low))
        elif isinstance(part, schema.AudioPart) and pictures is not None:
            texts.append(pictures.add_base64(part.input_audio.data, f"{field}.input_audio.data", "sound"))
        else:
            kinds = "text parts" if pictures is None else "text, pictures and sounds"
            raise InvalidRequest(f"{field}.type: only {kinds} are supported here.", field=f"{field}.type")
    return joined(texts)
