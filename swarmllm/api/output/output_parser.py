"""What a model's output consists of: thoughts, text, tool calls. Every dialect words the same three."""

from __future__ import annotations

from dataclasses import dataclass

from swarmllm.api.http.context import current_node
from swarmllm.api.http.conversation_id import session_of
from swarmllm.api.openai.chat_request import ChatCall
from swarmllm.api.openai.forced_call import forced
from swarmllm.api.output.presets import call_with_preset
from swarmllm.api.output.reasoning import ReasoningParser, Thought, opened_thought
from swarmllm.api.output.response import Ask
from swarmllm.api.output.tool_calls import FoundCall, ToolCallParser
from swarmllm.pipeline.origin.prompt import Prompt

Item = str | Thought | FoundCall


@dataclass(frozen=True, slots=True)
class Heard:
    """A whole answer."""

    text: str
    thought: str
    calls: list[FoundCall]


class OutputParser:
    """`feed` text, then `finish`; both return what is certain by now, in order. `parser` is there when tools
    were offered."""

    def __init__(self, parser: ToolCallParser | None = None, opened_thought: str = "") -> None:
        self._thoughts = ReasoningParser(opened_thought)
        self._parser = parser

    @property
    def n_calls(self) -> int:
        return self._parser.n_calls if self._parser else 0

    def feed(self, text: str) -> list[Item]:
        return self._parsed(self._thoughts.feed(text))

    def finish(self) -> list[Item]:
        rest = self._parsed(self._thoughts.finish())
        return [*rest, *self._parser.finish()] if self._parser else rest

    def whole(self, text: str) -> Heard:
        items = [*self.feed(text), *self.finish()]
        return Heard(
            "".join(item for item in items if isinstance(item, str)),
            "".join(item.text for item in items if isinstance(item, Thought)),
            [item for item in items if isinstance(item, FoundCall)],
        )

    def _parsed(self, items: list[str | Thought]) -> list[Item]:
        if self._parser is None:
            return list(items)
        parsed: list[Item] = []
        for item in items:
            parsed += self._parser.feed(item) if isinstance(item, str) else [item]
        return parsed


async def prepare(call: ChatCall, *, field: str = "messages") -> tuple[Ask, list[OutputParser]]:
    """What to ask the node, and who listens to each of its answers. Raises what finding the model raises, and
    InvalidRequest for tools whose call cannot be forced. `field`: what the API calls the conversation."""
    call = await call_with_preset(call)
    texts, sampling = current_node().texts, call.sampling
    names = [str(tool["function"]["name"]) for tool in call.tools or ()]  # type: ignore[index]
    if call.must_call and call.tools:
        sample = await texts.call_sample(call.model, call.template)
        sampling = forced(sampling, call.tools, call.max_tool_calls, sample)
        # The first thing that is said is a call.
        opened = ""
    else:
        opened = opened_thought(await texts.prompt_ending(call.model, call.effort, call.template))
    session = session_of(call.session_id, call.prompt_cache_key)
    prompt = Prompt(
        messages=call.messages,
        tools=call.tools,
        effort=call.effort,
        template=call.template,
        session=session,
        field=field,
    )
    parsers = (ToolCallParser(call.max_tool_calls, names) if call.tools else None for _ in range(call.n))
    ask = Ask(call.model, prompt, sampling, call.max_tokens)
    return ask, [OutputParser(parser, opened) for parser in parsers]
