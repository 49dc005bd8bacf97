"""Turns prompts into tokens, with the rows of pictures and sounds among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import trio
from msgspec.structs import replace

from swarmllm.errors import ContextFull, InvalidRequest
from swarmllm.models.entry import CatalogueEntry
from swarmllm.pictures import Medium
from swarmllm.pipeline.origin.generation import Prompt, token_ids
from swarmllm.pipeline.origin.pictures import (
    FIRST_ROW_ID,
    PictureMark,
    PictureRows,
    rows_digest,
    with_row_ids,
)
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.vision.encoders import Encoders, ProjectorEncoders
from swarmllm.pipeline.vision.happy_eyeballs import EncodersGone
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.ipc import Sampling, TextPlace
from swarmllm_proto.picture_runs import PICTURE_RUNS_MAX, PictureRun
from swarmllm_proto.reasoning_markers import REASONING_TAGS
from swarmllm_proto.tensors import Tensor

LONGEST_TAG_SPACE: Final = 32
"""Characters at the end of a prompt among which a tag stands that opens a thought."""
COUNTED_MAX: Final = 2**24
"""Tokens with pictures among them, beyond which nobody counts on."""


@dataclass(frozen=True, slots=True)
class Prompts:
    compute: Compute
    encoders: Encoders
    settings: PipelineSettings

    async def read(
        self, prompt: Prompt, entry: CatalogueEntry, sampling: Sampling
    ) -> tuple[Tensor, PictureRows | None]:
        """i32 [n], and the rows that take the place of some. Raises InvalidRequest where pictures cannot be
        combined with what else is asked for, and as `read_pictures` does."""
        if prompt.tokens is not None:
            return token_ids(entry, prompt.tokens, prompt.field), None
        if not prompt.pictures:
            return await self._tokens(prompt, entry), None
        if prompt.top_logprobs is not None:
            raise InvalidRequest("a prompt with pictures has no log-probabilities", field=prompt.field)
        if sampling.exact or self.settings.exact:
            raise InvalidRequest("a prompt with pictures cannot be exact", field="exact")
        return await read_pictures(self.compute, self.encoders, entry, prompt, self.room_for(entry))

    async def count(self, prompt: Prompt, entry: CatalogueEntry) -> int:
        """How many tokens of context a prompt takes. Raises as `read` does."""
        if prompt.pictures:
            return len((await read_pictures(self.compute, self.encoders, entry, prompt, COUNTED_MAX))[0])
        return len(await self._tokens(prompt, entry))

    def room_for(self, entry: CatalogueEntry) -> int:
        """Cells of the model's context here."""
        return self.compute.context_sizes().get(entry.model_id, self.settings.n_ctx)

    async def _tokens(self, prompt: Prompt, entry: CatalogueEntry) -> Tensor:
        if prompt.begun:
            text = await rendered(self.compute, ModelFile.of(entry), prompt)
            return await self.compute.tokenize(ModelFile.of(entry), text=text, place="first")
        return await self.compute.tokenize(
            ModelFile.of(entry),
            text=prompt.text,
            messages=prompt.messages,
            tools=prompt.tools,
            effort=prompt.effort,
            template=prompt.template,
        )


async def rendered(compute: Compute, model: ModelFile, prompt: Prompt) -> str:
    """The text of a prompt's messages, with what the assistant has begun to say. Raises InvalidRequest where
    the template refuses, or leaves open a thought that nobody has begun."""
    text = await compute.apply_template(
        model, prompt.messages or [], prompt.tools, prompt.effort, prompt.template
    )
    if prompt.begun and text[-LONGEST_TAG_SPACE:].rstrip().endswith(tuple(REASONING_TAGS)):
        raise InvalidRequest(
            "this model thinks before it answers, so its answer cannot be begun for it; ask it not to think,"
            " or end with another message than the assistant's.",
            field=prompt.field,
        )
    return text + prompt.begun


async def read_pictures(
    compute: Compute, encoders: Encoders, entry: CatalogueEntry, prompt: Prompt, n_ctx: int
) -> tuple[Tensor, PictureRows]:
    """Tokenise the text of a prompt between its pictures and sounds, and encode these, one after the other:
    i32 [n] with ids of rows in it, and the rows. Raises InvalidRequest where the model does not take them or
    one cannot be decoded, VisionEncoderUnavailable where nobody can encode them now, ContextFull as soon as
    they are too many, and what workers raise."""
    model, text = ModelFile.of(entry), prompt.text
    if text is None:
        text = await rendered(compute, model, prompt)
    parts = prompt.pictures.split(text)
    if parts and not isinstance(parts[0], str):
        parts = ("", *parts)  # What the model wants at the beginning of a text stands before a picture, too.
    pieces = [part if isinstance(part, str) else await encoders.scaled(part, prompt.field) for part in parts]
    pictures = [piece for piece in pieces if not isinstance(piece, str)]
    gone: EncodersGone | None = None
    for encoder in await encoders.by_projector(entry, pictures, prompt.field):
        try:
            return await _read(compute, encoder, entry, prompt, pieces, n_ctx)
        except EncodersGone as error:
            gone = gone or error
    assert gone is not None
    raise encoders.unavailable(entry, gone, prompt.field)


async def _read(
    compute: Compute,
    encoder: ProjectorEncoders,
    entry: CatalogueEntry,
    prompt: Prompt,
    parts: Sequence[str | Medium],
    n_ctx: int,
) -> tuple[Tensor, PictureRows]:
    """With one projector. Raises EncodersGone, and as `read_pictures` does."""
    model = ModelFile.of(entry)
    place: TextPlace = "first" if prompt.text is None else "whole"
    runs: list[Tensor] = []
    rows: list[Tensor] = []
    ends: set[int] = set()
    marks: list[PictureMark] = []
    laid_out: list[PictureRun] = []
    n_tokens = 0
    for part in parts:
        if isinstance(part, str):
            runs.append(await compute.tokenize(model, text=part, place=place))
            place = "later"
        else:
            encoded = await encoder.encode(part, prompt.field)
            # Of its rows, too: another encoder may make other bits of the same picture.
            digest = await trio.to_thread.run_sync(
                rows_digest, encoder.projector, part.digest, encoded.rows, encoded.runs
            )
            marks.append(PictureMark(n_tokens, digest))
            runs.append(with_row_ids(encoded.tokens, digest))
            rows.append(encoded.rows)
            ends |= {n_tokens + end for end in encoded.ends}
            laid_out += [replace(run, first_row=n_tokens + run.first_row) for run in encoded.runs]
        n_tokens += len(runs[-1])
        if n_tokens >= n_ctx:
            raise ContextFull(
                f"the prompt has {n_tokens} tokens and more; {entry.name} has room for {n_ctx} here",
                field=prompt.field,
                n_prompt_tokens=n_tokens,
                n_ctx=n_ctx,
            )
    if len(laid_out) > PICTURE_RUNS_MAX:
        raise InvalidRequest(
            f"the pictures have {len(laid_out)} runs of rows, more than {PICTURE_RUNS_MAX}",
            field=prompt.field,
        )
    tokens = np.concatenate(runs)
    positions = np.flatnonzero(tokens >= FIRST_ROW_ID).astype(np.int32)
    found = PictureRows(
        positions,
        np.concatenate(rows),
        tuple(sorted(ends)),
        tuple(marks),
        tuple(encoder.looked),
        tuple(laid_out),
    )
    return tokens, found
