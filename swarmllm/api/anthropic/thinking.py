"""How much a model thinks first, in Anthropic's words.

Their budget is a target and not a limit, and theirs alone: chat templates know a level, or whether to think
at all. So a budget becomes the level that other tools (LiteLLM) take for it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from swarmllm.api.openai.schema import Body, JsonSchemaFormat, NamedSchema, ResponseFormat
from swarmllm.errors import InvalidRequest
from swarmllm_proto.ipc import Effort

MEDIUM_FROM_TOKENS = 2048
HIGH_FROM_TOKENS = 4096
Display = Literal["summarized", "omitted"]


class Enabled(Body, frozen=True, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=1024, le=2**24)]
    display: Display | None = None


class Adaptive(Body, frozen=True, tag_field="type", tag="adaptive"):
    """As the model itself sees fit."""

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


def shows_thoughts(thinking: Thinking | None) -> bool:
    return not (isinstance(thinking, Enabled | Adaptive) and thinking.display == "omitted")
