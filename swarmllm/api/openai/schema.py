"""Bodies of requests, as msgspec Structs, and the sampling settings that their fields become.

Fields that a Struct does not have are told in a header and ignored, or refused (`http.fields`): a misspelt
`temprature` that is silently ignored costs an afternoon. Fields that OpenAI documents and this node does not
offer are listed all the same, loosely typed, so that their neutral value is accepted and any other is refused
by name (see `chat_request`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from swarmllm.errors import InvalidRequest
from swarmllm.workerpool.settings import ContextCells, Threads
from swarmllm_proto.identifiers import NOT_PUBLISHED, PublishedName
from swarmllm_proto.ipc import Effort, FlashAttention, GpuLayers, KvType, Sampling

Text = Annotated[str, Meta(max_length=4 * 2**20)]
Json = dict[str, object]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every body: an unknown field is an error, except where a request is read leniently
    (`http.fields`)."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that clients send and that change nothing in an answer."""
    refused: ClassVar[frozenset[str]] = frozenset()
    """Fields that would change an answer and are not offered."""
    refused_unless: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    """Of these, the numbers with which one asks for nothing."""
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that the type has and that are not offered, each with the values that ask for nothing."""
    refuses_unknown: ClassVar[bool] = False
    """Whether that holds for whatever is not known."""
    prefers_encoders: ClassVar[bool] = False
    """Whether a body without a model means the one that encodes whole texts."""


class TextPart(Body, frozen=True, tag_field="type", tag="text"):
    ignored = frozenset({"cache_control"})

    text: Text


Detail = Literal["auto", "low", "high", "original"]
"""How closely to look. low: the picture is scaled down first; all others: as it is."""


class ImageUrl(Body, frozen=True):
    url: Annotated[str, Meta(max_length=64 * 2**20)]
    detail: Detail | None = None


class ImagePart(Body, frozen=True, tag_field="type", tag="image_url"):
    ignored = frozenset({"cache_control"})

    image_url: ImageUrl


class InputAudio(Body, frozen=True):
    data: Annotated[str, Meta(max_length=64 * 2**20)]
    """Base64."""
    format: Literal["wav", "mp3", "flac"]
    """The bytes tell what it is, whatever this says."""


class AudioPart(Body, frozen=True, tag_field="type", tag="input_audio"):
    ignored = frozenset({"cache_control"})

    input_audio: InputAudio


class FilePart(msgspec.Struct, frozen=True, tag_field="type", tag="file"):
    """Known so that it can be refused by name."""


Part = TextPart | ImagePart | AudioPart | FilePart
Content = Text | Annotated[list[Part], Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=256)]


class FunctionCall(Body, frozen=True):
    name: Name
    arguments: Text
    """JSON, as text."""


class ToolCall(Body, frozen=True):
    id: Name
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None
    """Clients that echo a stream's deltas send it along."""


MESSAGE_IGNORED = frozenset({"id", "cache_control", "created_at", "metadata"})


class SystemMessage(Body, frozen=True, tag_field="role", tag="system"):
    ignored = MESSAGE_IGNORED

    content: Content
    name: Name | None = None


class DeveloperMessage(Body, frozen=True, tag_field="role", tag="developer"):
    ignored = MESSAGE_IGNORED

    content: Content
    name: Name | None = None


class UserMessage(Body, frozen=True, tag_field="role", tag="user"):
    ignored = MESSAGE_IGNORED

    content: Content
    name: Name | None = None


class RefusalPart(Body, frozen=True, tag_field="type", tag="refusal"):
    """Of an earlier turn: what the assistant said instead of an answer."""

    refusal: Text


class AssistantMessage(Body, frozen=True, tag_field="role", tag="assistant"):
    ignored = MESSAGE_IGNORED | {"reasoning_details"}
    refused = frozenset({"prefill"})

    content: Text | Annotated[list[Part | RefusalPart], Meta(max_length=4096)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    """OpenRouter's and vLLM's name for `reasoning_content`."""
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    refusal: Text | None = None
    prefix: bool | None = None
    """DeepSeek's and Mistral's word for an answer that has begun: only of the last message."""
    annotations: list[Json] | None = None
    audio: Json | None = None
    function_call: Json | None = None


class ToolMessage(Body, frozen=True, tag_field="role", tag="tool"):
    ignored = MESSAGE_IGNORED

    content: Content
    tool_call_id: Name
    name: Name | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionTool(Body, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Body, frozen=True):
    ignored = frozenset({"cache_control", "eager_input_streaming", "defer_loading"})

    function: FunctionTool
    type: Literal["function"] = "function"


class NamedFunction(Body, frozen=True):
    name: Name


class NamedTool(Body, frozen=True, tag_field="type", tag="function"):
    """A `tool_choice` that names the tool to call."""

    function: NamedFunction


class AllowedTools(Body, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[Json], Meta(min_length=1, max_length=128)]


class AllowedToolsChoice(Body, frozen=True, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` that leaves some of the tools."""

    allowed_tools: AllowedTools


class CustomToolChoice(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    """Known so that it can be refused by name."""


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | CustomToolChoice


class StreamOptions(Body, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**20)]
MaxTokensOrAll = Annotated[int, Meta(ge=-1, le=2**20)]
"""-1: until the context is full."""
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
SessionName = Annotated[str, Meta(max_length=256)]
Choices = Annotated[int, Meta(ge=1, le=32)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
BIAS_MAX = 100
LogitBias = Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]
BiasPairs = Annotated[
    list[tuple[int | Annotated[str, Meta(max_length=256)], float | bool]], Meta(max_length=1024)
]
"""llama.cpp's form: a token, or a text of which all tokens are meant, and its bias; false: never."""
Stop = StopText | Annotated[list[StopText], Meta(max_length=16)]


class TextFormat(Body, frozen=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Body, frozen=True, tag_field="type", tag="json_object"):
    schema: Json | None = None
    """llama.cpp's: what the object has to follow."""


class NamedSchema(Body, frozen=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")] = "schema"
    schema: Json | None = None
    description: Text | None = None
    strict: bool | None = None


class JsonSchemaFormat(Body, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


class TemplateArguments(Body, frozen=True, kw_only=True):
    """vLLM's and llama.cpp's `chat_template_kwargs`: those that say how much to think."""

    refuses_unknown = True

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Effort | None = None


class ReasoningSettings(Body, frozen=True, kw_only=True):
    """OpenRouter's `reasoning`."""

    ignored = frozenset({"exclude", "summary"})
    refused = frozenset({"max_tokens"})

    effort: Effort | None = None
    enabled: bool | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class SamplingFields(Body, frozen=True, kw_only=True):
    """How tokens are chosen; the same words wherever text is generated. None everywhere means what absence
    means."""

    ignored = frozenset(
        {
            *("cache_prompt", "id_slot", "timings_per_token", "return_progress"),
            *("client_metadata", "provider", "usage", "route", "trace"),
            *("request_id", "cache_control", "keep_alive"),
        }
    )
    refused = frozenset(
        {
            *("samplers", "top_n_sigma", "dynatemp_range", "dynatemp_exponent", "lora"),
            *("dry_penalty_last_n", "dry_sequence_breakers", "min_tokens", "min_keep"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
            *("stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors"),
            *("use_beam_search", "length_penalty", "include_stop_str_in_output", "prompt_logprobs"),
            *("chat_template", "documents", "continue_final_message", "images", "models"),
            *("truncate_prompt_tokens", "t_max_predict_ms", "json_schema", "best_of", "penalize_nl"),
            *("return_tokens", "return_token_ids", "plugins", "transforms"),
        }
    )
    refused_unless: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "min_tokens": (0,),
        "min_keep": (0,),
        "length_penalty": (1,),
        "top_n_sigma": (-1, 0),
        "dynatemp_range": (0,),
        "dynatemp_exponent": (1,),
        "t_max_predict_ms": (-1, 0),
        "best_of": (1,),
    }

    temperature: Temperature | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    logit_bias: LogitBias | BiasPairs | None = None
    # llama.cpp's extras
    top_k: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    """0 and -1: all tokens."""
    min_p: Share | None = None
    typical_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    repeat_penalty: Annotated[float, Meta(ge=0, le=10)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=10)] | None = None
    """vLLM's name for `repeat_penalty`."""
    repeat_last_n: Annotated[int, Meta(ge=0, le=1024)] | None = None
    """How many generated tokens the three penalties look back over; 1024 if not told."""
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=1, le=1024)] | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, Meta(ge=0, le=100)] | None = None
    mirostat_eta: Share | None = None
    grammar: Annotated[str, Meta(max_length=65536)] | None = None
    ignore_eos: bool | None = None
    exact: bool | None = None
    """The answer depends on no other request: docs/exactness.md."""


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions. None everywhere means what absence means."""

    ignored = SamplingFields.ignored | {
        *("user", "safety_identifier", "prompt_cache_retention", "prompt_cache_options", "metadata"),
        *("verbosity", "service_tier"),
    }
    refused = SamplingFields.refused - {"json_schema", "continue_final_message"}

    model: ModelName = ""
    """"": the only one that can answer."""
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokensOrAll | None = None
    max_completion_tokens: MaxTokensOrAll | None = None
    n_predict: MaxTokensOrAll | None = None
    """llama.cpp's word for `max_tokens`."""
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    json_schema: Json | None = None
    """llama.cpp's short form of a `response_format` with a schema."""
    n: Choices | None = None
    add_generation_prompt: bool | None = None
    """vLLM's and llama.cpp's: true begins a new answer behind a last message of the assistant."""
    continue_final_message: bool | None = None
    """True goes on with it, as does absence."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    prompt_cache_key: SessionName | None = None
    session_id: SessionName | None = None
    # accepted and without effect on the answer
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Json | None = None
    metadata: Json | None = None
    verbosity: str | None = None
    service_tier: str | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningSettings | None = None
    chat_template_kwargs: TemplateArguments | None = None
    # accepted at their neutral value only
    store: bool | None = None
    modalities: list[str] | None = None
    audio: Json | None = None
    prediction: Json | None = None
    web_search_options: Json | None = None
    moderation: Json | None = None
    functions: list[Json] | None = None
    function_call: str | Json | None = None


LayersText = Annotated[str, Meta(min_length=1, max_length=32)]


class AddModel(Body, frozen=True):
    """POST /api/admin/models."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    name: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    mmproj: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None


class AttachProjector(Body, frozen=True):
    """POST /api/admin/models/{model}/projector."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]


class PinModel(Body, frozen=True):
    """POST /api/admin/models/{model}/pin."""

    pinned: bool = True


class ShareModel(Body, frozen=True):
    """POST /api/admin/shares."""

    model: Annotated[str, Meta(min_length=1, max_length=200)]
    source: PublishedName = NOT_PUBLISHED
    """Where its file is published, for the others."""


class PlanPublished(Body, frozen=True):
    """POST /api/admin/shares/plan; the fields mean what they mean in `StartDownload`."""

    source: Annotated[str, Meta(min_length=1, max_length=2048)]
    hf_token: Annotated[str, Meta(pattern="^[!-~]{1,512}$")] | None = None
    hf_endpoint: Annotated[str, Meta(max_length=512)] | None = None
    name: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    """What to call it; null: the name of the file."""


class SharePublished(PlanPublished, frozen=True):
    """POST /api/admin/shares/published."""


class SearchModels(Body, frozen=True):
    """POST /api/admin/models/search; the hub's fields mean what they mean in `StartDownload`."""

    term: Annotated[str, Meta(min_length=1, max_length=200)]
    hf_token: Annotated[str, Meta(pattern="^[!-~]{1,512}$")] | None = None
    hf_endpoint: Annotated[str, Meta(max_length=512)] | None = None


class MakeInvitation(Body, frozen=True):
    """POST /api/admin/invitations."""

    expires_days: Annotated[float, Meta(gt=0, le=3650)] = 7.0


class AliasModel(Body, frozen=True):
    """POST /api/admin/models/{model}/alias."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]


class LoadModel(Body, frozen=True):
    """POST /api/admin/models/{model}/load. Without `layers` all of them, without anything else as the
    configuration has it."""

    layers: LayersText | None = None
    n_ctx: ContextCells | None = None
    n_threads: Threads | None = None
    n_gpu_layers: GpuLayers | None = None
    kv_type: KvType | None = None
    flash_attention: FlashAttention | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


class UnloadModel(Body, frozen=True):
    """POST /api/admin/models/{model}/unload. Without `layers` all of them."""

    layers: LayersText | None = None
    progress: bool = False
    """Whether to answer with lines of progress, like a load."""


class StartDownload(Body, frozen=True):
    source: Annotated[str, Meta(min_length=1, max_length=2048)]
    layers: Annotated[str, Meta(max_length=32)] | None = None
    name: Name | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    hf_token: Annotated[str, Meta(pattern="^[!-~]{1,512}$")] | None = None
    """Used for this download instead of the node's own; never written down."""
    hf_endpoint: Annotated[str, Meta(max_length=512)] | None = None
    share: bool = False
    """Whether to share the model out when it is here."""
    mmproj: bool = True
    """Whether the projector of the same repository, if there is one, comes, too."""


SAMPLING_NAMES = tuple(field.name for field in msgspec.structs.fields(SamplingFields))


def sampling_of(
    body: SamplingFields, *, logprobs: bool = False, top_logprobs: int = 0, json_schema: str = ""
) -> Sampling:
    """What a worker's sampler takes. Raises InvalidRequest for a bias of what is no token, and for one
    setting said twice."""
    chosen = {name: value for name in SAMPLING_NAMES if (value := getattr(body, name)) is not None}
    other_name = chosen.pop("repetition_penalty", None)
    if other_name is not None and chosen.setdefault("repeat_penalty", other_name) != other_name:
        raise InvalidRequest("repeat_penalty and repetition_penalty disagree.", field="repetition_penalty")
    chosen["top_k"] = max(0, body.top_k) if body.top_k is not None else Sampling().top_k
    chosen["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    chosen["logit_bias"] = _biases(body.logit_bias or [])
    if body.seed is not None:
        # OpenAI's seeds are 64-bit and signed, libllama's 32-bit.
        chosen["seed"] = body.seed % 2**32
    return msgspec.structs.replace(
        Sampling(), **chosen, logprobs=logprobs, top_logprobs=top_logprobs, json_schema=json_schema
    )


NEVER_BIAS = -1000.0
"""Of a token that cannot come: no logits lie so far apart."""


def _biases(said: LogitBias | BiasPairs) -> tuple[tuple[int, float], ...]:
    """Raises InvalidRequest for what is no token id, and for a bias that is too large."""
    pairs: Iterable[tuple[int | str, float | bool]] = said.items() if isinstance(said, dict) else said
    found: list[tuple[int, float]] = []
    for token, bias in pairs:
        if not (str(token).isascii() and str(token).isdigit() and len(str(token)) <= 9):
            raise InvalidRequest(f"logit_bias: {str(token)[:20]!r} is no token id.", field="logit_bias")
        if bias is True or not -BIAS_MAX <= bias <= BIAS_MAX:
            raise InvalidRequest(
                f"logit_bias: a bias lies between -{BIAS_MAX} and {BIAS_MAX}, or is false.",
                field="logit_bias",
            )
        found.append((int(token), NEVER_BIAS if bias is False else bias))
    return tuple(found)
