"""POST /infill of llama.cpp's server: what stands between two texts, as editors ask for it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swarmllm.api.http.context import current_node
from swarmllm.api.llamacpp.completion import NativeCompletion
from swarmllm.api.openai.inputs import Inputs
from swarmllm.api.openai.schema import Body, Text
from swarmllm.api.output.presets import preset_of
from swarmllm.errors import InvalidRequest
from swarmllm.node.infill import FileText

FILES_MAX = 256


class ExtraFile(Body, frozen=True, kw_only=True):
    """Another file of the same repository, or a part of it."""

    text: Text
    filename: Annotated[str, Meta(max_length=4096)] | None = None
    time: float | None = None
    """When an editor has seen it; changes nothing."""


class InfillRequest(NativeCompletion, frozen=True, kw_only=True):
    """POST /infill: the fields of /completion, and the texts. None everywhere means what absence means."""

    prompt: Inputs = ""
    """A text behind the prefix, from which the answer goes on."""
    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[ExtraFile], Meta(max_length=FILES_MAX)] | None = None


async def filled_in(body: InfillRequest) -> InfillRequest:
    """With the whole prompt as token ids in its place. Raises InvalidRequest, also where the model fills
    nothing in."""
    if not isinstance(body.prompt, str):
        raise InvalidRequest("has to be a text.", field="prompt")
    limit = body.max_tokens if body.n_predict is None else body.n_predict
    if limit is None:
        limit = (await preset_of(body.model)).max_tokens
    tokens = await current_node().texts.infill(
        body.model,
        body.input_prefix,
        body.input_suffix,
        body.prompt,
        [FileText(each.filename or "tmp", each.text) for each in body.input_extra or ()],
        n_answer=None if limit is None or limit < 0 else limit,
    )
    return msgspec.structs.replace(body, prompt=tokens)
