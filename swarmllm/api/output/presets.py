"""Fills in what a request leaves out from the preset of the model's name.

The request's own fields take precedence.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import msgspec

from swarmllm.api.http.context import current_node
from swarmllm.api.openai.chat_request import ChatCall
from swarmllm.api.openai.schema import SamplingFields
from swarmllm.models.presets import NO_PRESET, Preset

S = TypeVar("S", bound=SamplingFields)


async def preset_of(model: str) -> Preset:
    return await current_node().models.presets.get(model)


def sampling_with(preset: Preset, body: S) -> S:
    said = msgspec.to_builtins(preset.sampling)
    missing = {name: value for name, value in said.items() if getattr(body, name) is None}
    if body.repetition_penalty is not None:
        missing.pop("repeat_penalty", None)
    return msgspec.structs.replace(body, **missing) if missing else body


async def call_with_preset(call: ChatCall) -> ChatCall:
    """Also with the chat template, how much to think, and with the system message, where the conversation has
    none."""
    preset = await preset_of(call.model)
    if preset == NO_PRESET:
        return call
    said = msgspec.to_builtins(preset.sampling)
    missing = {name: value for name, value in said.items() if name not in call.said}
    if "stop" in missing:
        missing["stop"] = tuple(missing["stop"])
    messages = call.messages
    if preset.system and not any(message.get("role") == "system" for message in messages):
        messages = [{"role": "system", "content": preset.system}, *messages]
    return dataclasses.replace(
        call,
        messages=messages,
        sampling=msgspec.structs.replace(call.sampling, **missing),
        max_tokens=preset.max_tokens if call.max_tokens is None else call.max_tokens,
        template=preset.template,
        effort=preset.reasoning_effort if call.effort is None else call.effort,
    )
