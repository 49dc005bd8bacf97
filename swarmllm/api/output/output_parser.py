"""Parses a model's output into reasoning, text and tool calls.

Every dialect words the same three.

Only the beginning of an answer can be reasoning; a tag further down is part of the text. Chat templates of
some models open the tag themselves, then the answer begins inside (see `opened_reasoning`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarmllm.api.http.context import current_config, current_node, session_of
from swarmllm.api.http.fields import note_ignored
from swarmllm.api.openai.chat_request import ChatCall
from swarmllm.api.openai.forced_call import forced
from swarmllm.api.openai.pictures import seen_by
from swarmllm.api.output.presets import call_with_preset
from swarmllm.api.output.response import GenerationRequest
from swarmllm.api.output.tool_calls import FoundCall, ToolCallParser
from swarmllm.pipeline.origin.generation import Prompt
from swarmllm_proto.reasoning_markers import REASONING_TAGS


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of reasoning."""

    text: str


def opened_reasoning(prompt: str) -> str:
    """The tag that a rendered prompt leaves open, "" where there is none."""
    end = prompt[-32:].rstrip()
    return next((tag for tag in REASONING_TAGS if end.endswith(tag)), "")


class ReasoningParser:
    """`feed` text, then `finish`; both return what is certain by now, in order."""

    def __init__(self, opened: str = "") -> None:
        """`opened`: the tag that the prompt has left open."""
        self._closing = REASONING_TAGS[opened] if opened else ""
        self._held = ""
        self._is_fresh = bool(opened)
        """No word of the reasoning, or of what follows it, has come yet."""
        self.is_over = False
        """What comes from here on is no reasoning, and is given back as it is."""

    def feed(self, text: str) -> list[str | ReasoningText]:
        if self.is_over and not self._is_fresh:
            return [text] if text else []
        self._held += text
        if not self.is_over and not self._closing and not self._open():
            return []
        found: list[str | ReasoningText] = []
        if self._closing:
            before, tag, after = self._held.partition(self._closing)
            if not tag:
                shown = self._held[: len(self._held) - _possible_end(self._held, self._closing)]
                return self._think(shown, len(shown))
            found += self._think(before.rstrip(), len(before))
            self._held, self._closing = after, ""
            self.is_over = self._is_fresh = True
        return found + self._say()

    def finish(self) -> list[str | ReasoningText]:
        held, self._held = self._held, ""
        if self._closing:
            return [ReasoningText(held)] if held else []
        return [held] if held and not (self.is_over and self._is_fresh) else []

    def _open(self) -> bool:
        """False while it is open whether the answer begins with reasoning."""
        start = self._held.lstrip()
        tag = next((tag for tag in REASONING_TAGS if start.startswith(tag)), "")
        if tag:
            self._closing, self._held, self._is_fresh = REASONING_TAGS[tag], start[len(tag) :], True
        elif not any(tag.startswith(start) for tag in REASONING_TAGS):
            self.is_over = True
        return bool(tag) or self.is_over

    def _think(self, text: str, n_taken: int) -> list[str | ReasoningText]:
        self._held = self._held[n_taken:]
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return [ReasoningText(text)] if text else []

    def _say(self) -> list[str | ReasoningText]:
        text, self._held = self._held, ""
        if self._is_fresh:
            # The line between reasoning and answer belongs to neither.
            text = text.lstrip()
            self._is_fresh = not text
        return [text] if text else []


def _possible_end(text: str, closing: str) -> int:
    """Length of the longest end of `text` that is white space and a beginning of `closing`."""
    for length in range(min(len(closing) - 1, len(text)), 0, -1):
        if closing.startswith(text[-length:]):
            return len(text) - len(text[:-length].rstrip())
    return len(text) - len(text.rstrip())


Item = str | ReasoningText | FoundCall


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole answer, parsed."""

    text: str
    reasoning: str
    calls: list[FoundCall]


class OutputParser:
    """`feed` text, then `finish`; both return what is certain by now, in order. `parser` is there when tools
    were offered."""

    def __init__(self, parser: ToolCallParser | None = None, opened_reasoning: str = "") -> None:
        self._reasoning = ReasoningParser(opened_reasoning)
        self._parser = parser

    @property
    def n_calls(self) -> int:
        return self._parser.n_calls if self._parser else 0

    def feed(self, text: str) -> list[Item]:
        return self._parsed(self._reasoning.feed(text))

    def finish(self) -> list[Item]:
        rest = self._parsed(self._reasoning.finish())
        return [*rest, *self._parser.finish()] if self._parser else rest

    def whole(self, text: str) -> ParsedOutput:
        items = [*self.feed(text), *self.finish()]
        return ParsedOutput(
            "".join(item for item in items if isinstance(item, str)),
            "".join(item.text for item in items if isinstance(item, ReasoningText)),
            [item for item in items if isinstance(item, FoundCall)],
        )

    def _parsed(self, items: list[str | ReasoningText]) -> list[Item]:
        if self._parser is None:
            return list(items)
        parsed: list[Item] = []
        for item in items:
            parsed += self._parser.feed(item) if isinstance(item, str) else [item]
        return parsed


async def with_reasoning_effort(call: ChatCall, effort_field: str) -> ChatCall:
    """The call without an effort that the model's template cannot say: told as ignored under `effort_field`,
    or with `api.strict` left to be refused."""
    if call.effort is None or current_config().api.strict:
        return call
    texts = current_node().texts
    # A template that refuses ends with nothing.
    can_say = await texts.prompt_ending(call.model, call.effort, call.template)
    if can_say or not await texts.prompt_ending(call.model, None, call.template):
        return call
    note_ignored(effort_field)
    return replace(call, effort=None)


async def prepare(
    call: ChatCall, *, field: str = "messages", effort_field: str = "reasoning_effort"
) -> tuple[GenerationRequest, list[OutputParser]]:
    """What to ask the node, and who listens to each of its answers. Raises what finding the model raises, and
    InvalidRequest for tools whose call cannot be forced and for pictures that the model cannot see. `field`:
    what the API calls the conversation, `effort_field` how much to think."""
    pictures = await seen_by(call.model, call.pictures, field)
    call = await with_reasoning_effort(await call_with_preset(call), effort_field)
    texts, sampling = current_node().texts, call.sampling
    names = [str(tool["function"]["name"]) for tool in call.tools or ()]  # type: ignore[index]
    if call.must_call and call.tools:
        sample = await texts.call_sample(call.model, call.template)
        sampling = forced(sampling, call.tools, call.max_tool_calls, sample)
        # The first thing that is said is a call.
        opened = ""
    else:
        opened = opened_reasoning(await texts.prompt_ending(call.model, call.effort, call.template))
    session = session_of(call.session_id, call.prompt_cache_key)
    prompt = Prompt(
        messages=call.messages,
        tools=call.tools,
        effort=call.effort,
        template=call.template,
        begun=call.begun,
        pictures=pictures,
        session=session,
        field=field,
    )
    parsers = (ToolCallParser(call.max_tool_calls, names) if call.tools else None for _ in range(call.n))
    request = GenerationRequest(call.model, prompt, sampling, call.max_tokens)
    return request, [OutputParser(parser, opened) for parser in parsers]
