"""Pictures and sounds in a prompt: the rows that they become, and the ids that stand for them in a list of
tokens.

The encoder turns a picture or a sound into rows, as wide as the model's hidden states, and some tokens around
them; what is said of pictures here holds for sounds. The
origin embeds prompts anyway, and hidden states enter the first stage like those of any other stage; so a
picture's rows take the place of embedding rows there, and no stage knows that there was a picture, unless its
rows stand on a grid or see each other.

Where tokens are counted, kept or hashed, each row is an id above every vocabulary that follows from the
picture and the projector. Such an id never reaches a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from swarmllm.pictures import MediumName
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.picture_runs import PictureRun
from swarmllm_proto.tensors import Tensor

FIRST_ROW_ID: Final = 2**30
"""Above every vocabulary; with 30 bits behind it, still an i32."""
ROW_IDS: Final = b"rows of a picture".ljust(32)


@dataclass(frozen=True, slots=True)
class EncodedBy:
    """The node that encoded one picture or sound, for reports."""

    node_id: NodeId
    nickname: str
    n_rows: int
    seconds: float
    is_kept: bool
    """It was there from an earlier prompt; `node_id` is this node."""
    is_rounded: bool = False
    """Its rows were rounded on their way from another node."""
    medium: MediumName = "picture"


class PictureMark(NamedTuple):
    """The place of a picture in a prompt, and its digest."""

    position: int
    digest: bytes
    """32 bytes: of the projector, the picture and the rows that it became."""


@dataclass(frozen=True, slots=True, eq=False)
class PictureRows:
    """All rows of a prompt that are not tokens."""

    positions: Tensor
    """i32 [n], ascending."""
    rows: Tensor
    """f32 [n, n_embd], or with further parts [n, n_embd_input]."""
    ends: tuple[int, ...]
    """Positions at which a run of rows, or of tokens, ends: chunks end there, too, so that the batches are
    those in which one process would compute the prompt."""
    marks: tuple[PictureMark, ...]
    """One for each picture, in their order."""
    looked: tuple[EncodedBy, ...] = ()
    """Who looked at each picture."""
    runs: tuple[PictureRun, ...] = ()
    """Of the rows those that stand on a grid or see each other."""

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
    """What enters the first stage for `tokens`, which stand at `position`: f32 [n, n_embd], or where a
    picture's rows are among them as wide as these, with zeros behind the others, or with `as_ids`
    the i32 tokens themselves where no picture is among them. Raises as `Compute.embed` does."""
    where, rows = pictures.within(position, len(tokens)) if pictures is not None else (_NONE, _NONE)
    if not len(where):
        return tokens if as_ids else await compute.embed(model, tokens)
    if len(where) == len(tokens):
        return rows
    text = tokens.copy()
    text[where] = 0
    found = await compute.embed(model, text)
    mixed = np.zeros((len(tokens), rows.shape[1]), np.float32)
    mixed[:, : found.shape[1]] = found
    mixed[where] = rows
    return mixed


def rows_digest(projector: str, picture: str, rows: Tensor, runs: Sequence[PictureRun] = ()) -> bytes:
    """Of what a picture became with a projector, and how its rows stand: 32 bytes. Takes some milliseconds
    for 10 MB."""
    identity = f"{projector} {picture}".encode() + msgspec.msgpack.encode(runs)
    return blake3(identity, key=ROW_IDS).update(np.ascontiguousarray(rows).view(np.uint8).data).digest()


def with_row_ids(tokens: Tensor, identity: bytes) -> Tensor:
    """i32 [n] of the same `identity` always the same: tokens, and in the place of -1 an id of that
    row."""
    is_row = tokens < 0
    n_rows = int(np.count_nonzero(is_row))
    ids = np.frombuffer(blake3(identity, key=ROW_IDS).digest(4 * n_rows), "<u4")
    run = np.array(tokens, np.int32)
    run[is_row] = (ids % FIRST_ROW_ID + FIRST_ROW_ID).astype(np.int32)
    return run


_NONE: Final = np.empty(0, np.int32)
