"""Pictures in a prompt: what they become, and what stands for them where a prompt is a list of tokens.

The encoder turns a picture into rows, as wide as the model's hidden states, and some tokens around them. The
origin embeds prompts anyway, and hidden states enter the first stage like those of any other stage; so a
picture's rows take the place of embedding rows there, and no stage knows that there was a picture.

Where tokens are counted, kept or hashed, each row is an id above every vocabulary that follows from the
picture and the projector. Such an id never reaches a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from blake3 import blake3

from swarmllm.errors import ContextFull, InvalidRequest
from swarmllm.models.entry import CatalogueEntry
from swarmllm.pipeline.origin.generation import Prompt
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.ipc import TextPlace
from swarmllm_proto.tensors import Tensor

FIRST_ROW_ID: Final = 2**30
"""Above every vocabulary; with 30 bits behind it, still an i32."""
_ROW_IDS: Final = b"rows of a picture".ljust(32)


@dataclass(frozen=True, slots=True, eq=False)
class PictureRows:
    """All rows of a prompt that are no tokens."""

    positions: Tensor
    """i32 [n], ascending."""
    rows: Tensor
    """f32 [n, n_embd]."""
    ends: tuple[int, ...]
    """Positions at which a run of rows, or of tokens, ends: chunks end there, too, so that the batches are
    those in which one process would compute the prompt."""
    digest: bytes
    """Of pictures, projector and positions: 32 bytes."""

    def within(self, position: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        """(which of the rows [position, position + n_tokens) are a picture's, counted from `position`; f32
        rows)"""
        first, end = np.searchsorted(self.positions, (position, position + n_tokens))
        return self.positions[first:end] - position, self.rows[first:end]


async def embedded(
    compute: Compute,
    model: ModelFile,
    tokens: Tensor,
    position: int,
    pictures: PictureRows | None,
    *,
    as_ids: bool,
) -> Tensor:
    """What enters the first stage for `tokens`, which stand at `position`: f32 [n, n_embd], or with `as_ids`
    the i32 tokens themselves where no picture is among them. Raises as `Compute.embed` does."""
    where, rows = pictures.within(position, len(tokens)) if pictures is not None else (_NONE, _NONE)
    if not len(where):
        return tokens if as_ids else await compute.embed(model, tokens)
    if len(where) == len(tokens):
        return rows
    text = tokens.copy()
    text[where] = 0
    mixed = (await compute.embed(model, text)).copy()
    mixed[where] = rows
    return mixed


async def read_pictures(
    compute: Compute, entry: CatalogueEntry, prompt: Prompt, n_ctx: int
) -> tuple[Tensor, PictureRows]:
    """Tokenise the text of a prompt between its pictures, and encode these, one after the other: i32 [n] with
    ids of rows in it, and the rows. Raises InvalidRequest where the model takes no pictures or one cannot be
    decoded, ContextFull as soon as they are too many, and what workers raise."""
    model, projector = ModelFile.of(entry), entry.projector
    if projector is None:
        raise InvalidRequest(f"{entry.name} takes no pictures; send text only", field=prompt.field)
    text = prompt.text
    if text is None:
        text = await compute.apply_template(
            model, prompt.messages or [], prompt.tools, prompt.effort, prompt.template
        )
    parts = prompt.pictures.split(text)
    if parts and not isinstance(parts[0], str):
        parts = ("", *parts)  # What the model wants at the beginning of a text stands before a picture, too.
    place: TextPlace = "first" if prompt.text is None else "whole"
    runs: list[Tensor] = []
    rows: list[Tensor] = []
    ends: set[int] = set()
    digest = blake3(key=_ROW_IDS)
    n_tokens = 0
    for part in parts:
        if isinstance(part, str):
            runs.append(await compute.tokenize(model, text=part, place=place))
            place = "later"
        else:
            try:
                encoded = await compute.encode_picture(model, projector, part)
            except InvalidRequest as error:
                # The worker names its own field.
                raise InvalidRequest(error.message, field=prompt.field) from None
            identity = f"{projector.blake3} {part.digest}".encode()
            runs.append(with_row_ids(encoded.tokens, identity))
            rows.append(encoded.rows)
            ends |= {n_tokens + end for end in encoded.ends}
            digest.update(n_tokens.to_bytes(4, "little") + identity)
        n_tokens += len(runs[-1])
        if n_tokens >= n_ctx:
            raise ContextFull(
                f"the prompt has {n_tokens} tokens and more; {entry.name} has room for {n_ctx} here",
                field=prompt.field,
            )
    tokens = np.concatenate(runs)
    positions = np.flatnonzero(tokens >= FIRST_ROW_ID).astype(np.int32)
    return tokens, PictureRows(positions, np.concatenate(rows), tuple(sorted(ends)), digest.digest())


def with_row_ids(tokens: Tensor, identity: bytes) -> Tensor:
    """i32 [n] of the same picture and projector always the same: tokens, and in the place of -1 an id of that
    row."""
    is_row = tokens < 0
    n_rows = int(np.count_nonzero(is_row))
    ids = np.frombuffer(blake3(identity, key=_ROW_IDS).digest(4 * n_rows), "<u4")
    run = np.array(tokens, np.int32)
    run[is_row] = (ids % FIRST_ROW_ID + FIRST_ROW_ID).astype(np.int32)
    return run


_NONE: Final = np.empty(0, np.int32)
